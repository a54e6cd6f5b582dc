"""Gateway, agents or driver are killed amid episodes: what was sealed trains, and once."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from areal_ray import launch
from areal_ray.core.journal import read_ledger
from recipes.online.sessions import finish
from recipes.online.sessions import start as start_sessions
from tests.support.command_line import descendants, is_alive
from tests.support.online import (
    RECIPE,
    acknowledged,
    agent_program,
    sessions_trained,
    unaccounted,
)
from tests.support.served import Served, commanded, serving
from tests.support.tiny_models import write_tiny_model
from tests.support.whole_runs import (
    PATIENCE_S,
    Runs,
    assert_books_balance,
    pid_of,
    steps_of,
    until,
    until_step,
)

STEPS = 12
PROGRAM = ("--groups", "8", "--group-size", "4")


def start(runs: Runs, name: str, *overrides: str, **how: Any) -> Any:
    """A small online run over the tiny model."""
    return launch(
        RECIPE,
        [
            f"name={name}",
            f"cluster.fileroot={runs.folder}",
            f"model={{path: {runs.folder}/tiny}}",
            f"steps={STEPS}",
            "admission={groups_per_step: 4, n_samples: 4, min_scored_samples: 1}",
            "gateway.sessions.idle_timeout_s=5",
            "checkpoint.every_steps=2",
            "learner.ppo_n_minibatches=1",
            "telemetry.console=off",
            *overrides,
        ],
        **how,
    )


def test_no_sealed_session_is_lost_or_trained_twice_whoever_is_killed(runs: Runs) -> None:
    handle = start(runs, "gateway-killed")
    log = runs.folder / "gateway-killed-sessions.jsonl"
    try:
        with agent_program(handle, log, *PROGRAM) as program:
            until_step(handle, 2)
            os.kill(pid_of("gateway-killed", "gateway-0"), signal.SIGKILL)
            until_step(handle, 5)
            program.kill()  # amid its episodes
        with agent_program(handle, log, *PROGRAM):
            until_step(handle, 7)
            os.kill(pid_of("gateway-killed", "gateway-0"), signal.SIGKILL)
            summary = handle.wait(PATIENCE_S)
    finally:
        handle.stop()
    assert (summary.outcome, summary.steps) == ("finished", STEPS)
    assert any("gateway-0" in line and "back" in line for line in summary.replaced)
    assert_books_balance(handle.folder)
    twice = [name for name, count in Counter(sessions_trained(handle.folder)).items() if count > 1]
    assert not twice
    sealed = acknowledged(log)
    assert len(set(sealed)) == len(sealed) > 4 * 4 * STEPS / 2
    assert not unaccounted(handle.folder, runs.folder / "tiny", sealed)


@pytest.mark.extended
def test_a_resumed_run_takes_up_the_sessions_that_its_checkpoint_does_not_hold(runs: Runs) -> None:
    log = runs.folder / "online-resumed-sessions.jsonl"
    handle = start(runs, "online-resumed", "checkpoint.every_steps=3")
    with agent_program(handle, log, *PROGRAM):
        until_step(handle, 5)  # two steps that no checkpoint holds
        os.kill(pid_of("online-resumed", "learner-0"), signal.SIGKILL)
        until(lambda: not handle.status().is_running, "the end of the run without a learner")
    taken = steps_of(handle.folder)[-1]
    url = handle.gateway.url
    again = start(runs, "online-resumed", "checkpoint.every_steps=3", resume=True)
    with agent_program(again, log, *PROGRAM):
        summary = again.wait(PATIENCE_S)
    assert (summary.outcome, summary.steps) == ("finished", STEPS)
    assert again.gateway.url == url
    assert_books_balance(again.folder, resumed=True)
    of_step: dict[int, list[str]] = {}
    of_group: dict[str, list[str]] = {}
    for event in read_ledger(again.folder / "journal"):
        if event["event"] == "committed":
            of_group[event["group"]] = event["sessions"]
        elif event["event"] == "trained":
            of_step[event["step"]] = [s for group in event["groups"] for s in of_group[group]]
    last = [session for sessions in of_step.values() for session in sessions]
    assert sorted(of_step) == list(range(1, STEPS + 1))
    # At most: a session that the death broke off is rejected, and its group trains without it.
    assert 4 * STEPS <= len(set(last)) == len(last) <= 4 * 4 * STEPS
    forgotten = set(sessions_trained(again.folder)) - set(last)
    assert taken >= 5
    assert not unaccounted(again.folder, runs.folder / "tiny", [*acknowledged(log), *forgotten])
    assert not forgotten, "sessions of forgotten steps were not taken again"


ADMIN_KEY = "admin-key-of-a-run-that-is-killed"


def sealed_group(server: Served, task: str) -> list[str]:
    """Two attempts at a task that differ in their reward; the names of their sessions."""
    url = server.told("gateway")
    sessions = start_sessions(url, ADMIN_KEY, task, group_size=2)
    for reward, session in enumerate(sessions):
        client = OpenAI(base_url=f"{url}/v1", api_key=session["api_key"])
        asked = [{"role": "user", "content": f"{task}: what is 2 + 3?"}]
        client.chat.completions.create(model="policy", messages=asked)
        finish(url, session, float(reward))
    return [session["session_id"] for session in sessions]


@pytest.mark.parametrize(
    "steps_taken", [0, pytest.param(1, marks=pytest.mark.extended)], ids=["0-steps", "1-step"]
)
def test_a_run_killed_before_its_first_checkpoint_is_resumed_with_all_sealed_sessions(
    tmp_path: Path, steps_taken: int
) -> None:
    write_tiny_model(tmp_path / "tiny")
    recipe = (
        "name=early",
        f"model={{path: {tmp_path}/tiny}}",
        "steps=2",
        "admission={groups_per_step: 2, n_samples: 2, min_scored_samples: 1}",
        "checkpoint.every_steps=null",
        "learner.ppo_n_minibatches=1",
    )
    with serving(
        str(RECIPE), *recipe, fileroot=tmp_path, name="early", AREAL_RAY_ADMIN_KEY=ADMIN_KEY
    ) as server:
        sealed = sealed_group(server, "a")
        if steps_taken:
            sealed += sealed_group(server, "b")
            until(lambda: steps_of(server.folder) == [1], "the first step")
            sealed += sealed_group(server, "c")
        left = descendants(server.child.pid)
        server.child.kill()
        server.child.wait()
    until(lambda: not any(map(is_alive, left)), "the end of the processes of the run")
    assert not list((server.folder / "checkpoints").glob("step-*"))
    words = ("resume", "early", "--fileroot", str(tmp_path))
    with commanded(*words, folder=server.folder, AREAL_RAY_ADMIN_KEY=ADMIN_KEY) as again:
        for task in ("d", "e", "f")[steps_taken * 2 :]:
            sealed += sealed_group(again, task)
        assert again.child.wait(PATIENCE_S) == 0, again.lines
    assert any("resumes at step 0" in line for line in again.lines)
    assert_books_balance(server.folder, resumed=True)
    assert steps_of(server.folder) == [1, 2]
    events = read_ledger(server.folder / "journal")
    begun = 1 + max(i for i, event in enumerate(events) if event["event"] == "resumed")
    kept = tmp_path / "second-life"
    (kept / "journal").mkdir(parents=True)
    lines = (server.folder / "journal/ledger.jsonl").read_text().splitlines(keepends=True)
    (kept / "journal/ledger.jsonl").write_text("".join(lines[begun:]))
    assert len(sealed) == 8
    assert sorted(sessions_trained(kept)) == sorted(sealed)
