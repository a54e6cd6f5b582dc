"""Scores of held-out tasks, out of what the actors answer."""

import asyncio
from typing import Any, cast

import pytest

from areal_ray.core.summaries import GroupSummary, ScoreSummary
from areal_ray.core.task import Task
from areal_ray.engines.protocols import SamplingConfig
from areal_ray.runtime.evaluation import EvaluationResult, EvaluationService, Pinned
from areal_ray.runtime.fleet import Fleet
from areal_ray.runtime.publish_report import Committed
from areal_ray.runtime.run_config import EvaluationConfig


class Scripted:
    """A fleet of one member that answers with the rewards it was given."""

    def __init__(self, rewards: list[list[float | None]]) -> None:
        self.rewards = rewards

    async def least_busy(self) -> str:
        return "only"

    async def submit_payload(self, member: str, method: str, tasks: Any, *rest: Any) -> Any:
        facts = dict.fromkeys(GroupSummary.__dataclass_fields__, 0)
        texts = {"group_id": "g", "task_id": "t", "outcomes": {}, "failures": (), "splits": {}}
        made = GroupSummary(**cast(Any, {**facts, **texts, "seconds": {}}))
        return [made] * len(tasks), None

    async def submit(self, member: str, method: str, *rest: Any) -> Any:
        return [ScoreSummary("g", tuple(told), told.count(None)) for told in self.rewards]


def score(rewards: list[list[float | None]]) -> EvaluationResult:
    samples = len(rewards[0])
    config = EvaluationConfig.model_validate(
        {
            "tasks": {"source": "x:y"},
            "n_samples": samples,
            "sampling": SamplingConfig(temperature=1.0),
        }
    )
    fleet = cast(Fleet, Scripted(rewards))
    tasks = [Task(str(i), ({"role": "user", "content": "?"},)) for i in range(len(rewards))]
    service = EvaluationService(
        config, tasks, replica=None, agents=fleet, rewards=fleet, sync=None, first_version=0, seed=0
    )
    return asyncio.run(service.score(Pinned(0, Committed(0))))


def test_accuracy_is_over_all_episodes_and_pass_at_n_over_tasks():
    result = score([[1.0, 0.0, None], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    assert result.accuracy == pytest.approx(4 / 9)
    assert result.pass_at_n == pytest.approx(2 / 3)
    assert (result.episodes, result.failed_episodes) == (9, 1)


class Counting(Scripted):
    """Answers each call with rewards of its tasks' own, and keeps what was asked for."""

    def __init__(self, samples: int) -> None:
        super().__init__([])
        self.samples = samples
        self.asked: list[list[str]] = []
        self.sizes: list[int] = []

    async def submit_payload(self, member: str, method: str, tasks: Any, *rest: Any) -> Any:
        self.asked.append([task.id for task in tasks])
        self.sizes.append(rest[1])
        return await super().submit_payload(member, method, tasks, *rest)

    async def submit(self, member: str, method: str, *rest: Any) -> Any:
        self.rewards = [[float(task.id == "9")] * self.samples for task in rest[1]]
        return await super().submit(member, method, *rest)


@pytest.mark.parametrize("at_once", [1, 4, 10, 128])
def test_every_held_out_task_is_asked_for_once_in_its_order_and_the_last_few_count(at_once):
    fleet = Counting(samples=3)
    config = EvaluationConfig.model_validate(
        {
            "tasks": {"source": "x:y"},
            "n_samples": 3,
            "sampling": SamplingConfig(temperature=1.0),
            "max_concurrent_tasks": at_once,
        }
    )
    tasks = [Task(str(i), ({"role": "user", "content": "?"},)) for i in range(10)]
    service = EvaluationService(
        config, tasks, replica=None, agents=cast(Fleet, fleet), rewards=cast(Fleet, fleet),
        sync=None, first_version=0, seed=0,
    )  # fmt: skip
    for version in (0, 1):
        fleet.asked.clear()
        result = asyncio.run(service.score(Pinned(version, Committed(version))))
        assert [name for batch in fleet.asked for name in batch] == [task.id for task in tasks]
        assert max(map(len, fleet.asked)) <= at_once
        assert set(fleet.sizes) == {3}
        assert (result.episodes, result.failed_episodes) == (30, 0)
        assert (result.accuracy, result.pass_at_n) == (0.1, 0.1)


def test_pass_at_one_is_accuracy_and_told_once():
    assert score([[1.0], [0.0]]).pass_at_n is None
