"""Two learner actors are one learner."""

import numpy as np
import pytest
import ray

from areal_ray.core.queue import Ticket
from areal_ray.core.trajectory import encode_group
from areal_ray.engines.train_config import LearnerConfig, OptimizerConfig, TorchTrainConfig
from areal_ray.runtime.fleet import Fleet
from areal_ray.runtime.learner_actor import LearnerActor, LearnerSetup
from areal_ray.runtime.services import LearnerService
from tests.support.needs import needs_deepspeed
from tests.support.tiny_groups import random_group
from tests.support.whole_runs import Runs, assert_books_balance, steps_of


def weights(learner: LearnerActor) -> dict[str, np.ndarray]:
    return {name: t.numpy().copy() for name, t in learner._engine.weights().items()}


async def taught(runs: Runs, ranks: int) -> tuple[dict[str, float], list[dict[str, np.ndarray]]]:
    """Metrics and every rank's weights after a step on the same eight groups."""
    setup = LearnerSetup(
        model_path=str(runs.folder / "tiny"),
        config=LearnerConfig(
            ranks=ranks,
            engine=TorchTrainConfig(dtype="float64", collective_timeout_s=60.0),
            # A small eps would blow rounding up where a gradient is nearly zero.
            optimizer=OptimizerConfig(lr=1e-3, eps=1e-4),
            ppo_n_minibatches=2,
        ),
        total_steps=1,
        num_ranks=ranks,
    )
    names = [f"learner-{rank}" for rank in range(ranks)]
    actors = {
        name: ray.remote(LearnerActor).options(num_cpus=0).remote(name, rank, setup)
        for rank, name in enumerate(names)
    }
    fleet = Fleet("learner", actors)
    try:
        address = await fleet.submit(names[0], "open") if ranks > 1 else ""
        await fleet.broadcast("start", address)
        rng = np.random.default_rng(0)
        groups = [random_group(rng, n, siblings=2 + n % 3) for n in range(8)]
        tickets = [
            Ticket(g.group_id, g.task_id, ray.put(encode_group(g)), (0,), g.num_tokens)
            for g in groups
        ]
        service = LearnerService(fleet, num_minibatches=2, seed=0)
        stats = await service.train_step(tickets, version=0, oldest_version=0)
        held = [await a.__ray_call__.remote(weights) for a in actors.values()]
        return dict(stats.metrics), held
    finally:
        fleet.kill()


def test_two_ranks_take_the_step_that_one_rank_takes(runs: Runs) -> None:
    import asyncio

    one_metrics, (one,) = asyncio.run(taught(runs, 1))
    two_metrics, (first, second) = asyncio.run(taught(runs, 2))
    for name, expected in one.items():
        np.testing.assert_allclose(first[name], expected, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(first[name], second[name])
    for name in ("learner/loss", "learner/trained_tokens", "learner/grad_norm_max"):
        np.testing.assert_allclose(two_metrics[name], one_metrics[name], rtol=1e-5, atol=1e-9)
    moved = max(np.abs(one[name] - expected).max() for name, expected in start(runs).items())
    assert moved > 1e-4


def start(runs: Runs) -> dict[str, np.ndarray]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(runs.folder / "tiny")
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param("torch-ranks", "{kind: torch}", marks=pytest.mark.extended),
        ("fsdp-ranks", "{kind: fsdp}"),
        pytest.param(
            "tensor-ranks", "{kind: fsdp, tensor_parallel: 2}", marks=pytest.mark.extended
        ),
        pytest.param(
            "sequence-ranks", "{kind: fsdp, sequence_parallel: 2}", marks=pytest.mark.extended
        ),
        pytest.param("deepspeed-ranks", "{kind: deepspeed}", marks=needs_deepspeed),
    ],
)
def test_a_run_with_two_ranks_and_two_replicas_reaches_its_end(
    runs: Runs, name: str, engine: str
) -> None:
    ranks = (f"learner.engine={engine}", "learner.ranks=2", "rollout.replicas=2")
    summary = runs.run(name, *ranks, "steps=4")
    assert (summary.outcome, summary.steps, summary.version) == ("finished", 4, 4)
    folder = runs.folder / name
    assert steps_of(folder) == [1, 2, 3, 4]
    counts = assert_books_balance(folder)
    assert counts["trained"] == 16
