"""Every field of an objective, in every kind: it changes what is learned, or it is refused.

The fields are those that `ObjectiveConfig` has, so that a new one cannot be left out here.
"""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from areal_ray.algorithms.aggregation import GlobalCounts, token_weights
from areal_ray.algorithms.losses import TokenColumns, policy_loss
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.presets import PRESETS
from areal_ray.core.trajectory import Group, Outcome
from areal_ray.core.typed_yaml import all_keys
from areal_ray.engines.advantage_columns import (
    Signals,
    score_step,
    step_normalised,
    token_advantages,
)
from areal_ray.engines.objective_checks import Surroundings, objective_problems
from areal_ray.engines.protocols import SamplingConfig
from areal_ray.engines.step_batch import train_batch
from areal_ray.engines.train_config import CriticConfig, ReferenceConfig, TeacherConfig
from areal_ray.engines.train_rows import collect_lines
from tests.support.tiny_groups import random_group

LIMIT = 12
KL = {"kl_ctl": 0.1, "estimator": "k2"}
TEACHER = {"weight": 0.5, "rl_weight": 0.5}
# One or more values of each field that no kind stands for.
OTHER = {
    "loss": ["ppo_clip", "reinforce", "gspo", "sapo", "cispo", "topr"],
    "clip_centre": ["behaviour", "proximal"],
    "prox_logp_method": ["loglinear", "reuse"],
    "behaviour_weight": ["none", "full", "mask", "clamp"],
    "rejection_sampling.level": ["sequence"],
    "rejection_sampling.aggregation": ["sum", "max"],
    "rejection_sampling.metric": ["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"],
    "rejection_sampling.action": ["mask", "clamp"],
    "rejection_sampling.upper": [0.2, 1.1],
    "rejection_sampling.lower": [0.95, -0.01],
    "m2_threshold": [0.01],
    "aggregation": [
        "token_mean", "sequence_mean", "sequence_sum", "fixed_length", "rollout_mean",
    ],
    "fixed_length_tokens": [7],
    "eps_clip": [0.5],
    "eps_clip_higher": [0.05],
    "c_clip": [1.01],
    "sapo_tau_pos": [3.0],
    "sapo_tau_neg": [3.0],
    "entropy_coef": [0.1],
    "reward_shaping.overlong_tokens": [8],
    "reward_shaping.overlong_penalty_factor": [0.3],
    "reward_shaping.overlong_limit_tokens": [10],
    "reward_shaping.bias": [0.3],
    "reward_shaping.scaling": [0.3],
    "reward_shaping.clip": [0.3],
    "reward_norm.mean": ["group", "leave_one_out", "batch", "none"],
    "reward_norm.std": ["group", "batch", "none"],
    "reward_norm.unbiased": [True],
    "advantage_norm.mean": ["group", "batch", "none"],
    "advantage_norm.std": ["group", "batch", "none"],
    "advantage_norm.unbiased": [True],
    "min_reward_spread": [10.0],
    "gae.discount": [0.9],
    "gae.gae_lambda": [0.5],
    "gae.unit": ["turn"],
    "gae.lambda_method": ["length_adaptive", "relative_position"],
    "gae.alpha": [0.3],
    "gae.share": [0.1],
    "branch_discount": [0.5],
    "kl.kl_ctl": [0.4],
    "kl.estimator": ["k1", "k3"],
    "kl.where": ["reward", "loss"],
    "distillation.weight": [2.0],
    "distillation.rl_weight": [2.0],
    "distillation.clip": [0.1],
    "mask_truncated": [True],
    "skip_zero_advantage": [False],
}  # fmt: skip
# Fields that only some other setting lets speak, with that setting.
BESIDE = {
    "rejection_sampling.aggregation": {"rejection_sampling": {"level": "sequence"}},
    "reward_shaping.overlong_penalty_factor": {"reward_shaping": {"overlong_tokens": 8}},
    "reward_shaping.overlong_limit_tokens": {"reward_shaping": {"overlong_tokens": 8}},
    "gae.alpha": {"gae": {"lambda_method": "length_adaptive"}},
    "gae.share": {"gae": {"lambda_method": "relative_position"}},
    "fixed_length_tokens": {"aggregation": "fixed_length"},
    "c_clip": {"loss": "ppo_clip", "behaviour_weight": "none"},
    "sapo_tau_pos": {"loss": "sapo", "behaviour_weight": "none"},
    "sapo_tau_neg": {"loss": "sapo", "behaviour_weight": "none"},
}
WAYS_OUT = ("Remove", "Use", "Give", "Add", "Change", "Raise", "Lower", "Set", "must be")


def field_names():
    """Every key of an objective that is no section."""
    keys = list(all_keys(ObjectiveConfig))
    sections = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in sections and key != "kind"]


def said_of(kind, key, value, beside):
    """What a recipe says: the sections that the key belongs to, and the key itself."""
    said = {"kind": kind, **{k: dict(v) if isinstance(v, dict) else v for k, v in beside.items()}}
    section, _, name = key.rpartition(".")
    if section == "kl":
        said["kl"] = dict(KL, where="reward" if kind != "opd" else "loss")
    if section == "distillation" and kind != "opd":
        said["distillation"] = dict(TEACHER)
    without = {k: dict(v) if isinstance(v, dict) else v for k, v in said.items()}
    if section:
        known = getattr(ObjectiveConfig(**said), section) if section.endswith("_norm") else None
        whole = {} if known is None else known.model_dump()
        said[section] = {**whole, **said.get(section, {}), name: value}
    else:
        said[name] = value
    return without, said


def around(objective):
    return Surroundings(
        critic=CriticConfig() if objective.kind == "ppo" else None,
        reference=ReferenceConfig() if objective.kl is not None else None,
        teacher=TeacherConfig(path="t") if objective.distillation is not None else None,
        sampling=SamplingConfig(max_new_tokens=LIMIT),
        n_samples=4,
        groups_per_step=4,
        num_minibatches=1,
    )


def told_or_made(said):
    """Why it is refused, or the objective."""
    try:
        objective = ObjectiveConfig(**said)
    except ValidationError as error:
        return str(error)
    problems = objective_problems(objective, around(objective))
    return "\n".join(problems) or objective.with_limit(LIMIT)


def groups():
    """Four groups: mixed rewards, a flat one, a sub-agent's branch, an episode cut short."""
    rng = np.random.default_rng(0)
    given = ([1.0, 0.0, 0.2, 0.7], [0.5] * 4, [0.0, 0.0, 1.0, -1.0], [0.1, 0.9, 0.4, 0.3])
    made = [random_group(rng, n, rewards=list(rewards)) for n, rewards in enumerate(given)]
    first = made[0].trajectories
    branch = replace(first[0], branch_id=1, parent_branch_id=0, reward=None)
    short = replace(first[1], outcome=Outcome.TRUNCATED)
    made[0] = Group(made[0].group_id, made[0].task_id, (first[0], branch, short, *first[2:]))
    return made


GROUPS = groups()


@cache
def learned(objective):
    """Loss and gradient on fixed tokens, what is computed, and the metrics of rewards."""
    share = collect_lines(GROUPS, objective, version=1, oldest_version=None)
    (scores,) = score_step([share], objective, lambda numbers: numbers)
    count = sum(line.num_trained for line in share.lines)
    rng = np.random.default_rng(1)
    behaviour = np.concatenate([t.trajectory.behaviour_logprobs[t.trained] for t in share.lines])
    lengths = [line.num_trained for line in share.lines]
    moved = np.repeat(np.where(np.arange(len(lengths)) % 3, 0.1, -0.6), lengths)
    proximal = behaviour + moved + rng.normal(0.02, 0.2, count)
    proximal[::11], proximal[3::13] = behaviour[::11] - 2.0, behaviour[3::13] + 2.5
    for start, logprob in enumerate((-0.05, -0.65, -1.0, -2.0)):  # as far as any metric's bounds
        proximal[7 * start :: 31] = logprob
    signals = Signals(
        policy=proximal,
        reference=proximal + rng.normal(0.0, 0.5, count),
        teacher=proximal + rng.normal(-0.5, 1.0, count),
        values=rng.normal(0.3, 0.3, count) if objective.kind == "ppo" else None,
        bootstraps=np.zeros(len(share.lines)),
    )
    advantages = token_advantages(share, scores.by_line, signals, objective).advantages
    (advantages,) = step_normalised([share], [advantages], objective, lambda numbers: numbers)
    batch = train_batch(share, advantages, scores.equal_groups, objective)
    chosen = batch.chosen
    counts = GlobalCounts(share.counts.tokens, share.counts.sequences, share.counts.rollouts)
    weights = token_weights(
        objective.aggregation, batch.sequence_tokens, batch.rollout_tokens, counts,
        objective.fixed_length_tokens,
    )  # fmt: skip
    logprobs = torch.from_numpy(proximal + rng.normal(0.0, 0.3, count))[chosen].requires_grad_()
    loss, _ = policy_loss(
        objective,
        TokenColumns(
            logprobs=logprobs,
            behaviour_logprobs=torch.from_numpy(behaviour.astype(np.float64))[chosen],
            advantages=torch.from_numpy(batch.advantages),
            token_weights=torch.from_numpy(weights),
            sequence_ids=torch.from_numpy(batch.sequence_ids),
            proximal_logprobs=torch.from_numpy(proximal)[chosen],
            reference_logprobs=torch.from_numpy(signals.reference)[chosen],
            entropy=-logprobs,
        ),
    )
    loss.backward()
    numbers = [loss.item(), len(batch.sequences), scores.equal_groups, *scores.sums.values()]
    return (*numbers, *logprobs.grad.tolist())


def test_every_field_is_looked_at():
    assert sorted(OTHER) == sorted(field_names())


def is_left_alone(key, objective):
    """What the fixed tokens cannot tell: how log-probs are had, what need not be computed."""
    return key == "skip_zero_advantage" or (key == "prox_logp_method" and objective.needs_proximal)


@pytest.mark.parametrize("key", OTHER)
def test_a_setting_changes_what_is_learned_or_is_refused_with_a_way_out(key):
    for kind in PRESETS:
        num_changes = 0
        for beside, value in itertools.product(({}, BESIDE.get(key, {})), OTHER[key]):
            without, said = said_of(kind, key, value, beside)
            before, found = told_or_made(without), told_or_made(said)
            if isinstance(before, str) or before == found:
                continue  # what stands beside it does not go with the kind, or it says nothing new
            num_changes += 1
            if isinstance(found, str):
                assert key.rpartition(".")[2] in found or key.partition(".")[0] in found
                assert any(way in found for way in WAYS_OUT), found
            elif not is_left_alone(key, found):
                assert learned(found) != learned(before), f"{kind}: nothing reads {key}: {value}"
        assert num_changes, f"{kind}: no other value of {key} was tried"


def test_what_teaches_nothing_is_computed_where_asked_for():
    plain, whole = ObjectiveConfig(), ObjectiveConfig(skip_zero_advantage=False)
    assert learned(plain)[:2] != learned(whole)[:2]
