"""Agents that are programs, over a real AgentActor, its edge and real rollout actors."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from areal_ray.core.trajectory import Outcome
from areal_ray.errors import DeadlineExceeded
from areal_ray.telemetry.rows import read_rows
from tests.support.agent_stage import ROOT, Stage, ask
from tests.support.agent_stage import stage as stage
from tests.support.whole_runs import Runs, episodes_of, staleness_of

AGENT = f"{ROOT}/tests/support/program_agent.py"


def program(stage: Stage, *words: str, **fields: Any) -> Any:
    return stage.agent(command=("python", "-S", AGENT, *words), **{"max_processes": 3, **fields})


def test_a_programs_episodes_are_recorded_token_by_token_as_those_in_process(stage):
    summary, group = stage.run(program(stage, "two_turns"), ask())
    assert summary.num_usable == len(group.trajectories) == 4
    assert (summary.oldest_version, summary.newest_version) == (3, 3)
    assert summary.num_turns == 8
    for line in group.trajectories:
        assert line.outcome in (Outcome.OK, Outcome.TRUNCATED)
        assert set(line.turn_ids[line.loss_mask]) == {0, 1}
        assert (line.versions[line.loss_mask] == 3).all()
        assert (line.behaviour_logprobs[line.loss_mask] < 0).all()
        assert line.reward is None
        assert line.seconds["model"] > 0
        assert line.seconds["tool"] > 0


def test_siblings_differ_whatever_seed_their_program_asks_for_and_a_groups_seed_repeats_them(stage):
    actor, task = program(stage, "seeded", max_new_tokens=12), ask()
    ids = [
        [t.token_ids.tolist() for t in stage.run(actor, task, n=2, seed=seed)[1].trajectories]
        for seed in (1, 1)
    ]
    assert ids[0][0] != ids[0][1]
    assert ids[0] == ids[1]


def test_a_program_scores_itself_through_the_gateway(stage):
    summary, group = stage.run(program(stage, "scores", episode_retries=0), ask(), n=1)
    assert summary.failures == ()
    assert [line.reward for line in group.trajectories] == [0.25]


def test_a_program_that_dies_is_attempted_anew_and_trains_once(stage, tmp_path):
    actor = program(stage, "killed_at_first", str(tmp_path / "attempts"), max_processes=1)
    summary, group = stage.run(actor, ask(), n=2)
    assert summary.num_usable == len(group.trajectories) == 2
    assert [(f.outcome, f.count) for f in summary.failures if not f.outcome.startswith("t")] == [
        (Outcome.AGENT_ERROR, 1)
    ]
    assert "SIGKILL" in summary.failures[0].reason
    assert len({line.episode_id for line in group.trajectories}) == 2


@pytest.mark.parametrize(
    ("kind", "outcome", "reason"),
    [
        ("silent", Outcome.AGENT_ERROR, "the agent ended without a model call"),
        ("fails", Outcome.AGENT_ERROR, "exit code 1: no such tool, says [redacted]"),
        ("too_many", Outcome.TRUNCATED, "agent.max_turns = 3"),
        ("too_long", Outcome.TRUNCATED, "the prompt fills the context window"),
        ("far_too_long", Outcome.TRUNCATED, "the prompt fills the context window"),
    ],
)
def test_a_programs_end_is_told_as_that_of_an_agent_in_process(stage, kind, outcome, reason):
    actor = program(stage, kind, max_turns=3, episode_retries=0)
    summary, group = stage.run(actor, ask(), n=1)
    assert summary.outcomes == {outcome: 1}
    assert len(group.trajectories) == (outcome is Outcome.TRUNCATED)
    if kind not in ("too_many", "far_too_long"):
        assert reason in summary.failures[0].reason
    else:
        assert group.trajectories[0].failure == reason


def test_a_program_that_hangs_times_out_and_leaves_no_turn_behind(stage):
    actor = stage.agent(
        command=("python", "-c", "import time; time.sleep(600)"), timeout_s=1.0, episode_retries=0
    )
    summary, group = stage.run(actor, ask(), n=2)
    assert summary.outcomes == {Outcome.TIMEOUT: 2}
    assert summary.failures[0].reason == "episode exceeded 1 s"
    assert group.trajectories == ()
    assert stage.ray.get(actor.health.remote()).num_turns_pending == 0


def test_a_fleet_that_fails_ends_the_group_though_the_program_would_try_again(stage):
    actor = program(stage, "two_turns", max_new_tokens=400, turn_timeout_s=0.02)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.02 s for rollout-"):
        stage.run(actor, ask())


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_an_agent_in_node_needs_no_package(stage):
    script = Path(ROOT, "recipes/calculator/node_agent.mjs")
    summary, group = stage.run(stage.agent(command=("node", str(script))), ask(), n=2)
    assert [f.reason for f in summary.failures if f.outcome == Outcome.AGENT_ERROR] == []
    assert summary.num_usable == len(group.trajectories) == 2
    assert summary.num_turns >= 2


@pytest.mark.extended
def test_a_run_learns_from_a_program_on_openais_sdk(runs: Runs) -> None:
    script = Path(ROOT, "recipes/calculator/openai_agent.py")
    summary = runs.run(
        "openai-agent",
        *("steps=2", "admission.groups_per_step=2", "admission.n_samples=2"),
        *(f"agent.command=[python, {script}]", "agent.max_processes=4", "agent.timeout_s=200"),
        "admission.max_concurrent_rollouts=2",
        "objective.kind=reinforce_pp",  # equal rewards teach it, too
    )
    assert (summary.outcome, summary.steps, summary.version) == ("finished", 2, 2)
    episodes = episodes_of(runs.folder / "openai-agent")
    assert len(episodes) == 8
    assert all(episode["outcome"] in ("ok", "truncated") for episode in episodes)
    assert all(0 <= version <= 1 for e in episodes for version in staleness_of(e))
    rows = read_rows(runs.folder / "openai-agent/metrics.jsonl")
    assert all(row["learner/trained_tokens"] > 0 for row in rows if row["kind"] == "step")
