"""Whether an objective and the sections around it make sense together; no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.engines.protocols import SamplingConfig
from areal_ray.engines.train_config import CriticConfig, ReferenceConfig, TeacherConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The parts of a recipe of kind rl that an objective depends on."""

    critic: CriticConfig | None
    reference: ReferenceConfig | None
    teacher: TeacherConfig | None
    sampling: SamplingConfig
    n_samples: int
    groups_per_step: int
    num_minibatches: int


def objective_problems(objective: ObjectiveConfig, around: Surroundings) -> list[str]:
    """What is wrong, one line each, beginning with the key."""
    return [
        *_model_problems(objective, around),
        *_critic_problems(objective, around),
        *_group_problems(objective, around),
        *_minibatch_problems(objective, around),
        *_length_problems(objective, around),
    ]


def objective_cautions(objective: ObjectiveConfig, bound: int | Literal["unlimited"]) -> list[str]:
    """What may work and rarely does, one line each.

    Args:
        objective: Of a run of kind rl or distill.
        bound: admission.max_head_offpolicyness.
    """
    is_clipped = objective.loss != "reinforce" and objective.clip_centre == "behaviour"
    is_bounded = is_clipped or objective.behaviour_weight in ("clamp", "mask")
    if is_bounded or objective.m2_threshold is not None or bound in (0, 1):
        return []
    return [
        f"objective: loss '{objective.loss}' with behaviour_weight '{objective.behaviour_weight}' "
        f"bounds nothing by how far a token's policy lies back, and admission."
        f"max_head_offpolicyness is {bound}; such runs tend to diverge. Use behaviour_weight "
        "'clamp' or 'mask', a kind that clips, or max_head_offpolicyness 1."
    ]


def _model_problems(objective: ObjectiveConfig, around: Surroundings) -> Iterator[str]:
    if objective.kl is not None and around.reference is None:
        yield (
            "objective.kl: is given without the section reference, the model it is measured "
            "against. Add 'reference: {path: null}' (null = model.path), or remove kl."
        )
    if objective.kl is None and around.reference is not None:
        yield (
            "reference: is given without objective.kl, so nothing would read it. Remove it, or "
            "add objective.kl: {kl_ctl: 0.001}."
        )
    if objective.distillation is not None and around.teacher is None:
        yield (
            "objective.distillation: is given (kind 'opd' implies it) without the section "
            "teacher. Add 'teacher: {path: ...}', or remove it."
        )
    if objective.distillation is None and around.teacher is not None:
        yield (
            "teacher: is given without objective.distillation, so nothing would read it. Remove "
            "it, or use kind 'opd' or add objective.distillation."
        )


def _critic_problems(objective: ObjectiveConfig, around: Surroundings) -> Iterator[str]:
    gae = objective.gae
    if gae.discount == 0.0 and objective.distillation is None:
        yield (
            "objective.gae.discount: is 0 without distillation; an episode's reward would teach "
            f"its last {gae.unit} alone. Use a discount above 0."
        )
    if around.critic is None:
        if objective.kind == "ppo":
            yield (
                "objective.kind: is 'ppo' without the section critic, whose values are its "
                "baseline. Add 'critic: {path: null}' (null = model.path), or use kind 'grpo' or "
                "'decoupled_ppo', which compare an episode with its group and need none."
            )
        if gae.gae_lambda != 1.0 or gae.lambda_method != "constant":
            yield (
                f"objective.gae: has gae_lambda {gae.gae_lambda:g} and lambda_method "
                f"'{gae.lambda_method}' without a critic, to whose values lambda belongs. Remove "
                "them, or add the section critic."
            )
        if gae.unit == "turn" and gae.discount == 1.0 and not objective.has_token_rewards:
            yield (
                "objective.gae.unit: is 'turn' without a critic, with discount 1 and no token "
                "rewards, so every token of an episode has the same advantage anyway. Remove it, "
                "or give a discount below 1, a critic, a kl in the reward or a teacher."
            )
        return
    if objective.has_group_baseline:
        assert objective.reward_norm is not None, "filled in by the kind"
        yield (
            f"critic: is given with objective.reward_norm.mean '{objective.reward_norm.mean}'; "
            "two baselines would be subtracted. Use kind 'ppo' or mean 'none', or remove critic."
        )


def _group_problems(objective: ObjectiveConfig, around: Surroundings) -> Iterator[str]:
    rewards, advantages = objective.reward_norm, objective.advantage_norm
    assert rewards is not None, "filled in by the kind"
    assert advantages is not None, "filled in by the kind"
    is_single = {
        "group": around.n_samples == 1,
        "leave_one_out": around.n_samples == 1,
        "batch": around.n_samples * around.groups_per_step == 1,
    }
    key = {"batch": "admission.groups_per_step"}
    if is_single.get(rewards.mean):
        yield (
            f"{key.get(rewards.mean, 'admission.n_samples')}: is 1 with objective.reward_norm.mean "
            f"'{rewards.mean}'; the baseline is that mean, so a single sample never has an "
            "advantage. Use 2 or more."
        )
    elif is_single.get(rewards.std):
        yield (
            f"{key.get(rewards.std, 'admission.n_samples')}: is 1 with objective.reward_norm.std "
            f"'{rewards.std}'; a single sample has no deviation to be divided by. Use 2 or more, "
            "or another std."
        )
    # With nothing to tell its tokens apart, an episode is one sample to advantage_norm too.
    is_one = objective.gae.discount == 1.0 and not objective.has_token_rewards
    if is_single.get(advantages.mean) and is_one and around.critic is None:
        yield (
            f"{key.get(advantages.mean, 'admission.n_samples')}: is 1 with "
            f"objective.advantage_norm.mean '{advantages.mean}'; the tokens of a single sample "
            "all have its reward, so it never has an advantage. Use 2 or more."
        )


def _minibatch_problems(objective: ObjectiveConfig, around: Surroundings) -> Iterator[str]:
    method, count = objective.prox_logp_method, around.num_minibatches
    if method == "reuse" and count > 1:
        yield (
            f"learner.ppo_n_minibatches: is {count} with objective.prox_logp_method 'reuse', "
            "which takes the training pass itself for the policy at the start of the step; must "
            "be 1. Change it, or use 'recompute' or 'loglinear'."
        )
    if method != "recompute" and objective.m2_threshold is not None:
        yield (
            f"objective.prox_logp_method: is '{method}' with m2_threshold, which judges all "
            "tokens of a minibatch before any of them trains; must be 'recompute'. Change it."
        )


def _length_problems(objective: ObjectiveConfig, around: Surroundings) -> Iterator[str]:
    shaping = objective.with_limit(around.sampling.max_new_tokens).reward_shaping
    buffer, limit = shaping.overlong_tokens, shaping.overlong_limit_tokens
    if buffer is not None and limit is not None and buffer > limit:
        yield (
            f"objective.reward_shaping.overlong_tokens: is {buffer}; must be at most the limit "
            f"of {limit} tokens (overlong_limit_tokens, or rollout.sampling.max_new_tokens). "
            "Lower it."
        )
