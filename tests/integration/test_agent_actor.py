"""Groups of episodes over real rollout actors: records, limits, retries and deaths."""

import time

import numpy as np
import pytest

from areal_ray.core.trajectory import Outcome, decode_group
from areal_ray.errors import DeadlineExceeded
from areal_ray.gateway.template import ChatTemplate
from tests.support.agent_stage import ask
from tests.support.agent_stage import stage as stage


def test_a_group_is_recorded_token_by_token_over_both_turns(stage):
    summary, group = stage.run(stage.agent("two_turns"), ask())
    assert summary.num_usable == len(group.trajectories) == 4
    assert (summary.oldest_version, summary.newest_version) == (3, 3)
    assert summary.num_turns == 8
    assert summary.num_tokens == sum(len(t.token_ids) for t in group.trajectories)
    for line in group.trajectories:
        assert line.outcome in (Outcome.OK, Outcome.TRUNCATED)
        assert set(line.turn_ids[line.loss_mask]) == {0, 1}
        assert (line.versions[line.loss_mask] == 3).all()
        assert (line.behaviour_logprobs[line.loss_mask] < 0).all()
        assert {"model", "tool"} <= set(line.seconds)


def test_an_agents_stop_strings_end_its_turns_at_the_engine_and_stay_in_the_record(stage):
    _, group = stage.run(stage.agent("stops_at_a_vowel", max_new_tokens=80), ask())
    tokenizer = ChatTemplate.from_folder(stage.model)
    num_ended = 0
    for line in group.trajectories:
        assert not set(line.final_text) & set("aeiou")
        for turn in (0, 1):
            ids = line.token_ids[line.turn_ids == turn].tolist()
            assert not set(tokenizer.decode(ids[:-1])) & set("aeiou")
            num_ended += bool(set(tokenizer.decode(ids)) & set("aeiou"))
    assert num_ended > 0


def test_a_turn_that_is_overdue_names_its_replica_and_is_ended_there(stage):
    actor = stage.agent("two_turns", max_new_tokens=400, turn_timeout_s=0.02)
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.02 s for rollout-.*turn_timeout_s"):
        stage.run(actor, ask())
    assert stage.ray.get(actor.health.remote()).num_turns_pending == 0
    deadline = time.monotonic() + 30
    while any(stage.ray.get(r.health.remote()).engine.num_running for r in stage.replicas.values()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_siblings_differ_and_the_same_seed_repeats_them(stage):
    actor, task = stage.agent("two_turns", max_new_tokens=12), ask()
    ids = [
        [t.token_ids.tolist() for t in stage.run(actor, task, seed=seed)[1].trajectories]
        for seed in (1, 1, 2)
    ]
    assert len({tuple(line) for line in ids[0]}) == 4
    assert ids[0] == ids[1]
    assert not {tuple(line) for line in ids[0]} & {tuple(line) for line in ids[2]}


def test_the_requests_of_a_group_travel_in_few_calls(stage):
    actor = stage.agent("two_turns")
    stage.run(actor, ask(), n=32)
    submits, collects = stage.counts(actor)
    assert submits <= 24  # 64 turns; one call a turn would be 64
    assert collects <= 24


def test_a_failed_sibling_is_replaced_and_its_reason_counted(stage):
    summary, group = stage.run(stage.agent("fails_at_first"), ask(), n=3)
    assert summary.num_usable == len(group.trajectories) == 3
    assert summary.outcomes[Outcome.ENV_ERROR] == 1
    (failure,) = summary.failures
    assert (failure.outcome, failure.reason, failure.count) == ("env_error", "world is down", 1)


def test_an_agent_that_always_fails_gives_an_empty_group_with_the_reason(stage):
    summary, group = stage.run(stage.agent("always_fails", episode_retries=1), ask(), n=2)
    assert summary.num_usable == 0
    assert group.trajectories == ()
    assert summary.oldest_version == -1
    (failure,) = summary.failures
    assert (failure.reason, failure.count) == ("RuntimeError: no way", 4)


def test_an_agent_that_never_asks_the_model_is_at_fault(stage):
    summary, _ = stage.run(stage.agent("silent", episode_retries=0), ask(), n=1)
    (failure,) = summary.failures
    assert failure.reason == "the agent ended without a model call"


def test_an_episode_that_never_ends_is_timed_out_its_turn_aborted_and_its_slot_freed(stage):
    actor = stage.agent("one_sleeps", timeout_s=3.0, max_new_tokens=400)
    started = time.monotonic()
    summary, group = stage.run(actor, ask(), n=8)
    assert time.monotonic() - started < 60
    assert summary.outcomes[Outcome.TIMEOUT] == 1
    assert summary.num_usable == len(group.trajectories) == 8
    deadline = time.monotonic() + 10
    while True:
        healths = stage.ray.get([r.health.remote() for r in stage.replicas.values()])
        busy = sum(h.engine.num_running + h.engine.num_waiting for h in healths)
        pending = stage.ray.get(actor.health.remote()).num_turns_pending
        if busy == pending == 0:
            break
        assert time.monotonic() < deadline, (busy, pending)
        time.sleep(0.1)


def test_a_prompt_beyond_the_context_window_ends_truncated_without_a_sample(stage):
    summary, group = stage.run(stage.agent("two_turns"), ask("word " * 600), n=2)
    assert summary.outcomes == {Outcome.TRUNCATED: 2}
    (failure,) = summary.failures  # what a run made of such tasks stops with
    assert (failure.outcome, failure.count) == (Outcome.TRUNCATED, 2)
    assert "tokens, context window" in failure.reason
    assert all(t.num_sampled_tokens == 0 for t in group.trajectories)


def test_turns_of_a_killed_replica_are_sampled_again_and_recorded_once(stage):
    actor = stage.agent("many_turns", max_new_tokens=48, timeout_s=120.0, max_turns=6)
    tasks = [ask() for _ in range(4)]
    method = actor.run_group.options(num_returns=2)
    refs = [method.remote(task, f"g-{task.id}", 4, 0) for task in tasks]
    while not stage.ray.get(actor.health.remote()).num_turns_pending:
        time.sleep(0.02)
    stage.ray.kill(stage.replicas["rollout-0"], no_restart=False)
    for summary_ref, payload_ref in refs:
        summary = stage.ray.get(summary_ref, timeout=180)
        assert summary.num_usable == 4
        assert not summary.failures
        for line in decode_group(stage.ray.get(payload_ref)).trajectories:
            assert set(line.turn_ids[line.loss_mask]) == set(range(6))
            runs = np.flatnonzero(np.diff(line.turn_ids[line.loss_mask]) < 0)
            assert len(runs) == 0
