"""Every admitted group ends exactly once, and what was committed can be read back."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.core.journal import (
    LedgerJournal,
    SegmentKeeper,
    SegmentWriter,
    read_group_bytes,
    read_ledger,
    resumption,
    resumption_lines,
)
from areal_ray.core.ledger import Lease, Ledger
from areal_ray.core.reasons import MOST_REASONS, OTHER_REASONS
from areal_ray.core.seeds import derive_seed
from areal_ray.core.summaries import Failure, GroupSummary, ScoreSummary
from areal_ray.core.task import Task
from areal_ray.core.verdict import Comparison, FailureGuard
from areal_ray.core.verdict import judge as judge_by
from areal_ray.core.versions import AdmissionConfig
from areal_ray.errors import DataError, TooManyFailures


def lease(name="t", attempt=0, version=0):
    return Lease(0, Task(name, ({"role": "user", "content": "?"},)), attempt, version)


@given(st.lists(st.sampled_from(["train", "drop", "fail", "late drop", "stay"]), max_size=40))
def test_admitted_is_always_trained_plus_dropped_plus_failed_plus_in_flight(ends):
    ledger = Ledger()
    for number, end in enumerate(ends):
        entry = ledger.reserve(lease(f"t{number}"))
        ledger.lease(entry.group_id)
        if end == "fail":
            ledger.fail(entry.group_id, "x")
        elif end == "drop":
            ledger.drop(entry.group_id, "equal")
        elif end in ("train", "late drop"):
            ledger.commit(entry.group_id, {})
            if end == "train":
                ledger.train([entry.group_id], 1)
            else:
                ledger.drop(entry.group_id, "stale")
        counts = ledger.counts()
        rest = sum(counts[k] for k in ("trained", "dropped", "failed", "in_flight"))
        assert counts["admitted"] == rest == number + 1
    assert ledger.in_flight == ends.count("stay")


def test_no_group_is_trained_twice_or_ends_in_two_ways():
    ledger = Ledger()
    entry = ledger.reserve(lease())
    ledger.lease(entry.group_id)
    ledger.commit(entry.group_id, {})
    ledger.train([entry.group_id], 1)
    for again in (
        lambda: ledger.train([entry.group_id], 2),
        lambda: ledger.drop(entry.group_id, "x"),
        lambda: ledger.fail(entry.group_id, "x"),
    ):
        with pytest.raises(ValueError, match="not in flight"):
            again()
    assert ledger.counts()["trained"] == 1


def test_an_unscored_group_can_not_be_trained_and_a_committed_one_can_not_fail():
    ledger = Ledger()
    entry = ledger.reserve(lease())
    with pytest.raises(ValueError, match="only from committed"):
        ledger.train([entry.group_id], 1)
    ledger.lease(entry.group_id)
    ledger.commit(entry.group_id, {})
    with pytest.raises(ValueError, match="can end only once"):
        ledger.fail(entry.group_id, "late")


def test_a_resumed_ledger_counts_what_was_in_flight_as_dropped():
    ledger = Ledger()
    for i in range(3):
        ledger.reserve(lease(f"t{i}"))
    ledger.fail("0/t0/0", "crash")
    resumed = Ledger()
    resumed.load_state_dict(ledger.state_dict())
    counts = {"admitted": 3, "trained": 0, "dropped": 2, "failed": 1, "in_flight": 0}
    assert resumed.counts() == counts


def test_the_journal_reads_back_what_was_written_and_survives_a_torn_last_line(tmp_path):
    journal = LedgerJournal(tmp_path)
    journal.append({"event": "committed", "group": "a"})
    journal.append({"event": "trained", "groups": ["a"], "step": 1})
    journal.close()
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"event": "com')
    assert [record["event"] for record in read_ledger(tmp_path)] == ["committed", "trained"]


def test_a_resumed_run_does_not_write_onto_a_torn_line(tmp_path):
    (tmp_path / "ledger.jsonl").write_text('{"event":"trained","step":1}\n{"event":"tr')
    journal = LedgerJournal(tmp_path)
    journal.append(resumption(1, 1))
    journal.close()
    assert [record["event"] for record in read_ledger(tmp_path)] == ["trained", "resumed"]
    (line,) = resumption_lines(tmp_path)
    assert line.startswith("after step 1, at version 1, on 2")


@pytest.mark.parametrize("line", [b'{"event":', b"\xff\xfe", b"\0" * 8, b"[1]", b'{"step":2}'])
def test_a_broken_line_of_the_ledger_is_named(tmp_path, line):
    first = b'{"event":"trained","step":1}\n'
    (tmp_path / "ledger.jsonl").write_bytes(first + line + b"\n")
    with pytest.raises(DataError, match=r"ledger.jsonl: line 2 is (not JSON|no event)"):
        read_ledger(tmp_path)


def test_groups_read_back_from_their_segment_and_damage_is_noticed(tmp_path):
    writer = SegmentWriter(tmp_path, "reward-0", segment_bytes=64)
    payloads = [random.Random(i).randbytes(50) for i in range(4)]
    places = [writer.append(payload) for payload in payloads]
    assert [read_group_bytes(tmp_path, place) for place in places] == payloads
    assert len({place.segment for place in places}) == 4 // 2
    path = tmp_path / places[0].segment
    damaged = bytearray(path.read_bytes())
    damaged[10] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="damaged"):
        read_group_bytes(tmp_path, places[0])


def test_a_restarted_writer_never_touches_its_predecessors_segments(tmp_path):
    before = SegmentWriter(tmp_path, "reward-0")
    first = before.append(b"first")
    after = SegmentWriter(tmp_path, "reward-0")
    second = after.append(b"second")
    assert first.segment != second.segment
    assert read_group_bytes(tmp_path, first) == b"first"


def test_a_segment_goes_when_its_last_group_ended_and_not_before(tmp_path):
    writer = SegmentWriter(tmp_path, "r", segment_bytes=10)
    keeper = SegmentKeeper(tmp_path)
    places = [writer.append(b"x" * 12) for _ in range(3)]
    for place in places:
        keeper.hold(place)
    keeper.let_go(places[0])
    assert not (tmp_path / places[0].segment).exists()
    assert (tmp_path / places[1].segment).exists()
    keeper.let_go(places[2])  # the newest may still be written to
    assert (tmp_path / places[2].segment).exists()


def test_a_segment_goes_too_if_its_groups_ended_while_it_was_the_newest(tmp_path):
    writer = SegmentWriter(tmp_path, "r", segment_bytes=10)
    keeper = SegmentKeeper(tmp_path)
    places = []
    for _ in range(3):  # synchronous training: a step's groups end before the next are written
        places.append(writer.append(b"x" * 12))
        keeper.hold(places[-1])
        keeper.let_go(places[-1])
    assert len({place.segment for place in places}) == 3, "a deleted segment's name comes again"
    assert [(tmp_path / place.segment).exists() for place in places] == [False, False, True]


def made(oldest=3, **more):
    facts = {
        "group_id": "g", "task_id": "t", "num_usable": 2,
        "versions": () if oldest < 0 else (oldest,), "num_tokens": 9,
        "num_sampled_tokens": 4, "num_turns": 2, "payload_bytes": 1,
    }  # fmt: skip
    return GroupSummary(**{**facts, **more})


def scored(*rewards, failures=()):
    unscored = sum(reward is None for reward in rewards)
    return ScoreSummary("g", tuple(rewards), unscored, failures)


CONFIG = AdmissionConfig(groups_per_step=2, n_samples=4, drop_equal_rewards=True)


def judge(made, scored, config):
    return judge_by(made, scored, config, Comparison(1e-6, leaves_out_truncated=False))


def test_a_failure_is_never_a_reward_of_zero():
    reason = (Failure("unscored", "the reward raised"),)
    verdict = judge(made(), scored(None, None, 1.0, None, failures=reason), CONFIG)
    assert verdict.is_failure
    assert verdict.reason == "unscored: the reward raised"
    assert not judge(made(), scored(None, None, 1.0, 0.0), CONFIG).is_failure


def test_only_groups_with_equal_rewards_are_filtered():
    assert judge(made(), scored(1.0, 1.0, 1.0, 1.0), CONFIG).is_drop
    assert judge(made(), scored(0.0, None, 0.0, 0.0), CONFIG).is_drop
    assert not judge(made(), scored(1.0, 0.0, 0.0, 0.0), CONFIG).is_drop


def test_a_group_without_a_sampled_token_fails():
    assert judge(made(oldest=-1), scored(0.0, 1.0), CONFIG).is_failure


def test_failing_as_a_rule_stops_the_run_with_the_commonest_reason():
    guard = FailureGuard(CONFIG)
    for number in range(7):
        guard.succeeded() if number % 3 == 0 else guard.failed("boom")
    with pytest.raises(TooManyFailures, match="Most frequent, 5 times: boom"):
        guard.failed("boom")


def test_now_and_then_a_failure_does_not_stop_the_run():
    guard = FailureGuard(CONFIG)
    for number in range(100):
        guard.failed("boom") if number % 5 == 0 else guard.succeeded()


def test_one_death_counts_once_however_many_groups_it_takes_along():
    guard = FailureGuard(CONFIG)
    for death in range(1, 8):
        for group in range(12):  # all admitted since the death before
            guard.lost(death - 1 + (1 + group) / 20, death + group / 100, "agent-0 died")
    with pytest.raises(TooManyFailures, match="Most frequent, 8 times: agent-0 died"):
        guard.lost(7.5, 8.0, "agent-0 died")


def test_endless_filtering_stops_with_its_budget_and_every_step_begins_anew():
    guard = FailureGuard(CONFIG)
    budget = CONFIG.max_refill_rounds * CONFIG.groups_per_step
    for _ in range(budget - 1):
        guard.refilled("equal_rewards")
    guard.step_began()
    for _ in range(budget - 1):
        guard.refilled("equal_rewards")
    with pytest.raises(TooManyFailures, match="max_refill_rounds"):
        guard.refilled("equal_rewards")


def test_reasons_that_all_differ_do_not_fill_the_memory_and_every_group_still_counts():
    ledger, count = Ledger(), 4 * MOST_REASONS
    for number in range(count):
        lease = ledger.reserve(Lease(0, Task(f"t{number}", ()), 0, 0))
        ledger.fail(lease.group_id, "common" if number % 2 else f"no answer to request {number}")
    assert len(ledger.failed) == MOST_REASONS + 1
    assert ledger.counts()["failed"] == count
    assert ledger.failed["common"] == count // 2
    assert ledger.failed[OTHER_REASONS] == count // 2 - (MOST_REASONS - 1)


def test_seeds_follow_from_names_and_differ_between_them():
    assert derive_seed(1, "a", 2) == derive_seed(1, "a", 2)
    seeds = {derive_seed(s, "task", t, k) for s in range(3) for t in range(20) for k in range(20)}
    assert len(seeds) == 3 * 20 * 20
    assert derive_seed(1, "a", "b") != derive_seed(1, "ab")
