"""Actors that are added to a run and taken from it while it trains."""

import json

import pytest

from areal_ray.control import ask_to_scale
from areal_ray.core.journal import read_ledger
from areal_ray.errors import PlacementError
from areal_ray.run_listing import describe_run
from tests.support.whole_runs import (
    PATIENCE_S,
    Runs,
    actor_names,
    assert_books_balance,
    events_of,
    until,
    until_step,
)

SLOW = ("agent.run=tests.support.digits:slow_tool", "agent.args.longest_s=0.3")


def test_agents_are_added_drained_and_added_again_and_no_group_is_lost(runs: Runs) -> None:
    handle = runs.start("scaled", "steps=200", *SLOW, "admission.max_failed_share=0.01")
    try:
        until_step(handle, 1)
        told = ask_to_scale(handle.folder, {"agent": 3, "reward": 2}, patience_s=PATIENCE_S)
        assert told == "agent: 1 -> 3, reward: 1 -> 2"
        names = {name.split("/")[1] for name in actor_names("scaled")}
        assert {"agent-0", "agent-1", "agent-2", "reward-0", "reward-1"} <= names
        until(lambda: "actors.agent 3" in _squeezed(describe_run(handle.folder)), "the status")
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
    room = ("agent.num_cpus=6", "deadlines.placement_s=1")
    handle = runs.start("no-room", "steps=200", *SLOW, *room)
    try:
        until_step(handle, 1)
        with pytest.raises(PlacementError, match=r"there are 1: placement: agent-1 not placed"):
            ask_to_scale(handle.folder, {"agent": 2}, patience_s=PATIENCE_S)
        until_step(handle, len(read_steps(handle)) + 2)
        assert _agents("no-room") == {"agent-0"}
    finally:
        handle.stop()
        assert handle.wait(PATIENCE_S).outcome == "stopped"


def read_steps(handle) -> list[int]:
    rows = (handle.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["step"] for row in map(json.loads, rows) if row["kind"] == "step"]


def _agents(run: str) -> set[str]:
    short = {name.split("/")[1] for name in actor_names(run)}
    return {name for name in short if name.startswith("agent-")}


def _squeezed(text: str) -> str:
    return " ".join(text.split())
