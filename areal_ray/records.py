"""Records: turns what the loops report into metric rows, progress lines and the run's summary."""

import logging
import pickle
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_ray.core.ledger import Lease
from areal_ray.core.queue import Ticket
from areal_ray.core.summaries import GroupSummary, ScoreSummary
from areal_ray.core.verdict import TOO_STALE
from areal_ray.core.versions import UNLIMITED, AdmissionConfig
from areal_ray.engines.preference import PairEvaluation
from areal_ray.engines.protocols import StepStats
from areal_ray.runtime.evaluation import EvaluationResult
from areal_ray.runtime.publish_report import PublishReport
from areal_ray.runtime.supervisor import FleetReading
from areal_ray.telemetry.alarm import MismatchAlarm, ProbeAlarm
from areal_ray.telemetry.metrics import MetricWindow
from areal_ray.telemetry.names import METRICS
from areal_ray.telemetry.progress import Progress
from areal_ray.telemetry.sinks import MetricLog
from areal_ray.telemetry.tally import RunTally
from areal_ray.telemetry.views import EvalView, StatusView, StepView
from areal_ray.telemetry.waits import WaitBoard

_FAILED = ("agent_error", "env_error", "timeout")
"""Outcomes of attempts that no sibling stands for: the group's own metrics do not see them."""
_RESTARTS = {"rollout": "rollout/restarts", "agent": "agent/restarts"}
_log = logging.getLogger(__name__)

_INLINED_BYTES = 100 * 1024
"""Ray carries smaller objects inside the messages that pass through their owner, the driver."""


def _bytes_through_driver(made: GroupSummary, scored: ScoreSummary) -> int:
    # Each payload passes once as an answer and once as an argument, twice in all.
    carried = [made.payload_bytes, scored.payload_bytes]
    inlined = sum(2 * size for size in carried if size < _INLINED_BYTES)
    return inlined + len(pickle.dumps((made, scored)))


class _SplitTeller:
    """Tells each reason why conversations stop extending their record once a run."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def lines(self, made: GroupSummary) -> list[str]:
        new = {reason: n for reason, n in made.splits.items() if reason not in self._told}
        self._told |= new.keys()
        return [
            f"group {made.group_id}: {count} records split: {reason}. agent/branch_episodes "
            "counts them; not told again"
            for reason, count in new.items()
        ]


class Records:
    """What one run has to tell."""

    def __init__(
        self,
        *,
        log: MetricLog,
        progress: Progress,
        waits: WaitBoard,
        admission: AdmissionConfig | None,
        tally: RunTally,
        write_status: Callable[[Mapping[str, Any]], None],
        mismatch_alarm_nats: float | None = None,
        probe_alarm_nats: float | None = None,
    ) -> None:
        self._log = log
        self._progress = progress
        self._waits = waits
        self._admission = admission
        self.tally = tally
        self._ledger = tally.ledger
        self._write_status = write_status
        self._alarm = MismatchAlarm(mismatch_alarm_nats)
        self._probe_alarm = ProbeAlarm(probe_alarm_nats)
        self._shown: dict[str, Any] = {}
        self._window = MetricWindow(METRICS)
        self._cpu_s = time.process_time()
        self._row_at = time.monotonic()
        self._reading: FleetReading | None = None
        self._admitted = 0
        self._aside: Mapping[str, str] = {}
        self._splits = _SplitTeller()

    # What the loops report

    def begin(self) -> None:
        """The loops begin: what came before belongs to no step."""
        self._row_at, self._cpu_s = time.monotonic(), time.process_time()
        self._waits.take_seconds()
        self._admitted = self._ledger.admitted if self._ledger is not None else 0

    def collected(self, made: GroupSummary, scored: ScoreSummary) -> None:
        """A group was rolled out and scored, whatever becomes of it."""
        for name, value, weight in scored.metrics:
            if not name.startswith("reward/"):
                self._window.add(name, value, weight=weight)
        for outcome in _FAILED:
            self._window.add(f"agent/{outcome}_episodes", made.outcomes.get(outcome, 0))
        self._window.add("time/reward_busy_s", scored.seconds)
        self._window.add("driver/bytes", _bytes_through_driver(made, scored))
        for line in self._splits.lines(made):
            self.event(line)

    def failed(self, lease: Lease, reason: str) -> None:
        """A group gave no usable result."""
        self._window.add("admission/retried_groups", 1)
        _log.info("group %s failed: %s", lease.group_id, reason)

    def dropped(self, reason: str) -> None:
        """A scored group is not trained on."""
        stale = reason == TOO_STALE
        self._window.add("queue/dropped_groups" if stale else "admission/filtered_groups", 1)

    def returned(self, lines: Mapping[str, str]) -> None:
        """Actors that died are back: name -> the line that told it."""
        for name, line in lines.items():
            self.tally.replaced.append(line.splitlines()[0])
            role = name.rpartition("-")[0]
            if role in _RESTARTS:
                self._window.add(_RESTARTS[role], 1)

    def event(self, text: str) -> None:
        """Something a user should read."""
        _log.info("%s", text)
        self._progress.on_event(text)

    def status(
        self,
        counts: Mapping[str, int],
        services: Mapping[str, Any] | None = None,
        actors: Mapping[str, str] | None = None,
    ) -> None:
        """What goes on now, for the display and for `areal-ray status` beside the run; `actors`
        says how many there are of each role that may be scaled."""
        view = StatusView(waits=self._waits.by_role(), counts=counts)
        self._progress.on_status(view)
        told = {**self._shown, "waits": dict(view.waits), "counts": dict(counts)}
        told |= {"services": services or {}} | ({"actors": dict(actors)} if actors else {})
        self._write_status(told | ({"set aside": dict(self._aside)} if self._aside else {}))

    def fleet(self, reading: FleetReading | None) -> None:
        """How the rollout fleet stands; the row of the step takes the difference."""
        if reading is None:
            return
        if self._reading is not None:
            for name, value in reading.since(self._reading).items():
                self._window.add(name, value)
        self._reading = reading

    def trained(
        self,
        step: int,
        consumed_at: int,
        tickets: Sequence[Ticket[Any]],
        stats: StepStats,
        report: PublishReport | None,
        gauges: Mapping[str, int],
    ) -> None:
        """A step is done: write its row.

        Args:
            step: Steps done.
            consumed_at: The learner's version when it began.
            tickets: Its groups.
            stats: What the learner said.
            report: What the publish said; null where a stop overtook it.
            gauges: How queue and gate stand now: `Run.gauges()`.
        """
        now = time.monotonic()
        for ticket in tickets:
            self._add_staleness(consumed_at, ticket)
            self._window.add("queue/wait_s", now - ticket.arrived_s)
            for name, value, weight in ticket.metrics:
                if name.startswith("reward/"):
                    self._window.add(name, value, weight=weight)
        self._add_stats(stats)
        for line in filter(None, [self._alarm.check(step, stats.metrics)]):
            self.event(line)
        if report is not None:
            self._add_publish(step, report)
        self._window.update(gauges)
        self._add_ledger()
        version = consumed_at + 1
        row = self._close_row(step, version, now)
        bound = self._bound()
        self._shown = {"step": step, "version": version, "reward": row.get("reward/mean")}
        self._progress.on_step(
            StepView(
                step=step,
                version=version,
                step_s=row["time/step_s"],
                reward=row.get("reward/mean"),
                loss=row.get("learner/loss"),
                staleness_mean=row.get("staleness/mean_versions"),
                staleness_max=int(row.get("staleness/max_versions", 0)),
                staleness_bound=bound,
                tokens_per_s=row.get("rollout/tokens_per_s"),
                queue_groups=gauges["queue/depth_groups"],
                wait_s=row.get("time/learner_wait_s", 0.0),
                skipped=stats.num_updates == 0,
            )
        )

    def fitted(self, step: int, stats: StepStats) -> None:
        """A supervised step is done."""
        self._add_stats(stats)
        row = self._close_row(step, 0, time.monotonic())
        self._shown = {"step": step, "loss": row.get("learner/loss")}
        self._progress.on_step(
            StepView(step=step, step_s=row["time/step_s"], loss=row.get("learner/loss"))
        )

    def compared(self, step: int, seen: PairEvaluation) -> None:
        """Held-out pairs were looked at."""
        self._log.log(step, 0, seen.metrics(), kind="eval")
        self._progress.on_eval(_pairs_view(step, seen))

    def evaluated(self, result: EvaluationResult) -> None:
        """An evaluation is done."""
        step = result.step
        self._log.log(step, result.version, result.metrics(), kind="eval")
        self._progress.on_eval(
            EvalView(
                step=step,
                version=result.version,
                accuracy=result.accuracy,
                episodes=result.episodes,
                wall_s=result.wall_s,
                is_alone=self._admission is None,
            )
        )

    # Rows

    def _add_staleness(self, consumed_at: int, ticket: Ticket[Any]) -> None:
        bound = self._bound()
        oldest = ticket.oldest_trained(0 if bound is None else consumed_at - bound)
        if oldest is None:  # masked as a whole: the step did not train on it
            return
        self.tally.staleness[consumed_at - oldest] += 1
        self._window.add("staleness/mean_versions", consumed_at - oldest)
        self._window.add("staleness/max_versions", consumed_at - oldest)

    def _add_stats(self, stats: StepStats) -> None:
        for name, value in stats.metrics.items():
            self._window.add(name, value)

    def _add_publish(self, step: int, report: PublishReport) -> None:
        for name, value in report.metrics():
            self._window.add(name, value)
        told = [f"publish of version {report.version}: {line}" for line in report.events]
        self.tally.publishes += told
        for line in filter(None, [*told, self._probe_alarm.check(step, report.metrics())]):
            self.event(line)
        self._aside = report.quarantined

    def _add_ledger(self) -> None:
        if self._ledger is None:
            return
        for name, count in self._ledger.counts().items():
            self._window.add(f"ledger/{name}_groups", count)
        self._window.add("admission/admitted_groups", self._ledger.admitted - self._admitted)
        self._admitted = self._ledger.admitted
        stale = self._ledger.dropped[TOO_STALE]
        consumed = self._ledger.trained + stale
        self._window.add("queue/dropped_fraction", stale / max(1, consumed))
        bound = self._bound()
        if bound is not None:
            self._window.add("staleness/bound_versions", bound)

    def _close_row(self, step: int, version: int, now: float) -> dict[str, float]:
        window = self._window
        seconds = now - self._row_at
        self._row_at = now
        window.add("time/step_s", seconds)
        for name, value in self._waits.take_seconds().items():
            window.add(name, value)
        cpu_s = time.process_time()
        window.add("driver/cpu_s", cpu_s - self._cpu_s)
        self._cpu_s = cpu_s
        window.add("driver/memory_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        row = window.take()
        episodes = row.get("agent/episodes", 0.0)
        if episodes:
            row["driver/trajectory_cpu_s"] = row["driver/cpu_s"] / episodes
            row["driver/trajectory_bytes"] = row.get("driver/bytes", 0.0) / episodes
        if seconds > 0 and "rollout/sampled_tokens" in row:
            row["rollout/tokens_per_s"] = row["rollout/sampled_tokens"] / seconds
        self._log.log(step, version, row)
        return row

    def _bound(self) -> int | None:
        bound = self._admission.max_head_offpolicyness if self._admission else UNLIMITED
        return None if bound == UNLIMITED else int(bound)

    # The end

    def close(self) -> None:
        """Make sure that rows stay."""
        self._log.close()


def _pairs_view(step: int, seen: PairEvaluation) -> EvalView:
    return EvalView(
        step=step,
        accuracy=seen.accuracy,
        episodes=seen.num_pairs,
        wall_s=seen.seconds,
        unit="pairs",
    )
