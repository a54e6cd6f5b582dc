"""Two learner ranks over gloo are one learner: same steps, same numbers, same files."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import GaeConfig, KlConfig
from areal_ray.algorithms.packing import GroupSize, plan_step
from areal_ray.engines.preference import PairTask, PreferenceConfig, PreferencePair
from areal_ray.engines.process_group import RankGroup, Rendezvous
from areal_ray.engines.sft import SftExample
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import (
    Companions,
    CriticConfig,
    LearnerConfig,
    OptimizerConfig,
    TorchTrainConfig,
)
from areal_ray.errors import EngineError
from tests.support.processes import spawn as spawn
from tests.support.tiny_groups import random_group
from tests.support.tiny_models import write_tiny_model

SEED = 7


def _groups():
    rng = np.random.default_rng(0)
    groups = [random_group(rng, n, siblings=2 + n % 3, prompt_tokens=6 + n) for n in range(5)]
    return [*groups, random_group(rng, 5, rewards=[1.0, None, 1.0, 1.0])]


def _examples():
    rng = np.random.default_rng(1)
    lengths = rng.integers(6, 20, 5)
    return [
        SftExample(rng.integers(4, 300, n).astype(np.int32), np.arange(n) >= 3) for n in lengths
    ]


def _config():
    return LearnerConfig(
        engine=TorchTrainConfig(dtype="float64", max_tokens_per_mb=80, collective_timeout_s=200.0),
        # See test_torch_train: a small eps would blow rounding up.
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-4, warmup_steps=2),
    )


def _run(folder, ranks, outbox):
    """Two RL steps, one supervised step, an evaluation; the second RL step after a resume."""
    objective = ObjectiveConfig(kind="decoupled_ppo")
    engine = TorchTrainEngine(folder, _config(), objective=objective, ranks=ranks)
    groups = _groups()
    plan = plan_step(
        [GroupSize(g.num_tokens) for g in groups],
        num_minibatches=2, num_ranks=ranks.size, seed=SEED,
    ).of_rank(ranks.rank)  # fmt: skip
    share = [[groups[i] for i in part] for part in plan]
    first = engine.train_step(share, 1)
    saved = Path(outbox) / "saved"
    engine.save(saved)
    engine.load(saved)
    for attempt in range(20):  # ranks do not get in each other's way where a folder is new
        engine.export(Path(outbox) / f"fresh-{attempt}")
    second = engine.train_step(share, 2, oldest_version=0)
    empty = engine.train_step([[], []], 3)
    taught = engine.sft_step(_examples()[ranks.rank :: ranks.size])
    seen = engine.evaluate_sft(_examples()[ranks.rank :: ranks.size])
    more = [_other_objective(folder, ranks, Path(outbox), case) for case in OBJECTIVES]
    more += [_pair_step(folder, ranks, Path(outbox), scored) for scored in (False, True)]
    timing = ("learner/step_s", "learner/proximal_s", "learner/tokens_per_s")
    # How a share is cut into passes, of which the largest has the most activations.
    layout = (
        *("learner/micro_batches", "learner/computed_tokens", "learner/padded_tokens"),
        "learner/activation_bytes",
    )
    metrics = [
        {k: v for k, v in stats.metrics.items() if k not in (*timing, *layout)}
        for stats in (first, second, empty, taught, *more)
    ]
    return {"metrics": metrics, "seen": seen, "weights": dict(engine.weights())}


OBJECTIVES = {
    "m2po": {"m2_threshold": 0.01},
    "lite_ppo": {"aggregation": "rollout_mean"},
    "reinforce_pp_baseline": {"entropy_coef": 0.01},
    "ppo": {"kl": KlConfig(kl_ctl=0.1), "gae": GaeConfig(gae_lambda=0.9)},
    "opd": {},
}


def _other_objective(folder, ranks, outbox, kind):
    """A step with all that has to be summed over ranks: statistics, cut-offs, a critic."""
    objective = ObjectiveConfig(kind=kind, **OBJECTIVES[kind])
    fixed = str(outbox.parent / "model")
    critic = CriticConfig(optimizer=OptimizerConfig(lr=1e-2, eps=1e-4))
    companions = Companions(
        reference_path=fixed if objective.needs_reference else "",
        teacher_path=fixed if objective.needs_teacher else "",
        critic_path=folder if kind == "ppo" else "",
        critic=critic,
    )
    engine = TorchTrainEngine(
        folder, _config(), objective=objective, ranks=ranks, companions=companions
    )
    groups = _groups()
    plan = plan_step(
        [GroupSize(g.num_tokens) for g in groups], num_minibatches=2, num_ranks=ranks.size, seed=1
    ).of_rank(ranks.rank)
    share = [[groups[i] for i in part] for part in plan]
    engine.train_step(share, 1)
    return engine.train_step(share, 2)


def _pair_step(folder, ranks, outbox, is_scored):
    """The second step on five pairs, three and two on two ranks; it follows from the first."""
    config = PreferenceConfig(source="m:f", steps=2, batch_size=5)
    engine = TorchTrainEngine(
        folder,
        _config(),
        ranks=ranks,
        companions=Companions(reference_path=str(outbox.parent / "model")),
        pairs=PairTask(config, is_scored),
    )
    answers = [e for e in _examples() for _ in range(2)]
    cut = [
        SftExample(e.token_ids[: -1 - n % 2], e.loss_mask[: -1 - n % 2])
        for n, e in enumerate(answers)
    ]
    pairs = [PreferencePair(*cut[n : n + 2]) for n in range(0, len(cut), 2)]
    share = pairs[ranks.rank :: ranks.size]
    engine.pair_step(share)
    seen = engine.evaluate_pairs(share)
    stats = engine.pair_step(share)
    stats.metrics.update({k: v for k, v in seen.metrics().items() if k != "eval/wall_s"})
    return stats


def _rank_main(folder, address, rank, size, outbox):
    torch.set_num_threads(1)
    ranks = RankGroup.join(address, rank, size, timeout_s=200)
    torch.save(_run(folder, ranks, outbox), Path(outbox) / f"rank-{rank}.pt")
    ranks.close()


def _join_only(address, rank, size, timeout_s):
    RankGroup.join(address, rank, size, timeout_s=timeout_s)
    os._exit(0)  # dies without a word, as a killed process does


def test_two_ranks_take_the_same_steps_as_one(tmp_path, spawn):
    folder = write_tiny_model(tmp_path / "model")
    other_start = write_tiny_model(tmp_path / "other", seed=99)
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    meeting = Rendezvous.open("127.0.0.1", 2, timeout_s=200.0)
    # Rank 1 loads other weights: what counts is rank 0's.
    processes = [
        spawn(_rank_main, folder if rank == 0 else other_start, meeting.address, rank, 2,
              tmp_path / "two")
        for rank in range(2)
    ]  # fmt: skip
    alone = _run(folder, RankGroup(), tmp_path / "one")
    for process in processes:
        process.join(timeout=250)
        assert process.exitcode == 0
    results = [
        torch.load(tmp_path / "two" / f"rank-{rank}.pt", weights_only=False) for rank in range(2)
    ]
    assert results[0]["metrics"] == results[1]["metrics"]
    for name, tensor in results[0]["weights"].items():
        assert tensor.equal(results[1]["weights"][name])
        torch.testing.assert_close(tensor, alone["weights"][name], atol=1e-6, rtol=0)
    for step, (both, one) in enumerate(zip(results[0]["metrics"], alone["metrics"], strict=True)):
        assert both == pytest.approx(one, rel=1e-5, abs=1e-6), step
    assert results[0]["seen"].span_exact_match == alone["seen"].span_exact_match
    assert results[0]["seen"].loss == pytest.approx(alone["seen"].loss)
    assert results[0]["seen"].num_examples == 5
    assert alone["metrics"][0]["learner/updates"] == 2


def test_a_rank_that_is_gone_ends_the_others_wait_with_an_error(spawn):
    meeting = Rendezvous.open("127.0.0.1", 2, timeout_s=200.0)
    gone = spawn(_join_only, meeting.address, 1, 2, 200.0)
    ranks = RankGroup.join(meeting, 0, 2, timeout_s=200.0)
    try:
        gone.join(timeout=200)
        with pytest.raises(EngineError, match="Another rank has died or is stuck"):
            ranks.sum_(torch.ones(4))
    finally:
        ranks.close()


def test_ranks_that_never_come_are_waited_for_no_longer_than_said():
    meeting = Rendezvous.open("127.0.0.1", 2, timeout_s=2.0)
    with pytest.raises(EngineError, match="could not meet the others"):
        RankGroup.join(meeting, 0, 2, timeout_s=2.0)
