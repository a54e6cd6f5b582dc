"""What the loops of a run do with a group that gives no result, or teaches nothing."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal_ray.agents.task_stream import TaskStream
from areal_ray.core.gate import AdmissionGate
from areal_ray.core.journal import SegmentKeeper
from areal_ray.core.ledger import Lease, Ledger
from areal_ray.core.queue import TrajectoryQueue
from areal_ray.core.summaries import GroupSummary, ScoreSummary
from areal_ray.core.task import Task
from areal_ray.core.verdict import Comparison, FailureGuard
from areal_ray.core.versions import AdmissionConfig
from areal_ray.driver import fail, produce
from areal_ray.errors import TooManyFailures
from areal_ray.records import Records
from areal_ray.run import Run
from areal_ray.runtime.run_config import DeadlinesConfig
from areal_ray.telemetry.progress import QuietProgress
from areal_ray.telemetry.sinks import TelemetryConfig, open_metric_log
from areal_ray.telemetry.tally import RunTally
from areal_ray.telemetry.waits import WaitBoard

ADMISSION = AdmissionConfig(groups_per_step=1, n_samples=2, max_attempts=2)


def run_of(
    folder: Path, admission: AdmissionConfig, tasks: list[Task], ledger: Ledger, **services: Any
) -> Run:
    """A run as the driver has it, but for the actors behind its services."""
    config = TelemetryConfig(console="off", tensorboard=False, ray_metrics=False)
    waits, actors = WaitBoard(), ("learners", "checkpoints", "agents", "rewards", "sync")
    records = Records(
        log=open_metric_log(folder, config),
        progress=QuietProgress(),
        waits=waits,
        admission=admission,
        tally=RunTally(ledger),
        write_status=lambda status: None,
    )
    beside: dict[str, Any] = dict.fromkeys((*actors, "tracker", "supervisor", "evaluation"))
    return Run(
        steps=1,
        deadlines=DeadlinesConfig(),
        groups_s=None,
        records=records,
        waits=waits,
        admission=admission,
        tasks=TaskStream(tasks, shuffle=False),
        gate=AdmissionGate(admission),
        queue=TrajectoryQueue(admission, capacity=9),
        ledger=ledger,
        guard=FailureGuard(admission),
        comparison=Comparison(min_spread=1e-6, leaves_out_truncated=False),
        segments=SegmentKeeper(folder),
        telemetry=config,
        secrets=frozenset({"hf_abcdef"}),
        **{**beside, **services},
    )


class Scene:
    """A run whose groups fail."""

    def __init__(self, folder: Path) -> None:
        self.journal: list[dict[str, Any]] = []
        tasks, ledger = [Task("a", ()), Task("b", ())], Ledger(self.journal.append)
        self.run = run_of(folder, ADMISSION, tasks, ledger)
        self.tasks = self.run.tasks

    async def fail_until_stopped(self, reason: str) -> None:
        while True:
            await self.one(reason)

    async def one(self, reason: str) -> None:
        await self.run.gate.admit()
        draw = self.tasks.next()
        lease = self.run.ledger.reserve(Lease(draw.epoch, draw.task, draw.attempt, 0))
        await fail(self.run, lease, reason)


def test_a_reason_that_quotes_a_secret_is_kept_without_it_wherever_it_goes(tmp_path, caplog):
    caplog.set_level("INFO", "areal_ray.records")

    async def scenario() -> None:
        scene = Scene(tmp_path)
        with pytest.raises(TooManyFailures) as stopped:
            await scene.fail_until_stopped("unscored: the reward raised: 401 for hf_abcdef")
        logged = [record.getMessage() for record in caplog.records]
        assert len(logged) == scene.run.ledger.counts()["failed"]
        places = [str(stopped.value), *logged, str(scene.journal)]
        places.append(str(scene.run.ledger.state_dict()))
        assert all("401 for [redacted]" in place for place in places)
        assert not any("hf_abcdef" in place for place in places)

    asyncio.run(scenario())


def test_a_failed_task_is_tried_again_up_to_its_attempts_and_its_admission_comes_back(tmp_path):
    async def scenario() -> None:
        scene, drawn = Scene(tmp_path), []
        for _ in range(6):
            before = scene.tasks.state_dict()["retries"]
            drawn.append(before[0][1] if before else "fresh")
            await scene.one("agent_error: boom")
        assert Counter(drawn) == {"fresh": 3, "a": 2, "b": 1}
        assert scene.run.gate.num_running == 0
        assert scene.run.ledger.counts()["failed"] == 6

    asyncio.run(scenario())


class Filtering:
    """Answers for the agent and reward actors of a run: every second group has equal rewards."""

    def __init__(self, folder: Path, batch: int) -> None:
        admission = AdmissionConfig(
            groups_per_step=batch, n_samples=2, max_head_offpolicyness=0, drop_equal_rewards=True
        )
        self.num_begun = 0
        self.journal: list[dict[str, Any]] = []
        tasks, ledger = [Task(str(i), ()) for i in range(50)], Ledger(self.journal.append)
        self.run = run_of(folder, admission, tasks, ledger, agents=self, rewards=self)

    @property
    def filtered(self) -> list[str]:
        """Why groups were dropped."""
        return [event["reason"] for event in self.journal if event["event"] == "dropped"]

    async def run_group(self, lease: Lease) -> tuple[GroupSummary, Any]:
        self.num_begun += 1
        made = GroupSummary(
            lease.group_id, lease.task.id, num_usable=2, versions=(0,), num_tokens=9,
            num_sampled_tokens=4, num_turns=2, payload_bytes=1,
        )  # fmt: skip
        return made, None

    async def score_group(self, lease: Lease, payload: Any) -> tuple[ScoreSummary, Any]:
        is_equal = int(lease.task.id) % 2 == 0
        rewards = (1.0, 1.0) if is_equal else (1.0, 0.0)
        return ScoreSummary(lease.group_id, rewards, 0), payload


def test_a_step_is_full_where_half_of_the_groups_teach_nothing_and_no_more_start_than_needed(
    tmp_path,
):
    async def scenario() -> None:
        scene = Filtering(tmp_path, batch=4)
        producer = asyncio.ensure_future(produce(scene.run))
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
