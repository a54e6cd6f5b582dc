"""Weights over NCCL, from a learner on one GPU to a replica on another. Needs two of them."""

import pytest
import torch

from tests.support.ray_session import shared_ray
from tests.support.whole_runs import Runs, steps_of

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA GPUs, one a member of the group"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with shared_ray():
        yield Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("backend", ["nccl", "auto"])
def test_a_run_publishes_each_step_and_every_replica_proves_what_it_holds(runs, backend):
    summary = runs.run(
        f"over-{backend}",
        "steps=3",
        "cluster.n_gpus_per_node=2",
        "rollout={num_gpus: 1, engine: {device: cuda}}",
        "learner={num_gpus: 1, engine: {device: cuda}}",
        f"weights.backend={backend}",
    )
    assert (summary.outcome, summary.steps, summary.version) == ("finished", 3, 3)
    assert steps_of(runs.folder / f"over-{backend}") == [1, 2, 3]
