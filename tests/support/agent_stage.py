"""Rollout replicas of a tiny model, and the agent actors that a test puts on them."""

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_ray.agents.episode import AgentConfig
from areal_ray.core.summaries import GroupSummary
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Group, decode_group
from areal_ray.engines.protocols import SamplingConfig
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.runtime.rollout_config import RolloutConfig
from tests.support.tiny_models import write_tiny_model

ROOT = str(Path(__file__).resolve().parents[2])


def ask(text: str = "hi") -> Task:
    """A task of its own."""
    return Task(f"t-{uuid.uuid4().hex[:6]}", ({"role": "user", "content": text},))


class Stage:
    """Two rollout replicas and the agent actors that a test puts on them."""

    def __init__(self, folder: Path) -> None:
        import ray

        from areal_ray.runtime.rollout_actor import RolloutActor

        self.ray = ray
        self.model = str(write_tiny_model(folder))
        config = RolloutConfig(engine=TorchGenerationConfig(max_context_tokens=512))
        self.replicas = {
            name: ray.remote(RolloutActor)
            .options(num_cpus=0, max_restarts=-1)
            .remote(name, self.model, config, version=3)
            for name in ("rollout-0", "rollout-1")
        }
        self.agents: list[Any] = []

    def agent(self, run: str = "", *, max_new_tokens: int = 6, **fields: Any) -> Any:
        """An actor whose agent is a function of `tests.support.agents`, or as the fields say."""
        from areal_ray.runtime.agent_actor import AgentActor

        named = {"run": f"tests.support.agents:{run}"} if run else {}
        config = AgentConfig(**{"timeout_s": 60.0, **named, **fields})
        actor = (
            self.ray.remote(AgentActor)
            .options(num_cpus=0)
            .remote(
                f"agent-{len(self.agents)}",
                model_path=self.model,
                config=config,
                sampling=SamplingConfig(max_new_tokens=max_new_tokens),
                replicas=self.replicas,
                context_tokens=512,
                search=[ROOT],
            )
        )
        self.agents.append(actor)
        return actor

    def run(self, actor: Any, task: Task, n: int = 4, seed: int = 0) -> tuple[GroupSummary, Group]:
        """A group of n episodes."""
        method = actor.run_group.options(num_returns=2)
        summary, payload = method.remote(task, f"g-{task.id}", n, seed)
        return self.ray.get(summary, timeout=120), decode_group(self.ray.get(payload, timeout=120))

    def counts(self, actor: Any) -> tuple[int, int]:
        """Calls of its client to replicas: submits and collects."""
        return self.ray.get(
            actor.__ray_call__.remote(
                lambda self: (self._rollouts.num_submits, self._rollouts.num_collects)
            )
        )


@pytest.fixture(scope="module")
def stage(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One for a module's tests."""
    made = Stage(tmp_path_factory.mktemp("model"))
    yield made
    for actor in (*made.agents, *made.replicas.values()):
        made.ray.kill(actor, no_restart=True)
