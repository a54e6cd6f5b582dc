"""Users' code, tasks and machines misbehave: what a run then does and says."""

import json
import os
import signal
import time

import pytest
import ray

from areal_ray.checkpoint import Checkpoints
from areal_ray.errors import ArealRayError, StorageError, TooManyFailures
from areal_ray.telemetry.rows import read_rows
from tests.support.disk import no_more_than
from tests.support.whole_runs import (
    PATIENCE_S,
    Runs,
    actor_names,
    actor_of,
    assert_books_balance,
    events_of,
    pid_of,
    steps_of,
    until,
    until_step,
)


def test_a_reward_that_always_raises_stops_the_run_with_its_reason(runs: Runs) -> None:
    error = runs.failure("no-reward", "reward.score=tests.support.digits:always_raises")
    assert isinstance(error, TooManyFailures)
    assert "judge unreachable" in str(error)
    assert error.exit_code == 1
    summary = json.loads((runs.folder / "no-reward/summary.json").read_text(encoding="utf-8"))
    assert summary["outcome"] == "failed"
    assert "judge unreachable" in summary["failure"]


@pytest.mark.extended
def test_what_a_failed_run_leaves_quotes_no_secret_and_told_what_to_beware_of(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "unreachable")  # as if the judge's answer held the key
    error = runs.failure(
        "quoting",
        "reward.score=tests.support.digits:always_raises",
        "objective={kind: reinforce, behaviour_weight: full}",
    )
    assert "judge [redacted]" in str(error)
    folder = runs.folder / "quoting"
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".seg"]
    assert {"summary.json", "ledger.jsonl", "log.txt", "report.html"} <= {p.name for p in files}
    assert [path.name for path in files if b"unreachable" in path.read_bytes()] == []
    assert "judge [redacted]" in json.loads((folder / "summary.json").read_text())["failure"]
    assert "caution: objective: loss 'reinforce'" in events_of(folder)


def test_after_a_failed_run_nothing_is_left_and_the_next_one_starts(runs: Runs) -> None:
    """And in that next one a fifth of the agents raise: every step is full all the same."""
    from ray.util.placement_group import placement_group_table

    def held() -> set[str]:
        table = placement_group_table()
        return {group for group, entry in table.items() if entry["state"] != "REMOVED"}

    before = held()
    runs.failure("fails-first", "reward.score=tests.support.digits:always_raises")
    names = ray.util.list_named_actors
    until(lambda: not [n for n in names() if n.startswith("fails-first/")], "its actors to end", 30)
    until(lambda: held() <= before, "its placement groups to be removed", 30)
    summary = runs.run("raising", "agent.run=tests.support.digits:often_raises")
    assert (summary.outcome, summary.steps) == ("finished", 6)
    assert assert_books_balance(runs.folder / "raising")["trained"] == 24
    rows = read_rows(runs.folder / "raising/metrics.jsonl")
    assert sum(row["agent/agent_error_episodes"] for row in rows) > 0


@pytest.mark.extended
def test_an_agent_that_sleeps_for_ever_is_cut_at_its_limit_and_replaced(runs: Runs) -> None:
    summary = runs.run(
        "sleeper",
        "agent.run=tests.support.agents:one_sleeps",
        "agent.timeout_s=3",
        "admission.n_samples=8",
        "admission.groups_per_step=1",
        "steps=3",
    )
    assert (summary.outcome, summary.steps) == ("finished", 3)
    counts = assert_books_balance(runs.folder / "sleeper")
    assert counts["trained"] == 3
    rows = read_rows(runs.folder / "sleeper/metrics.jsonl")
    assert sum(row["agent/timeout_episodes"] for row in rows) >= 1


def test_an_error_in_the_learner_is_the_one_that_is_told(runs: Runs) -> None:
    handle = runs.start("learner-error", "steps=200")
    until_step(handle, 1)

    def lose_device(self):
        def fail(gradient):
            raise ValueError("device lost")

        next(iter(self._engine._model.parameters())).register_hook(fail)

    ray.get(actor_of("learner-error", "learner-0").__ray_call__.remote(lose_device))
    with pytest.raises(ArealRayError) as told:
        handle.wait(120)
    assert "learner-0: ValueError: device lost" in str(told.value)
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.extended
def test_groups_that_never_teach_anything_stop_the_run_at_their_budget(runs: Runs) -> None:
    error = runs.failure(
        "equal",
        "reward.score=tests.support.digits:always_equal",
        "admission.drop_equal_rewards=true",
        "admission.max_refill_rounds=3",
    )
    assert isinstance(error, TooManyFailures)
    assert "12 groups in a row were dropped (equal_rewards)" in str(error)
    counts = assert_books_balance(runs.folder / "equal")
    assert counts["dropped"] >= 12
    assert counts["trained"] == 0


@pytest.mark.extended
def test_one_prompt_that_is_too_long_costs_its_task_and_not_the_run(runs: Runs) -> None:
    agent = ("agent.run=tests.support.digits:prompts_too_long", "tasks.shuffle=false")
    summary = runs.run("overlong", *agent)
    assert (summary.outcome, summary.steps) == ("finished", 6)
    counts = assert_books_balance(runs.folder / "overlong")
    assert counts["failed"] == 3  # its attempts
    (reason,) = summary.ledger.reasons
    assert reason.startswith("truncated: prompt of 10")
    assert "context window 128" in reason


@pytest.mark.extended
def test_a_task_that_kills_its_agent_actor_costs_itself_and_not_the_run(runs: Runs) -> None:
    agent = ("agent.run=tests.support.digits:kills_its_actor", "tasks.shuffle=false")
    summary = runs.run("one-exits", *agent, "admission.max_concurrent_rollouts=8")
    assert (summary.outcome, summary.steps) == ("finished", 6)
    assert assert_books_balance(runs.folder / "one-exits")["trained"] == 24
    assert [line for line in summary.replaced if line.startswith("agent-0")], summary.replaced


@pytest.mark.extended
def test_an_agent_that_always_kills_its_actor_stops_the_run_with_that_reason(runs: Runs) -> None:
    error = runs.failure(
        "all-exit",
        "agent.run=tests.support.digits:kills_its_actor",
        "agent.args={task_id: all}",
        "deadlines.groups_s=600",
    )
    assert isinstance(error, TooManyFailures)
    assert "actor lost: agent-0 died" in str(error)
    assert len(str(error).splitlines()) == 1
    assert assert_books_balance(runs.folder / "all-exit")["trained"] == 0


@pytest.mark.extended
def test_a_full_disk_ends_the_run_in_order_with_the_file_and_the_cause(runs: Runs) -> None:
    handle = runs.start("disk-full", "steps=10000")
    until_step(handle, 3)  # the checkpoint after step 2 is whole
    with no_more_than(0):
        with pytest.raises(StorageError) as told:
            handle.wait(PATIENCE_S)
        assert not handle.status().is_running
    assert str(handle.folder) in str(told.value)
    assert "cannot be written: File too large. Make room" in str(told.value)
    assert len(str(told.value).splitlines()) == 1
    assert "Traceback" not in events_of(handle.folder)
    until(lambda: not actor_names("disk-full"), "its actors to end", 30)
    resumed = runs.run("disk-full", "steps=30", resume=True)
    assert (resumed.outcome, resumed.steps) == ("finished", 30)


@pytest.mark.extended
def test_a_reward_actor_that_cannot_write_the_journal_is_told_with_the_file(runs: Runs) -> None:
    handle = runs.start("journal-full", "steps=10000")
    until_step(handle, 1)

    def fill_disk(self):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    ray.get(actor_of("journal-full", "reward-0").__ray_call__.remote(fill_disk))
    with pytest.raises(StorageError, match=r"reward-0: .*/journal/groups-.*\.seg: cannot be writ"):
        handle.wait(PATIENCE_S)


@pytest.mark.extended
def test_a_run_at_its_last_step_does_not_wait_for_slow_rollouts(runs: Runs) -> None:
    handle = runs.start(
        "slow-rollouts",
        "agent.run=tests.support.digits:sleeps_after",
        "agent.args={calls: 8, seconds: 600}",
        "agent.timeout_s=700",
        "steps=2",
        "admission.groups_per_step=1",
        "admission.max_head_offpolicyness=12",
    )
    until_step(handle, 2)
    reached_s = time.monotonic()
    summary = handle.wait(60)
    assert time.monotonic() - reached_s < 30
    assert (summary.outcome, summary.steps) == ("finished", 2)
    counts = assert_books_balance(handle.folder)
    assert counts["in_flight"] >= 10
    assert steps_of(handle.folder) == [1, 2]


@pytest.mark.extended
def test_a_stop_does_not_wait_for_a_rollout_that_hangs_in_a_publish(runs: Runs) -> None:
    """Nor does the step get lost whose weights it never took.

    The thread that takes weights in hangs first, and the whole process once a publish waits for it.
    Halted at any other moment, the rollout may owe the groups of the next step, and then there is
    neither a step nor a publish.
    """
    handle = runs.start("stop-in-publish", "steps=500")
    until_step(handle, 2)
    pid = pid_of("stop-in-publish", "rollout-0")

    def hang_in_next_publish(self):
        self._transfers.submit(time.sleep, 600)

    rollout = actor_of("stop-in-publish", "rollout-0")
    ray.get(rollout.__ray_call__.remote(hang_in_next_publish), timeout=60)
    try:
        until(lambda: is_publishing("stop-in-publish"), "a publish that does not end")
        os.kill(pid, signal.SIGSTOP)
        asked_s = time.monotonic()
        handle.stop()
        summary = handle.wait(PATIENCE_S)
        assert time.monotonic() - asked_s < 60  # a publish has weights.timeout_s = 120
    finally:
        os.kill(pid, signal.SIGKILL)
    assert summary.outcome == "stopped"
    assert "reached no rollout" in events_of(handle.folder)
    assert steps_of(handle.folder)[-1] == summary.steps == summary.version
    assert assert_books_balance(handle.folder)["trained"] == 4 * summary.steps
    saved = Checkpoints(handle.folder / "checkpoints").latest().checkpoint
    assert saved is not None
    assert (saved.state["step"], saved.state["version"]) == (summary.steps, summary.steps)


def is_publishing(run_name: str) -> bool:
    """Whether the ParamSyncActor is at the same phase for a second."""
    health = ray.get(actor_of(run_name, "param-sync").health.remote())
    return " for " in health.doing and float(health.doing.split(" for ")[1].split()[0]) > 1.0
