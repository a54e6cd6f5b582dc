"""Actors that are added to a run and taken from it while it trains."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import placement_group, remove_placement_group

from areal_ray.control import ask_to_scale
from areal_ray.core.journal import read_ledger
from areal_ray.errors import PlacementError
from areal_ray.run_listing import describe_run
from tests.support.whole_runs import (
    PATIENCE_S,
    Runs,
    actor_names,
    actor_of,
    assert_books_balance,
    episodes_of,
    events_of,
    pid_of,
    staleness_of,
    until,
    until_step,
)

SLOW = ("agent.run=tests.support.digits:slow_tool", "agent.args.longest_s=0.3")


@pytest.mark.extended
def test_agents_are_added_drained_and_added_again_and_no_group_is_lost(runs: Runs) -> None:
    handle = runs.start("scaled", "steps=200", *SLOW, "admission.max_failed_share=0.01")
    try:
        until_step(handle, 1)
        told = ask_to_scale(handle.folder, {"agent": 3, "reward": 2}, patience_s=PATIENCE_S)
        assert told == "agent: 1 -> 3, reward: 1 -> 2"
        names = {name.split("/")[1] for name in actor_names("scaled")}
        assert {"agent-0", "agent-1", "agent-2", "reward-0", "reward-1"} <= names
        assert "actors.agent 3" in _squeezed(describe_run(handle.folder))
        told = ask_to_scale(handle.folder, {"agent": 1}, patience_s=PATIENCE_S)
        assert told == "agent: 3 -> 1"
        until(lambda: _agents("scaled") == {"agent-0"}, "the agents to be gone")
        assert ask_to_scale(handle.folder, {"agent": 2}, patience_s=PATIENCE_S)
        until(lambda: _agents("scaled") == {"agent-0", "agent-3"}, "the new agent")
        until_step(handle, len(read_steps(handle)) + 2)
    finally:
        handle.stop()
        handle.wait(PATIENCE_S)
    assert_books_balance(handle.folder)
    failed = [r for r in read_ledger(handle.folder / "journal") if r["event"] == "failed"]
    assert failed == []
    assert "scaled agent: 3 -> 1" in events_of(handle.folder)


@pytest.mark.extended
def test_a_cluster_without_room_refuses_with_demand_and_supply_and_the_run_goes_on(
    runs: Runs,
) -> None:
    room = ("agent.num_cpus=3", "deadlines.placement_s=1")
    handle = runs.start("no-room", "steps=200", *SLOW, *room)
    others = placement_group([{"CPU": 2}])
    try:
        until_step(handle, 1)
        assert others.wait(PATIENCE_S)
        with pytest.raises(PlacementError, match=r"nothing was changed: placement: agent-1 not"):
            ask_to_scale(handle.folder, {"agent": 2}, patience_s=PATIENCE_S)
        until_step(handle, len(read_steps(handle)) + 2)
        assert _agents("no-room") == {"agent-0"}
    finally:
        remove_placement_group(others)
        handle.stop()
        assert handle.wait(PATIENCE_S).outcome == "stopped"


def test_rollouts_come_with_the_committed_version_and_go_and_nothing_is_lost(runs: Runs) -> None:
    handle = runs.start("rollouts", "steps=300", *SLOW, "admission.max_failed_share=0.01")
    try:
        until_step(handle, 2)
        committed = read_steps(handle)[-1]
        told = ask_to_scale(handle.folder, {"rollout": 3}, patience_s=PATIENCE_S)
        assert told == "rollout: 1 -> 3"
        assert "actors.rollout 3" in _squeezed(describe_run(handle.folder))
        for name in ("rollout-1", "rollout-2"):
            until(lambda name=name: _engine("rollouts", name).sampled_tokens, f"tokens of {name}")
            assert _engine("rollouts", name).version >= committed
        until_step(handle, read_steps(handle)[-1] + 3)
        assert {_published_to(handle.folder)[-1]} == {3}
        told = ask_to_scale(handle.folder, {"rollout": 1}, patience_s=PATIENCE_S)
        assert told == "rollout: 3 -> 1"
        until(lambda: _actors("rollouts", "rollout-") == {"rollout-0"}, "the rollouts to be gone")
        assert ask_to_scale(handle.folder, {"rollout": 2}, patience_s=PATIENCE_S)
        until(lambda: _engine("rollouts", "rollout-3").sampled_tokens, "tokens of the new one")
        until_step(handle, read_steps(handle)[-1] + 2)
    finally:
        handle.stop()
        summary = handle.wait(PATIENCE_S)
    counts = assert_books_balance(handle.folder)
    assert counts["failed"] == 0
    assert (summary.publish.differing, summary.publish_events) == (0, ())
    assert summary.scaled == ("rollout: 1 -> 3", "rollout: 3 -> 1", "rollout: 1 -> 2")
    assert "rollout: 3 -&gt; 1" in (handle.folder / "report.html").read_text(encoding="utf-8")
    seen = set().union(*map(staleness_of, episodes_of(handle.folder)))
    assert seen
    assert max(seen) <= 2


@pytest.mark.extended
def test_an_agent_actor_that_restarts_knows_the_replicas_that_came_since(runs: Runs) -> None:
    handle = runs.start("known", "steps=300", *SLOW)
    try:
        until_step(handle, 1)
        ask_to_scale(handle.folder, {"rollout": 2}, patience_s=PATIENCE_S)
        os.kill(pid_of("known", "agent-0"), signal.SIGKILL)
        until(lambda: "agent-0" in str(handle.status().status.get("services")), "the status")
        before = _engine("known", "rollout-1").sampled_tokens
        until_step(handle, read_steps(handle)[-1] + 3)
        assert _engine("known", "rollout-1").sampled_tokens > before
        os.kill(pid_of("known", "rollout-1"), signal.SIGKILL)  # and Ray restarts one that came
        until_step(handle, read_steps(handle)[-1] + 3)
        until(lambda: "rollout-1" in " ".join(_lines(handle.folder, "is back")), "its return")
    finally:
        handle.stop()
        assert handle.wait(PATIENCE_S).outcome == "stopped"
    assert_books_balance(handle.folder)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("by-store", ("weights.transport=object_store",)),
        ("by-disk", ("weights.transport=disk",)),
        ("by-changes", ("weights.shares_memory=false", "weights.full_every=4")),
        ("by-adapters", ("model.lora={rank: 4, alpha: 16}", "learner.optimizer.lr=0.02")),
        ("in-step", ("admission.max_head_offpolicyness=0",)),
    ],
)
def test_rollouts_come_and_go_whatever_way_weights_travel(
    runs: Runs, name: str, how: tuple[str, ...]
) -> None:
    # With the old cache, tokens after a swap would not be those of the new weights alone.
    anew = "rollout.on_weight_update=recompute"
    handle = runs.start(name, "steps=300", *SLOW, anew, *how)
    try:
        until_step(handle, 2)
        ask_to_scale(handle.folder, {"rollout": 2}, patience_s=PATIENCE_S)
        until(lambda: _engine(name, "rollout-1").sampled_tokens, "tokens of the new one")
        until_step(handle, read_steps(handle)[-1] + 3)
        ask_to_scale(handle.folder, {"rollout": 1}, patience_s=PATIENCE_S)
        until_step(handle, read_steps(handle)[-1] + 2)
    finally:
        handle.stop()
        summary = handle.wait(PATIENCE_S)
    assert assert_books_balance(handle.folder)["failed"] == 0
    assert summary.publish.differing == 0
    rows = [json.loads(line) for line in (handle.folder / "metrics.jsonl").open(encoding="utf-8")]
    fresh = [row for row in rows if row.get("mismatch/fresh_tokens")]
    assert max((abs(row["mismatch/kl_nats"]) for row in fresh), default=0.0) < 1e-5


def test_what_cannot_be_is_refused_before_anything_changes(runs: Runs) -> None:
    """No room for all of it, a role that the kind has not: of neither request is any part done."""
    room = ("agent.num_cpus=1", "deadlines.placement_s=1")
    handle = runs.start("refuses", "steps=300", *SLOW, *room)
    try:
        until_step(handle, 1)
        with pytest.raises(
            PlacementError, match=r"nothing was changed: placement: the layout"
        ) as no:
            ask_to_scale(handle.folder, {"rollout": 2, "agent": 900}, patience_s=PATIENCE_S)
        assert "1 node with 8 CPUs" in str(no.value)
        with pytest.raises(PlacementError, match="no gateway actors that can be scaled; it has ag"):
            ask_to_scale(handle.folder, {"agent": 2, "gateway": 2}, patience_s=PATIENCE_S)
        assert _agents("refuses") == {"agent-0"}
        assert _actors("refuses", "rollout-") == {"rollout-0"}
        assert handle.status().status["actors"] == {"agent": "1", "reward": "1", "rollout": "1"}
        until_step(handle, read_steps(handle)[-1] + 2)
    finally:
        handle.stop()
        assert handle.wait(PATIENCE_S).outcome == "stopped"


@pytest.mark.extended
def test_a_resumed_run_tells_what_it_had_been_scaled_to(runs: Runs) -> None:
    handle = runs.start("again", "steps=300", *SLOW)
    try:
        until_step(handle, 1)
        ask_to_scale(handle.folder, {"rollout": 2, "agent": 3}, patience_s=PATIENCE_S)
        ask_to_scale(handle.folder, {"agent": 1}, patience_s=PATIENCE_S)
        until_step(handle, read_steps(handle)[-1] + 1)
    finally:
        handle.stop()
        done = handle.wait(PATIENCE_S).steps
    summary = runs.run("again", f"steps={done + 2}", resume=True)
    assert (summary.outcome, summary.steps) == ("finished", done + 2)
    assert (
        "the run had been scaled to 2 rollout; it goes on with the recipe's 1 rollout. areal-ray "
        "scale again rollout=2 brings them back"
    ) in events_of(handle.folder)
    assert_books_balance(handle.folder, resumed=True)


def _actors(run: str, prefix: str) -> set[str]:
    short = {name.split("/")[1] for name in actor_names(run)}
    return {name for name in short if name.startswith(prefix)}


def _engine(run: str, name: str) -> Any:
    """What the engine of a rollout says of itself."""
    import ray

    return ray.get(actor_of(run, name).health.remote(), timeout=60).engine


def _published_to(folder: Path) -> list[int]:
    """Replicas that took each version."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open(encoding="utf-8")]
    return [row["rollout/replicas"] for row in rows if row.get("rollout/replicas")]


def _lines(folder: Path, word: str) -> list[str]:
    return [line for line in events_of(folder).splitlines() if word in line]


def read_steps(handle) -> list[int]:
    rows = (handle.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["step"] for row in map(json.loads, rows) if row["kind"] == "step"]


def _agents(run: str) -> set[str]:
    short = {name.split("/")[1] for name in actor_names(run)}
    return {name for name in short if name.startswith("agent-")}


def _squeezed(text: str) -> str:
    return " ".join(text.split())
