"""What a step's row and a run's end tell, given what the loops report."""

import json
from pathlib import Path
from typing import Any

import pytest

from areal_ray.core.canary import Proof, Swapped
from areal_ray.core.ledger import Lease, Ledger
from areal_ray.core.queue import Ticket
from areal_ray.core.summaries import GroupSummary, ScoreSummary
from areal_ray.core.task import Task
from areal_ray.core.verdict import TOO_STALE
from areal_ray.core.versions import AdmissionConfig
from areal_ray.engines.preference import PairEvaluation
from areal_ray.engines.protocols import StepStats
from areal_ray.records import Records
from areal_ray.runtime.publish_report import PublishReport
from areal_ray.telemetry.progress import Progress, QuietProgress, open_progress
from areal_ray.telemetry.rows import read_rows
from areal_ray.telemetry.sinks import METRICS_FILE, TelemetryConfig, open_metric_log
from areal_ray.telemetry.tally import RunTally
from areal_ray.telemetry.waits import WaitBoard

GAUGES = {"queue/depth_groups": 5, "admission/running_groups": 3, "admission/headroom_groups": 2}


class Listener(QuietProgress):
    """Keeps what a user would read."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_event(self, text: str) -> None:
        self.told.append(text)


def records_of(
    folder: Path,
    ledger: Ledger,
    progress: Progress | None = None,
    *,
    statuses: list[Any] | None = None,
    probe_alarm_nats: float | None = None,
    **admission: Any,
) -> Records:
    config = TelemetryConfig(console="off", tensorboard=False, ray_metrics=False)
    return Records(
        log=open_metric_log(folder, config),
        progress=progress or QuietProgress(),
        waits=WaitBoard(),
        admission=AdmissionConfig(groups_per_step=2, **admission),
        tally=RunTally(ledger),
        write_status=([] if statuses is None else statuses).append,
        probe_alarm_nats=probe_alarm_nats,
    )


def ticket(*versions: int) -> Ticket[str]:
    return Ticket("0/t/0", "t", "ref", versions=versions, num_tokens=9)


def published(version: int) -> PublishReport:
    return PublishReport(
        version=version, seconds=0.6, stage_s=0.4, swap_s=0.2, bytes=80,
        swapped={"rollout-0": Swapped(0.1, Proof(seconds=0.03, largest_nats=0.2, mean_nats=0.1))},
    )  # fmt: skip


def row_of(folder: Path) -> dict[str, Any]:
    return read_rows(folder / METRICS_FILE)[-1]


def admit(ledger: Ledger, task: str) -> str:
    lease = ledger.reserve(Lease(0, Task(task, ()), 0, 0))
    ledger.lease(lease.group_id)
    ledger.commit(lease.group_id, {})
    return lease.group_id


def test_staleness_is_that_of_what_was_trained_where_old_tokens_are_masked(tmp_path):
    records = records_of(tmp_path, Ledger(), max_head_offpolicyness=2, at_consumption="mask")
    records.begin()
    tickets = [ticket(0, 3, 4), ticket(0, 4), ticket(0, 1), ticket(4, 5)]  # 3 and later train
    records.trained(6, 5, tickets, StepStats(), published(6), GAUGES)
    row = row_of(tmp_path)
    assert dict(records.tally.staleness) == {2: 1, 1: 2}
    assert (row["staleness/mean_versions"], row["staleness/max_versions"]) == (
        pytest.approx(4 / 3),
        2,
    )


def test_why_records_split_is_told_once_a_run_with_its_count(tmp_path):
    listener = Listener()
    records = records_of(tmp_path, Ledger(), listener)

    def made(group: str, **splits: int) -> GroupSummary:
        return GroupSummary(
            group, "t", num_usable=2, versions=(0,), num_tokens=9, num_sampled_tokens=4,
            num_turns=2, payload_bytes=1, splits=splits,
        )  # fmt: skip

    scored = ScoreSummary("g", (1.0, 0.0), 0)
    for summary in (made("a"), made("b", edited=3), made("c", edited=1, merges=2)):
        records.collected(summary, scored)
    assert [line.split(". ")[0] for line in listener.told] == [
        "group b: 3 records split: edited",
        "group c: 2 records split: merges",
    ]
    assert all("agent/branch_episodes" in line for line in listener.told)


def test_held_out_pairs_are_told_by_step_since_nothing_is_published(tmp_path, capsys):
    config = TelemetryConfig(console="lines", tensorboard=False, ray_metrics=False)
    records = Records(
        log=open_metric_log(tmp_path, config),
        progress=open_progress(config),
        waits=WaitBoard(),
        admission=None,
        tally=RunTally(),
        write_status=lambda status: None,
    )
    seen = PairEvaluation(num_pairs=8, loss=0.4, accuracy=0.75, margin=0.1, seconds=0.5)
    records.fitted(20, StepStats())
    records.compared(20, seen)
    told = capsys.readouterr().out
    assert "held-out accuracy 0.750 at step 20" in told
    assert "v0" not in told


def test_a_run_goes_on_from_the_counts_of_its_checkpoint(tmp_path):
    ledger = Ledger()
    records = records_of(tmp_path, ledger)
    ended = [admit(ledger, task) for task in ("a", "b", "c")]
    ledger.train(ended[:2], 1)
    records.trained(1, 1, [ticket(0), ticket(1)], StepStats(), published(2), GAUGES)
    facts = RunTally.of_state(json.loads(json.dumps(records.tally.state_dict()))).end_facts()
    assert facts["staleness_histogram"] == {1: 1, 0: 1}
    told = facts["ledger"]
    assert (told.admitted, told.trained, told.dropped) == (3, 2, 1)
    assert told.reasons == {"run_ended": 1}
    assert RunTally.of_state({"step": 4, "version": 0}).end_facts()["ledger"].admitted == 0


def test_a_row_tells_pacing_publish_and_restarts(tmp_path):
    ledger = Ledger()
    records = records_of(tmp_path, ledger)
    admit(ledger, "before")
    records.begin()
    ended = [admit(ledger, task) for task in ("a", "b", "c", "d")]
    ledger.train(ended[:3], 1)
    ledger.drop(ended[3], TOO_STALE)
    records.returned({"rollout-1": "rollout-1 is back", "reward-0": "reward-0 is back"})
    records.trained(1, 0, [ticket(0)], StepStats(), published(1), GAUGES)
    row = row_of(tmp_path)
    assert {name: row[name] for name in GAUGES} == GAUGES
    assert row["admission/admitted_groups"] == 4
    assert row["queue/dropped_fraction"] == 0.25
    assert row["publish/swap_s"] == 0.2
    assert row["publish/bytes_per_s"] == pytest.approx(200.0)
    assert row["rollout/restarts"] == 1
    assert records.tally.replaced == ["rollout-1 is back", "reward-0 is back"]
    records.trained(2, 1, [ticket(1)], StepStats(), published(2), GAUGES)
    assert row_of(tmp_path)["admission/admitted_groups"] == 0
    assert row_of(tmp_path)["rollout/restarts"] == 0


def test_a_replica_that_differed_is_counted_told_and_kept_for_the_report(tmp_path):
    heard = Listener()
    statuses: list[Any] = []
    records = records_of(tmp_path, Ledger(), heard, statuses=statuses)
    reason = "rollout-1 at version 1: head is live with other bytes than those that arrived"
    good, bad = Proof(seconds=0.01, largest_nats=3e-6, mean_nats=1e-6), Proof(reason, seconds=0.02)
    report = PublishReport(
        version=1, seconds=0.6, stage_s=0.4, swap_s=0.2, bytes=80,
        swapped={"rollout-0": Swapped(0.1, good), "rollout-1": Swapped(0.2, bad)},
        quarantined={"rollout-1": reason}, events=(f"set aside: {reason}",),
    )  # fmt: skip
    records.trained(1, 0, [ticket(0)], StepStats(), report, GAUGES)
    row = row_of(tmp_path)
    told = f"publish of version 1: set aside: {reason}"
    assert row["publish/differing_replicas"] == row["publish/failed_publishes"] == 1
    assert (row["publish/engine_idle_s"], row["publish/canary_s"]) == (0.2, 0.02)
    assert row["publish/probe_max_nats"] == 3e-6
    assert report.replicas == ("rollout-0",)
    assert heard.told == [told]
    assert records.tally.end_facts()["publish_events"] == (told,)
    records.status({})
    assert statuses[-1]["set aside"] == {"rollout-1": reason}
    records.trained(2, 1, [ticket(1)], StepStats(), published(2), GAUGES)
    records.status({})
    assert "set aside" not in statuses[-1]


def test_a_probe_that_drifts_is_told_although_no_fresh_token_trains(tmp_path):
    heard = Listener()
    records = records_of(tmp_path, Ledger(), heard, probe_alarm_nats=0.05)
    records.trained(1, 0, [ticket(0)], StepStats(), published(1), GAUGES)
    assert "publish/probe_mean_nats is 0.1, above" in heard.told[0]
