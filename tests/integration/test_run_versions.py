"""Version stamps through learner, publish, rollout and agent actors: never a wrong one."""

import pytest
import ray
from safetensors.torch import load_file

from areal_ray.actors import LearnerSetup
from areal_ray.agents.episode import AgentConfig
from areal_ray.core.task import Task
from areal_ray.core.trajectory import decode_group
from areal_ray.engines.protocols import SamplingConfig
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.engines.train_config import LearnerConfig
from areal_ray.runtime.agent_actor import AgentActor
from areal_ray.runtime.learner_actor import LearnerActor
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from areal_ray.runtime.rollout_actor import RolloutActor
from areal_ray.runtime.rollout_config import RolloutConfig
from areal_ray.runtime.weights_config import WeightsConfig
from areal_ray.telemetry.rows import read_rows
from tests.support.tiny_models import write_tiny_model
from tests.support.whole_runs import Runs, assert_books_balance

FIRST = 40
"""Version v samples this token id + v, whatever it is asked."""


def force(learner: LearnerActor, version: int) -> None:
    """Weights under which every position's output is one direction, and one token answers it."""
    import torch

    with torch.no_grad():
        for name, tensor in learner._engine.weights().items():
            if "embed" in name or "norm" in name:
                tensor.fill_(1.0)
            elif name.startswith("lm_head"):
                tensor.zero_()
                tensor[FIRST + version].fill_(10.0)
            else:
                tensor.zero_()


def test_no_token_carries_a_version_other_than_the_one_that_sampled_it(runs: Runs) -> None:
    model = str(write_tiny_model(runs.folder / "untied", tie_word_embeddings=False))
    spawned = []

    def spawn(cls, *args, **fields):
        spawned.append(ray.remote(cls).options(num_cpus=0).remote(*args, **fields))
        return spawned[-1]

    engine = TorchGenerationConfig(max_context_tokens=1024)
    sync = spawn(ParamSyncActor, WeightsConfig())
    setup = LearnerSetup(model_path=model, config=LearnerConfig(), total_steps=1)
    learner = spawn(LearnerActor, "learner-0", 0, setup)
    names = ("rollout-0", "rollout-1")
    replicas = {
        name: spawn(RolloutActor, name, model, RolloutConfig(engine=engine), version=0)
        for name in names
    }
    agent = spawn(
        AgentActor,
        "agent-0",
        model_path=model,
        config=AgentConfig(run="tests.support.agents:many_turns", args={"turns": 8}),
        sampling=SamplingConfig(max_new_tokens=40),
        replicas=replicas,
        context_tokens=1024,
    )
    ray.get(learner.start.remote(""), timeout=120)
    ray.get(sync.set_members.remote(learner, replicas), timeout=120)

    def publish(version: int) -> None:
        ray.get(learner.__ray_call__.remote(force, version), timeout=60)
        ray.get(sync.publish.remote(version), timeout=60)

    publish(1)
    method = agent.run_group.options(num_returns=2)
    tasks = [Task(f"t{n}", ({"role": "user", "content": "hi"},)) for n in range(4)]
    asked = [method.remote(task, f"g-{task.id}", 4, 0) for task in tasks]
    version = 1
    while version < 40 and len(ray.wait([s for s, _ in asked], num_returns=4, timeout=0)[0]) < 4:
        version += 1
        publish(version)
    seen, mixed = set(), 0
    for _, payload in asked:
        for line in decode_group(ray.get(payload, timeout=120)).trajectories:
            sampled, versions = line.token_ids[line.loss_mask], line.versions[line.loss_mask]
            assert (sampled == FIRST + versions).all()
            assert (line.versions[~line.loss_mask] == -1).all()
            within = [set(versions[line.turn_ids[line.loss_mask] == turn]) for turn in range(8)]
            mixed += sum(len(turn) > 1 for turn in within)
            seen |= set(versions.tolist())
    assert len(seen) > 2
    assert mixed, "no turn was under way during a publish"
    for actor in spawned:
        ray.kill(actor)


@pytest.mark.extended
def test_a_run_whose_weights_travel_in_half_the_bits_keeps_its_versions_and_proofs(
    runs: Runs,
) -> None:
    """Changes alone over the wire, too."""
    wire = ("weights.shares_memory=false", "weights.full_every=3")
    summary = runs.run("halves", "weights.dtype=bfloat16", *wire)
    assert (summary.outcome, summary.version) == ("finished", summary.steps)
    folder = runs.folder / "halves"
    assert_books_balance(folder)
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step"]
    whole = sum(t.nbytes for t in load_file(runs.folder / "tiny/model.safetensors").values())
    assert {row["publish/bytes"] for row in rows} == {whole / 2}
    assert not any(row["publish/differing_replicas"] for row in rows)
    # Rounded weights are another policy than the learner's, and a close one.
    gaps = [row["publish/probe_mean_nats"] for row in rows]
    assert 1e-5 < max(gaps) < 0.1
