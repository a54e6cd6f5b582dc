"""Actors of whole runs are killed: the run goes on and its books balance, or says who was lost."""

import os
import signal
import time

import pytest
import ray

from areal_ray.errors import ArealRayError
from areal_ray.telemetry.rows import read_rows
from tests.support.whole_runs import (
    Runs,
    actor_of,
    assert_books_balance,
    episodes_of,
    events_of,
    pid_of,
    staleness_of,
    steps_of,
    until,
    until_step,
)

STEPS = 10
SLOW = (
    "agent.run=tests.support.digits:slow_tool",
    "agent.args={shortest_s: 0.1, longest_s: 0.3}",
    f"steps={STEPS}",
)


def kill(run_name: str, name: str) -> None:
    os.kill(pid_of(run_name, name), signal.SIGKILL)


def assert_ended_well(handle, *names: str, resumed: bool = False) -> None:
    summary = handle.wait(250)
    folder = handle.folder
    assert (summary.outcome, summary.steps, summary.version) == ("finished", STEPS, STEPS)
    assert steps_of(folder) == list(range(1, STEPS + 1))
    assert assert_books_balance(folder, resumed=resumed)["trained"] == 4 * STEPS
    assert max(set().union(*map(staleness_of, episodes_of(folder)))) <= 2
    for name in names:
        lines = [line for line in summary.replaced if line.startswith(name)]
        assert lines, f"nothing says that {name} died: {summary.replaced}"
        assert any("back" in line for line in lines), lines


def test_a_run_survives_the_death_of_its_only_rollout(runs: Runs) -> None:
    handle = runs.start("rollout-killed", *SLOW)
    until_step(handle, 2)
    kill("rollout-killed", "rollout-0")
    assert_ended_well(handle, "rollout-0")
    assert "rollout-0" in events_of(handle.folder)


@pytest.mark.extended
def test_a_run_survives_the_death_of_one_of_two_rollouts(runs: Runs) -> None:
    handle = runs.start("one-of-two", "rollout.replicas=2", *SLOW)
    until_step(handle, 2)
    kill("one-of-two", "rollout-1")
    assert_ended_well(handle)
    assert "rollout-1" in events_of(handle.folder)


def test_a_run_survives_the_deaths_of_its_only_agent_and_reward_actors(runs: Runs) -> None:
    handle = runs.start("agent-killed", *SLOW)
    until_step(handle, 1)
    kill("agent-killed", "agent-0")
    until_step(handle, 4)
    reward = actor_of("agent-killed", "reward-0")
    scoring = ray.get(
        reward.__ray_call__.remote(lambda self: [c.running.pid for c in self._runner._alive])
    )
    for pid in scoring:
        os.kill(pid, signal.SIGKILL)
    until_step(handle, 6)
    kill("agent-killed", "reward-0")
    assert_ended_well(handle, "agent-0", "reward-0")


@pytest.mark.extended
def test_evaluations_go_on_under_the_right_version_after_their_replica_died(runs: Runs) -> None:
    tasks = "{source: 'tests.support.digits:tasks', args: {num_tasks: 8}}"
    handle = runs.start("evaluated", f"evaluation={{tasks: {tasks}, every_steps: 3}}", *SLOW)
    until_step(handle, 1)
    kill("evaluated", "evaluation")
    assert_ended_well(handle, "evaluation")
    points = handle.wait(1).eval.curve
    assert [(point.step, point.version) for point in points] == [(n, n) for n in (0, 3, 6, 9, 10)]
    assert all(point.accuracy is not None and point.episodes == 8 for point in points)


@pytest.mark.parametrize(
    ("lost", "overrides"),
    [
        ("learner-0", ()),
        pytest.param(
            "learner-1",
            ("learner.engine.kind=fsdp", "learner.ranks=2"),
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_run_that_lost_a_learner_says_so_within_a_minute_and_resumes(
    runs: Runs, lost: str, overrides: tuple[str, ...]
) -> None:
    name, how = f"{lost}-killed", ("checkpoint.every_steps=1", *overrides, *SLOW)
    handle = runs.start(name, *how)
    until_step(handle, 3)
    kill(name, lost)
    killed_s = time.monotonic()
    with pytest.raises(ArealRayError, match=f"{lost} died"):
        handle.wait(120)
    assert time.monotonic() - killed_s < 60
    done = steps_of(handle.folder)[-1]
    assert 3 <= done < STEPS
    resumed = runs.start(name, *how, resume=True)
    assert_ended_well(resumed, resumed=True)


@pytest.mark.extended
def test_a_run_that_lost_its_param_sync_names_it(runs: Runs) -> None:
    handle = runs.start("sync-killed", *SLOW)
    until_step(handle, 1)
    kill("sync-killed", "param-sync")
    with pytest.raises(ArealRayError, match="param-sync died"):
        handle.wait(120)
    until(lambda: not [n for n in ray.util.list_named_actors() if n.startswith("sync-killed/")],
          "the actors to end", 30)  # fmt: skip


@pytest.mark.extended
def test_a_run_that_lost_its_second_learner_rank_names_it(runs: Runs) -> None:
    handle = runs.start("rank-killed", "learner.ranks=2", *SLOW)
    until_step(handle, 1)
    kill("rank-killed", "learner-1")
    with pytest.raises(ArealRayError, match="learner-1 died"):
        handle.wait(120)


@pytest.mark.extended
def test_a_replica_altered_in_mid_run_is_told_counted_refreshed_and_back(runs: Runs) -> None:
    handle = runs.start("altered", "rollout.replicas=2", *SLOW)
    until_step(handle, 2)

    def alter_next_swap(self):
        from tests.support.fragile_rollout import FragileEngine

        self._engine.__class__ = FragileEngine
        self._engine.fault = "alter"

    replica = actor_of("altered", "rollout-1")
    ray.get(replica.__ray_call__.remote(alter_next_swap), timeout=60)
    assert_ended_well(handle)
    summary = handle.wait(1)
    assert (summary.publish.count, summary.publish.differing) == (STEPS, 1)
    told = summary.publish_events
    assert "set aside: rollout-1 at version" in told[0]
    assert "embed_tokens is live with other bytes than those that arrived" in told[0]
    assert told[1].endswith("rollout-1 is refreshed")
    assert told[2].endswith("rollout-1 takes part again")
    assert told[0] in events_of(handle.folder)
    report = (handle.folder / "report.html").read_text(encoding="utf-8")
    assert "Set aside by a publish" in report
    rows = read_rows(handle.folder / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "step"]
    assert sum(row["publish/differing_replicas"] for row in steps) == 1
    assert all(row["publish/probe_max_nats"] < 1e-4 for row in steps)
    assert not summary.replaced  # it was refreshed in place
