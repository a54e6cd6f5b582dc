"""What the loops of a run do with a group that gives no result, or teaches nothing."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from areal_ray.agents.task_stream import TaskStream
from areal_ray.core.gate import AdmissionGate
from areal_ray.core.ledger import Lease, Ledger
from areal_ray.core.queue import TrajectoryQueue
from areal_ray.core.summaries import GroupSummary, ScoreSummary
from areal_ray.core.task import Task
from areal_ray.core.verdict import Comparison, FailureGuard
from areal_ray.core.versions import AdmissionConfig
from areal_ray.driver import fail, produce
from areal_ray.errors import TooManyFailures
from areal_ray.run import Run
from areal_ray.telemetry.waits import WaitBoard

ADMISSION = AdmissionConfig(groups_per_step=1, n_samples=2, max_attempts=2)


class Scene:
    """The parts of a run that a failed group touches."""

    def __init__(self) -> None:
        self.journal: list[dict[str, Any]] = []
        self.told: list[str] = []
        self.tasks = TaskStream([Task("a", ()), Task("b", ())], shuffle=False)
        self.run = cast(
            Run,
            SimpleNamespace(
                ledger=Ledger(self.journal.append),
                records=SimpleNamespace(failed=lambda lease, reason: self.told.append(reason)),
                admission=ADMISSION,
                tasks=self.tasks,
                queue=TrajectoryQueue(ADMISSION, capacity=9),
                gate=AdmissionGate(ADMISSION),
                guard=FailureGuard(ADMISSION),
                secrets=frozenset({"hf_abcdef"}),
            ),
        )

    async def fail_until_stopped(self, reason: str) -> None:
        while True:
            await self.one(reason)

    async def one(self, reason: str) -> None:
        await self.run.gate.admit()
        draw = self.tasks.next()
        lease = self.run.ledger.reserve(Lease(draw.epoch, draw.task, draw.attempt, 0))
        await fail(self.run, lease, reason)


def test_a_reason_that_quotes_a_secret_is_kept_without_it_wherever_it_goes():
    async def scenario() -> None:
        scene = Scene()
        with pytest.raises(TooManyFailures) as stopped:
            await scene.fail_until_stopped("unscored: the reward raised: 401 for hf_abcdef")
        places = [str(stopped.value), *scene.told, str(scene.journal)]
        places.append(str(scene.run.ledger.state_dict()))
        assert all("401 for [redacted]" in place for place in places)
        assert not any("hf_abcdef" in place for place in places)

    asyncio.run(scenario())


def test_a_failed_task_is_tried_again_up_to_its_attempts_and_its_admission_comes_back():
    async def scenario() -> None:
        scene, drawn = Scene(), []
        for _ in range(6):
            before = scene.tasks.state_dict()["retries"]
            drawn.append(before[0][1] if before else "fresh")
            await scene.one("agent_error: boom")
        assert Counter(drawn) == {"fresh": 3, "a": 2, "b": 1}
        assert scene.run.gate.num_running == 0
        assert scene.run.ledger.counts()["failed"] == 6

    asyncio.run(scenario())


class Filtering:
    """A run whose every second group has equal rewards, up to where its learner begins."""

    def __init__(self, batch: int) -> None:
        admission = AdmissionConfig(
            groups_per_step=batch, n_samples=2, max_head_offpolicyness=0, drop_equal_rewards=True
        )
        self.num_begun = 0
        self.filtered: list[str] = []
        self.run = SimpleNamespace(
            ledger=Ledger(),
            admission=admission,
            comparison=Comparison(min_spread=1e-6, leaves_out_truncated=False),
            tasks=TaskStream([Task(str(i), ()) for i in range(50)], shuffle=False),
            queue=TrajectoryQueue(admission, capacity=9),
            gate=AdmissionGate(admission),
            guard=FailureGuard(admission),
            waits=WaitBoard(),
            records=SimpleNamespace(
                collected=lambda made, scored: None, dropped=self.filtered.append
            ),
            agents=SimpleNamespace(run_group=self.run_group),
            score=self.score,
            version=0,
        )
        self.run.reserve_next = lambda: Run.reserve_next(cast(Run, self.run))
        self.run.commit = lambda *group: Run.commit(cast(Run, self.run), *group)

    async def run_group(self, lease: Lease) -> tuple[GroupSummary, Any]:
        self.num_begun += 1
        made = GroupSummary(
            lease.group_id, lease.task.id, num_usable=2, versions=(0,), num_tokens=9,
            num_sampled_tokens=4, num_turns=2, payload_bytes=1,
        )  # fmt: skip
        return made, None

    async def score(
        self, lease: Lease, made: GroupSummary, payload: Any
    ) -> tuple[ScoreSummary, Any]:
        is_equal = int(lease.task.id) % 2 == 0
        rewards = (1.0, 1.0) if is_equal else (1.0, 0.0)
        return ScoreSummary(lease.group_id, rewards, 0), payload


def test_a_step_is_full_where_half_of_the_groups_teach_nothing_and_no_more_start_than_needed():
    async def scenario() -> None:
        scene = Filtering(batch=4)
        producer = asyncio.ensure_future(produce(cast(Run, scene.run)))
        async with asyncio.timeout(20):
            taken = await scene.run.queue.take(0)
        await asyncio.sleep(0)
        assert taken is not None
        assert [int(ticket.task_id) % 2 for ticket in taken.tickets] == [1] * 4
        assert scene.num_begun == 4 + len(scene.filtered)
        assert set(scene.filtered) == {"equal_rewards"}
        counts = scene.run.ledger.counts()
        assert (counts["dropped"], counts["in_flight"]) == (len(scene.filtered), 4)
        assert scene.run.gate.headroom == 0
        producer.cancel()
        await asyncio.wait({producer})

    asyncio.run(scenario())
