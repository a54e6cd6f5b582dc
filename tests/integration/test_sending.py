"""A task that cannot travel to another process is named where it is sent."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from areal_ray.core.task import Task
from areal_ray.errors import DataError
from areal_ray.rewards.reward import RewardConfig
from areal_ray.rewards.runner import RewardRunner
from areal_ray.runtime.fleet import Fleet
from tests.support.tiny_groups import random_group

MESSAGES = ({"role": "user", "content": "?"},)
GOOD = Task("good", MESSAGES, 2)
BAD = Task("bad", MESSAGES, 2, fields={"size": 3, "lock": threading.Lock()})


class Counter:
    """Takes tasks."""

    async def count(self, tasks: list[Task]) -> int:
        """How many."""
        return len(tasks)


@pytest.fixture
def fleet(ray_session: None) -> Iterator[Fleet]:
    handle: Any = ray.remote(Counter).options(num_cpus=0).remote()
    yield Fleet("agent", {"agent-0": handle})
    ray.kill(handle)


def test_by_ray(fleet: Fleet) -> None:
    assert asyncio.run(fleet.submit("agent-0", "count", [GOOD])) == 1
    with pytest.raises(DataError) as told:
        asyncio.run(fleet.submit("agent-0", "count", [GOOD, BAD]))
    assert str(told.value).startswith("task 'bad': fields['lock'] is a lock that cannot be pickled")
    assert len(str(told.value).splitlines()) == 1


def test_by_the_reward_to_its_own_process() -> None:
    local = Task("bad", MESSAGES, answer=lambda reply: True)
    group = random_group(np.random.default_rng(0), rewards=[None] * 4)

    async def score() -> None:
        runner = RewardRunner(RewardConfig(score="tests.support.digits:parity"))
        try:
            await runner.score(local, group.trajectories)
        finally:
            await runner.close()

    with pytest.raises(DataError, match="task 'bad': answer is a function that cannot be pickled"):
        asyncio.run(score())
