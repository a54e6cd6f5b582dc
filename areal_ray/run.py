"""Run: what the driver's loops share. Counters and references; the services are elsewhere."""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from areal_ray.agents.slot_stream import SlotStream
from areal_ray.agents.task_stream import TaskStream
from areal_ray.checkpoint import STATE_FORMAT
from areal_ray.core.gate import AdmissionGate
from areal_ray.core.journal import JournalPlace, SegmentKeeper
from areal_ray.core.ledger import Lease, Ledger
from areal_ray.core.queue import Ticket, TrajectoryQueue
from areal_ray.core.summaries import GroupSummary, ScoreSummary, unscored
from areal_ray.core.verdict import Comparison, FailureGuard
from areal_ray.core.versions import AdmissionConfig
from areal_ray.engines.preference import PreferenceConfig
from areal_ray.engines.sft import SftPhase
from areal_ray.errors import ArealRayError, DeadlineExceeded
from areal_ray.records import Records
from areal_ray.runtime.bounds import BoundsService
from areal_ray.runtime.evaluation import EvaluationService
from areal_ray.runtime.fleet import Fleet, unheard
from areal_ray.runtime.head_watch import HeadWatch
from areal_ray.runtime.publish_report import PublishReport
from areal_ray.runtime.run_config import DeadlinesConfig
from areal_ray.runtime.saving import CheckpointService
from areal_ray.runtime.services import (
    AgentService,
    LearnerService,
    RewardService,
    SyncService,
    Tracker,
)
from areal_ray.runtime.session_service import SessionService
from areal_ray.runtime.supervisor import Look, Supervisor
from areal_ray.scaling import Scaling
from areal_ray.telemetry.sinks import TelemetryConfig
from areal_ray.telemetry.waits import WaitBoard

T = TypeVar("T")

_LAST_PUBLISH_S = 3.0
"""For a publish to end once stop was asked for."""


@dataclass(kw_only=True)
class LearnerRun:
    """What every kind of run has: how far it is, how long it may wait, and whether to stop."""

    steps: int
    """The last step's number."""
    deadlines: DeadlinesConfig
    learners: LearnerService
    checkpoints: CheckpointService
    records: Records
    waits: WaitBoard
    step: int = 0
    """Steps done."""
    version: int = 0
    """Committed version."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    watch_every_s: float = 1.0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from, as JSON values."""
        return {"format": STATE_FORMAT, "step": self.step, "version": self.version}

    async def bounded(self, work: Awaitable[T], what: str) -> T:
        """Await a learner's work; DeadlineExceeded names `what` where it takes too long."""
        limit_s = self.deadlines.step_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what} took more than {limit_s:g} s. Raise deadlines.step_s if that is normal"
            ) from None

    async def awaited(self, work: Awaitable[T], what: str) -> T:
        """`bounded`, and said to be waited for."""
        with self.waits.waiting("driver", what):
            return await self.bounded(work, what)

    def progress(self) -> dict[str, dict[str, str]]:
        """How far the learner is, for the display."""
        return {"training": {"learner": f"step {self.step} of {self.steps}"}}

    async def until_stopped(
        self, work: Awaitable[T], deadline: float | None = None, *, grace_s: float = 0.0
    ) -> T | None:
        """Await `work`; None at `deadline` (monotonic clock), or `grace_s` after stop was asked."""
        task = unheard(work)
        stop = asyncio.ensure_future(self.stopping.wait())
        left_s = None if deadline is None else deadline - time.monotonic()
        try:
            either: set[asyncio.Future[Any]] = {task, stop}
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if stop.done() and grace_s:
                await asyncio.wait({task}, timeout=grace_s)
            return task.result() if task.done() else None
        finally:
            stop.cancel()
            task.cancel()


@dataclass
class RowCursor:
    """How far a run on given rows is in them, whatever number of them a step takes."""

    seed: int
    """Of their order."""
    taken: int = 0
    """Of the present phase."""

    def state_dict(self) -> dict[str, int]:
        """What a resumed run goes on from."""
        return {"taken": self.taken, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Inverse of `state_dict`; another seed was refused before."""
        self.taken = state["taken"]


@dataclass(kw_only=True)
class SftRun(LearnerRun):
    """A run of kind sft."""

    rows: RowCursor
    head: HeadWatch
    phases: Sequence[SftPhase]
    phase_ends: list[int] = field(default_factory=list)
    """Step at which each finished phase ended."""

    def steps_before(self, phase: int) -> int:
        """Steps done when a phase began."""
        return self.phase_ends[phase - 1] if phase else 0

    def has_ended(self, phase: int) -> bool:
        """Whether a phase took its last step."""
        return phase < len(self.phase_ends)

    def end_phase(self) -> None:
        """The present phase took its last step."""
        self.phase_ends.append(self.step)
        self.rows.taken = 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        more = {"rows": self.rows.state_dict(), "phase_ends": list(self.phase_ends)}
        return {**super().state_dict(), **more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`, into a run that has not begun."""
        self.rows.load_state_dict(state["rows"])
        self.phase_ends = list(state["phase_ends"])


@dataclass(kw_only=True)
class PairRun(LearnerRun):
    """A run of kind dpo or reward_model."""

    rows: RowCursor
    head: HeadWatch
    config: PreferenceConfig

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        return {**super().state_dict(), "rows": self.rows.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`, into a run that has not begun."""
        self.rows.load_state_dict(state["rows"])


@dataclass(kw_only=True)
class ServingRun:
    """A run of kind inference."""

    gateways: Fleet
    urls: Sequence[str]
    """Of the gateways."""
    supervisor: Supervisor
    records: Records
    scaling: Scaling | None = None
    """None: its actors keep their number."""
    secrets: frozenset[str] = frozenset()
    """What no file may hold."""
    watch_every_s: float = 1.0

    async def close(self) -> None:
        """Let calls under way end, within the gateways' grace."""
        with suppress(ArealRayError):  # one that is dead has none
            await self.gateways.broadcast("close")

    def counts(self, seen: Look) -> dict[str, int]:
        """What the gateways do, for the display."""
        return {"calls": seen.num_calls, "under way": seen.num_open}

    def services(self, seen: Look) -> dict[str, dict[str, str]]:
        """How the actors do, by service."""
        told = dict(seen.services)
        agent = {name: told.pop(name) for name in self.gateways.names() if name in told}
        return {"inference": told, "agent": agent}


@dataclass(kw_only=True)
class Run(LearnerRun):
    """A run with rollouts: kind rl, online or distill."""

    groups_s: float | None
    """How long a step may wait for its groups; None = as long as it takes."""
    admission: AdmissionConfig
    tasks: TaskStream | SlotStream
    gate: AdmissionGate
    queue: TrajectoryQueue[Any]
    ledger: Ledger
    guard: FailureGuard
    comparison: Comparison
    segments: SegmentKeeper
    agents: AgentService | SessionService
    rewards: RewardService | None
    """None where nobody scores episodes (kind distill)."""
    sync: SyncService
    tracker: Tracker
    supervisor: Supervisor
    evaluation: EvaluationService | None
    bounds: BoundsService | None = None
    """None where nothing is judged before it is promoted."""
    telemetry: TelemetryConfig
    scaling: Scaling | None = None
    secrets: frozenset[str] = frozenset()
    """What no file may hold: a reason may quote what user code was given."""

    def reserve_next(self) -> Lease:
        """Enter the next task into the ledger; its admission has been counted."""
        draw = self.tasks.next()
        lease = Lease(draw.epoch, draw.task, draw.attempt, self.version, time.monotonic())
        self.ledger.reserve(lease)
        self.queue.expect(lease.group_id, lease.admitted_version)
        return lease

    async def score(
        self, lease: Lease, made: GroupSummary, payload: Any
    ) -> tuple[ScoreSummary, Any]:
        """The group with rewards; as it is where nobody scores."""
        if self.rewards is None:
            return unscored(made), payload
        return await self.rewards.score_group(lease, payload)

    def commit(
        self, lease: Lease, made: GroupSummary, scored: ScoreSummary, payload: Any
    ) -> Ticket[Any]:
        """Enter a scored group into the ledger and the journal, and make its ticket."""
        ticket = Ticket(
            group_id=lease.group_id,
            task_id=lease.task.id,
            ref=payload,
            versions=made.versions,
            num_tokens=made.num_tokens,
            num_rewarded=len(scored.scored_rewards()),
            metrics=scored.metrics,
            place=scored.place,
        )
        self.ledger.commit(lease.group_id, _commit_record(made, scored))
        if scored.place is not None:
            self.segments.hold(scored.place)
        return ticket

    def trained(self, tickets: list[Ticket[Any]], step: int) -> None:
        """End the groups that a step consumed."""
        self.ledger.train([ticket.group_id for ticket in tickets], step)
        for ticket in tickets:
            self._let_go(ticket.place)

    def rolled_back(self, step: int, good: int, reason: str) -> None:
        """What a step made was refused, and the learner has the weights of version `good`."""
        self.ledger.roll_back(step, good, reason)
        self.records.event(
            f"step {step}: what it made is not promoted: {reason}. Version {step} has the weights "
            f"of version {good}"
        )

    async def publish(self, version: int) -> PublishReport | None:
        """Bring a step's weights to the fleet.

        None where stop was asked for and no replica took them within seconds (it is coming back,
        or hangs). The step is taken all the same: a resumed run begins with its weights.
        """
        report = await self.until_stopped(self.sync.publish(version), grace_s=_LAST_PUBLISH_S)
        if report is None:
            self.records.event(f"stopping: version {version} reached no rollout")
        return report

    def committed(self, version: int) -> None:
        """A step is done and its weights are in force."""
        self.step += 1
        self.version = version

    def dump_episodes(self, tickets: Sequence[Ticket[Any]]) -> None:
        """Have some episodes of the step written down for the report, without waiting for it."""
        every, groups = self.telemetry.dump_every_steps, self.telemetry.dump_groups
        if every and (self.step % every == 0 or self.step in (1, self.steps)):
            self.agents.dump([ticket.ref for ticket in tickets[:groups]], self.step)

    def counts(self, _: Look) -> dict[str, int]:
        """What is where, for the display."""
        return {
            "groups running": self.gate.num_running,
            "groups queued": len(self.queue),
            "headroom": self.gate.headroom,
        }

    def services(self, seen: Look) -> dict[str, dict[str, str]]:
        """How the four services do, by actor."""
        agents = set(self.agents.fleet.handles)
        told = seen.services
        return {
            "inference": {n: t for n, t in told.items() if n.startswith(("rollout", "evaluation"))},
            "agent": {n: t for n, t in told.items() if n in agents or n.startswith("reward")},
            **self.progress(),
            "weights": {"param-sync": f"version {self.version}"},
        }

    def gauges(self) -> dict[str, int]:
        """The same for the row of a step, by metric name."""
        return {
            "queue/depth_groups": len(self.queue),
            "admission/running_groups": self.gate.num_running,
            "admission/headroom_groups": self.gate.headroom,
        }

    def drop(self, ticket: Ticket[Any], reason: str) -> None:
        """End a committed group that is not trained on."""
        self.ledger.drop(ticket.group_id, reason)
        self.records.dropped(reason)
        self._let_go(ticket.place)

    def _let_go(self, place: JournalPlace | None) -> None:
        if place is not None:
            self.segments.let_go(place)

    def describe_wait(self) -> str:
        """What the next step still lacks, and who has owed it for the longest."""
        needed = self.admission.groups_per_step
        text = f"{max(0, needed - len(self.queue))} of {needed} groups"
        if self.queue.lacks_rewarded:
            text += f" and {self.queue.lacks_rewarded} rewarded episodes"
        oldest = self.tracker.oldest()
        if oldest is not None:
            group_id, where = oldest
            text += f" (oldest: {group_id}, {where})"
        elif not self.gate.num_running:
            text += " (no group is running)"
        return text

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from, as JSON values. Groups that have not ended are handed
        out again, before any fresh task."""
        tasks = self.tasks.state_dict()
        unfinished = [[e.epoch, e.task.id, e.attempt] for e in self.ledger.open_leases()]
        return {
            **super().state_dict(),
            "tasks": tasks,
            "unfinished": unfinished,
            **self.records.tally.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`, into a run that has not begun; its records hold their part."""
        self.tasks.load_state_dict(state["tasks"])
        for epoch, task_id, attempt in state["unfinished"]:
            self.tasks.retry(task_id, epoch, attempt)


def _commit_record(made: GroupSummary, scored: ScoreSummary) -> dict[str, Any]:
    place = scored.place
    sessions = {
        "sessions": list(made.sessions),
        "session_group": made.session_group,
        "task": made.task_id,  # the client's name of it; the group's has that of a slot
    }
    return {
        "oldest_version": made.oldest_version,
        "newest_version": made.newest_version,
        "tokens": made.num_tokens,
        "rewards": list(scored.rewards),
        "place": [place.segment, place.offset, place.num_bytes] if place else None,
        **(sessions if made.sessions else {}),
    }
