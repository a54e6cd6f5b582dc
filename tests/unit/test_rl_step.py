"""One RL step of every kind on a tiny model: exact however cut, and every part takes effect."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import (
    DistillationConfig,
    GaeConfig,
    KlConfig,
    RejectionSamplingConfig,
    RewardShapingConfig,
)
from areal_ray.algorithms.packing import TrainSequence
from areal_ray.algorithms.presets import PRESETS
from areal_ray.core.trajectory import Group, Outcome
from areal_ray.engines.critic import Critic
from areal_ray.engines.sharding import Replicated
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import (
    Companions,
    CriticConfig,
    LearnerConfig,
    OptimizerConfig,
    TorchTrainConfig,
)
from areal_ray.engines.train_rows import collect_lines
from areal_ray.errors import DataError, EngineError
from areal_ray.telemetry.names import METRICS
from tests.support.tiny_groups import random_group
from tests.support.tiny_models import write_tiny_model

# A small eps of Adam would blow up rounding where a gradient is next to nothing.
CALM = {"eps": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("policy"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another model of the same vocabulary."""
    return write_tiny_model(tmp_path_factory.mktemp("other"), num_hidden_layers=1, seed=5)


def _engine(
    folder, kind="grpo", *, companions=None, engine=None, lr=1e-3, temperature=1.0, **parts
):
    config = LearnerConfig(
        engine=TorchTrainConfig(**{"dtype": "float64", **(engine or {})}),
        optimizer=OptimizerConfig(lr=lr, **CALM),
    )
    objective = ObjectiveConfig(kind=kind, **parts).with_limit(11)
    return TorchTrainEngine(
        folder, config, objective=objective, temperature=temperature, companions=companions
    )


def _groups(count=4, seed=0, **shape):
    rng = np.random.default_rng(seed)
    return [random_group(rng, number, **shape) for number in range(count)]


def _mixed():
    """Groups of several ages and lengths, one with equal rewards, one with a second branch."""
    groups = [*_groups(3, version=3), *_groups(2, seed=9, siblings=5, version=2)]
    groups.append(_groups(1, seed=5, rewards=[1.0] * 4, version=3)[0])
    first = groups[0].trajectories[0]
    named = {**_names(first), "branch_id": 1, "parent_branch_id": 0, "reward": first.reward}
    branch = replace(groups[1].trajectories[1], **named)
    group = Group(groups[0].group_id, groups[0].task_id, (*groups[0].trajectories, branch))
    return [group, *groups[1:]]


def _names(trajectory):
    fields = ("group_id", "task_id", "episode_id")
    return {name: getattr(trajectory, name) for name in fields}


def _copies(engine):
    return {name: tensor.clone() for name, tensor in engine.weights().items()}


def _distance(one, two):
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def _companions(kind, other, **more):
    paths = {"opd": {"teacher_path": str(other)}, "ppo": {"critic_path": str(other)}}
    critic = CriticConfig(optimizer=OptimizerConfig(lr=1e-3, **CALM))
    return Companions(**{**paths.get(kind, {}), **more}, critic=critic)


# Exactness

EXTRAS = {
    "kl in the reward": ("grpo", {"kl": KlConfig(kl_ctl=0.1)}),
    "kl in the loss": ("grpo", {"kl": KlConfig(kl_ctl=0.1, estimator="k3", where="loss")}),
    "entropy bonus": ("grpo", {"entropy_coef": 0.01}),
    "per rollout": ("decoupled_ppo", {"aggregation": "rollout_mean"}),
    "discounted": ("grpo", {"gae": GaeConfig(discount=0.9), "branch_discount": 0.5}),
    "sequences rejected": (
        "decoupled_ppo",
        {"rejection_sampling": RejectionSamplingConfig(level="sequence", upper=1.05)},
    ),
    "loglinear": ("decoupled_ppo", {"prox_logp_method": "loglinear"}),
    "turns with a critic": ("ppo", {"gae": GaeConfig(unit="turn", gae_lambda=0.9)}),
    "shaped": (
        "dapo",
        {"reward_shaping": RewardShapingConfig(overlong_tokens=5, scaling=2.0, clip=1.5)},
    ),
    "joint": ("grpo", {"distillation": DistillationConfig(weight=0.1, rl_weight=1.0)}),
}
CASES = {**{kind: (kind, {}) for kind in PRESETS}, **EXTRAS}


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_any_objective_is_the_same_however_the_batch_is_cut(case, folder, other):
    kind, parts = CASES[case]
    paths = {"teacher_path": str(other)} if case == "joint" else {}
    if "kl" in parts:
        paths["reference_path"] = str(other)
    companions = _companions(kind, other, **paths)
    groups = _mixed()
    whole = _engine(folder, kind, companions=companions, **parts)
    first = whole.train_step([groups[:3], groups[3:]], 3)
    assert first.num_updates == 2
    assert [name for name in first.metrics if name not in METRICS] == []
    before = _copies(_engine(folder))
    assert _distance(_copies(whole), before) > 1e-6
    cut = _engine(
        folder, kind, companions=companions, skip_zero_advantage=False,
        engine={"max_tokens_per_mb": 60, "share_prefixes": False}, **parts,
    )  # fmt: skip
    again = cut.train_step([groups[2::-1], groups[:2:-1]], 3)
    assert _distance(_copies(cut), _copies(whole)) < 1e-6
    for name, value in first.metrics.items():
        if name in _SAME or name.startswith("learner/value"):
            assert again.metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


_SAME = ("learner/loss", "learner/grad_norm_max", "learner/trained_tokens", "reward/shaped_mean")


@pytest.mark.parametrize("kind", ["reinforce_pp", "reinforce_pp_baseline", "lite_ppo"])
def test_statistics_of_a_step_are_over_all_its_minibatches(kind, folder):
    """Cutting a step into minibatches must not change anyone's advantage: with a learning rate of
    nothing the summed losses of two minibatches are those of one."""
    groups = _groups(4)
    lr = 1e-12
    one = _engine(folder, kind, lr=lr, aggregation="fixed_length").train_step([groups], 0)
    two = _engine(folder, kind, lr=lr, aggregation="fixed_length").train_step(
        [groups[:2], groups[2:]], 0
    )
    counts = [sum(len(g.trajectories) for g in part) for part in (groups[:2], groups[2:])]
    assert counts[0] == counts[1]
    assert two.metrics["learner/loss"] == pytest.approx(one.metrics["learner/loss"], abs=1e-9)


# Reference


def test_kl_in_the_loss_draws_the_policy_to_its_reference(folder, other):
    kl = KlConfig(kl_ctl=1.0, estimator="k2", where="loss")
    companions = Companions(reference_path=str(other))
    engine = _engine(folder, companions=companions, kl=kl, lr=1e-2)
    groups = _groups(2, rewards=[1.0] * 4)  # no advantage: the KL alone has a gradient
    found = [engine.train_step([groups], 0).metrics["learner/kl_reference_nats"] for _ in range(6)]
    assert found[-1] < 0.7 * found[0]


def test_a_policy_that_still_is_its_reference_has_no_kl(folder):
    engine = _engine(
        folder, companions=Companions(reference_path=str(folder)), kl=KlConfig(kl_ctl=1.0)
    )
    plain = _engine(folder)
    groups = _groups(2)
    metrics = engine.train_step([groups], 0).metrics
    plain.train_step([groups], 0)
    assert metrics["learner/kl_reference_nats"] == pytest.approx(0.0, abs=1e-6)
    assert _distance(_copies(engine), _copies(plain)) < 1e-6


@pytest.mark.parametrize(
    ("parts", "name"),
    [({"kl": KlConfig(kl_ctl=0.1)}, "reference"), ({"kind": "opd"}, "teacher")],
)
def test_an_objective_whose_model_is_not_there_is_refused(parts, name, folder):
    with pytest.raises(EngineError, match=f"reads a {name} model, and none was given"):
        _engine(folder, **parts)


# Teacher


def _sampled(folder, engine, count, seed, prompt):
    """Groups of one-token answers drawn from the engine's own policy."""
    model = engine._model
    with torch.no_grad():
        table = torch.log_softmax(model(prompt[None]).logits[0, -1].double(), -1)
    drawn = torch.multinomial(table.exp(), count, True, generator=torch.manual_seed(seed))
    rng = np.random.default_rng(0)
    shape = random_group(rng, siblings=1, prompt_tokens=len(prompt), turns=(1,)).trajectories[0]
    lines = []
    for number, token in enumerate(drawn.tolist()):
        logprobs = np.zeros(len(prompt) + 1, np.float32)
        logprobs[-1] = table[token]
        ids = np.append(prompt.numpy(), token).astype(np.int32)
        lines.append(
            replace(
                shape,
                token_ids=ids,
                behaviour_logprobs=logprobs,
                episode_id=str(number),
                reward=0.0,
            )
        )
    return Group(shape.group_id, shape.task_id, tuple(lines)), table


def test_distillation_brings_the_policy_nearer_to_its_teacher(folder, other):
    engine = _engine(folder, "opd", companions=Companions(teacher_path=str(other)), lr=3e-3)
    teacher = _engine(other)
    prompt = torch.arange(10, 22)
    with torch.no_grad():
        wanted = torch.log_softmax(teacher._model(prompt[None]).logits[0, -1].double(), -1)
    found = []
    for step in range(8):
        group, table = _sampled(folder, engine, 64, step, prompt)
        found.append(float((table.exp() * (table - wanted)).sum()))
        engine.train_step([[group]], step)
    assert found[-1] < 0.8 * found[0]


# Critic


def _lines(groups):
    return collect_lines(groups, ObjectiveConfig(), 0, None).lines


def _critic(path, lr=1e-2, **engine):
    config = CriticConfig(optimizer=OptimizerConfig(lr=lr, **CALM), eps_clip=None)
    return Critic(
        path, config, TorchTrainConfig(dtype="float64", **engine), Replicated(), total_steps=9
    )


def test_a_critic_learns_what_the_returns_are(folder):
    critic = _critic(folder)
    lines = _lines(_groups(2))
    share = critic.judge(lines)
    assert not share.values.any()  # its head starts at 0
    targets = np.random.default_rng(0).normal(size=len(share.values))
    losses = []
    for _ in range(40):
        critic.begin_step()
        losses.append(critic.fit(critic.judge(lines), targets, len(targets)))
    assert losses[0] == pytest.approx(0.5 * np.square(targets).mean())
    assert losses[-1] < 0.2 * losses[0]


def test_only_a_truncated_trajectory_has_a_value_beyond_its_end(folder):
    critic = _critic(folder)
    lines = _lines(_groups(1))
    lines[1] = replace(lines[1], trajectory=replace(lines[1].trajectory, outcome=Outcome.TRUNCATED))
    for _ in range(3):
        critic.begin_step()
        critic.fit(critic.judge(lines), np.ones(sum(x.num_trained for x in lines)), 1)
    share = critic.judge(lines)
    assert len(share.values) == sum(line.num_trained for line in lines)
    assert np.flatnonzero(share.bootstraps).tolist() == [1]
    # It is the value of the last token as a predictor: that of a trajectory with one token more.
    longer = lines[1].trajectory
    ids = np.append(longer.token_ids, 7).astype(np.int32)
    sequence = TrainSequence(ids, np.arange(len(ids)) == len(ids) - 1, 0)
    (micro,) = critic.forward.micro_batches([sequence])
    assert float(critic._values(micro).detach()) == pytest.approx(share.bootstraps[1])


def test_values_know_no_temperature(folder, other):
    """An engine at temperature 0.5 and one at 1 have critics that judge alike."""
    groups = _groups(2)
    found = []
    for temperature in (0.5, 1.0):
        engine = _engine(
            folder, "ppo", companions=_companions("ppo", other), temperature=temperature
        )
        for version in range(2):
            engine.train_step([groups], version)
        found.append(engine._critic.judge(_lines(groups)).values)
    assert np.abs(found[0]).max() > 1e-4
    np.testing.assert_allclose(found[0], found[1], atol=1e-12)


def test_a_run_with_a_critic_resumes_exactly(folder, other, tmp_path):
    def fresh(path):
        return _engine(path, "ppo", companions=_companions("ppo", other))

    steps = [[_groups(2, seed=s), _groups(2, seed=10 + s)] for s in range(4)]
    straight, first = fresh(folder), fresh(folder)
    expected = [straight.train_step(step, 0).metrics for step in steps]
    for step in steps[:2]:
        first.train_step(step, 0)
    first.save(tmp_path)
    second = fresh(tmp_path)
    second.load(tmp_path)
    again = [second.train_step(step, 0).metrics for step in steps[2:]]
    assert _distance(_copies(second), _copies(straight)) < 1e-9
    for name in ("learner/value_loss", "learner/value_explained_variance_fraction"):
        assert [m[name] for m in again] == pytest.approx([m[name] for m in expected[2:]], abs=1e-9)
    (tmp_path / "critic_state.pt").unlink()
    with pytest.raises(DataError, match="cannot resume the critic"):
        fresh(tmp_path).load(tmp_path)


def test_a_critic_trains_on_a_minibatch_that_teaches_the_policy_nothing(folder, other):
    engine = _engine(folder, "ppo", companions=_companions("ppo", other))
    before = _copies(engine)
    groups = _groups(2, rewards=[1.0] * 4)  # all tokens alike: advantage_norm leaves nothing
    stats = engine.train_step([groups], 0)
    assert stats.num_updates == 0
    assert _distance(_copies(engine), before) == 0.0
    assert stats.metrics["learner/value_loss"] == pytest.approx(0.5)
    assert engine._critic.judge(_lines(groups)).values.mean() > 0.0


# Mismatch


def test_mismatch_is_told_apart_by_the_age_of_tokens(folder):
    fresh, aged = _groups(1, version=4), _groups(1, seed=1, version=2)
    engine = _engine(folder)
    metrics = engine.train_step([fresh + aged], 4).metrics
    alone = _engine(folder).train_step([fresh], 4).metrics
    for name in ("kl_nats", "ratio_mean", "ratio_max"):
        assert metrics[f"mismatch/{name}"] == pytest.approx(alone[f"mismatch/{name}"])
        assert f"mismatch/stale_{name}" in metrics
        assert f"mismatch/stale_{name}" not in alone
    assert metrics["mismatch/kl_nats"] > 0.0
    computed = sum(t.num_sampled_tokens for t in fresh[0].trajectories)
    assert metrics["mismatch/fresh_tokens"] == alone["mismatch/fresh_tokens"] == computed
    older = _engine(folder).train_step([aged], 4).metrics
    assert older["mismatch/fresh_tokens"] == 0
    assert "mismatch/kl_nats" not in older
