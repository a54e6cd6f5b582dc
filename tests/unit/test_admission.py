"""The arithmetic of staleness: who may start, who is too old, what `wait` waits for."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from areal_ray.core.gate import AdmissionGate
from areal_ray.core.versions import (
    AdmissionConfig,
    admissible_groups,
    must_wait_for,
    oldest_allowed,
)


def config(batch=4, bound=2, **more):
    return AdmissionConfig(groups_per_step=batch, max_head_offpolicyness=bound, **more)


@given(batch=st.integers(1, 8), bound=st.integers(0, 4), steps=st.integers(1, 20))
def test_a_greedy_producer_never_makes_a_group_staler_than_the_bound(batch, bound, steps):
    settings_ = config(batch, bound)
    born: list[int] = []  # version at which group n was admitted
    for version in range(steps):
        in_flight = len(born) - version * batch
        born += [version] * admissible_groups(version, len(born), in_flight, settings_)
        consumed = born[version * batch : (version + 1) * batch]
        assert len(consumed) == batch
        assert all(version - b <= bound for b in consumed)


def test_after_a_resume_at_version_100_headroom_is_12_groups_not_412():
    gate = AdmissionGate(config(batch=4, bound=2), version=100)
    assert gate.headroom == 12


@pytest.mark.parametrize(("batch", "bound", "version"), [(4, 0, 0), (4, 0, 7), (8, 2, 100)])
def test_headroom_after_a_resume_is_that_of_a_fresh_run_whatever_the_batch_was(
    batch, bound, version
):
    """Nothing of the batch that the run had before enters it, nor the number of ranks."""
    fresh = AdmissionGate(config(batch=batch, bound=bound), version=0)
    resumed = AdmissionGate(config(batch=batch, bound=bound), version=version)
    assert resumed.headroom == fresh.headroom == batch * (bound + 1)


def test_a_concurrency_limit_below_the_staleness_bound_holds():
    settings_ = config(batch=4, bound=2, max_concurrent_rollouts=5)
    assert admissible_groups(0, 0, 0, settings_) == 5
    assert admissible_groups(0, 5, 5, settings_) == 0
    assert admissible_groups(0, 5, 3, settings_) == 2


def test_unlimited_staleness_is_bounded_by_concurrency():
    settings_ = config(bound="unlimited", max_concurrent_rollouts=7)
    assert admissible_groups(100, 403, 3, settings_) == 4
    assert oldest_allowed(50, settings_) == 0


@given(
    batch=st.integers(1, 8),
    most=st.integers(1, 12),
    ends=st.lists(st.integers(0, 12), min_size=20, max_size=60),
)
def test_rollouts_faster_than_the_learner_never_overfill_its_queue(batch, most, ends):
    """Of the groups that run some end; the learner takes a step of them every fourth time."""
    settings_ = config(batch, "unlimited", max_concurrent_rollouts=most)
    version = admitted = running = queued = 0
    for turn, end in enumerate(ends):
        new = admissible_groups(version, admitted, running, settings_)
        admitted, running = admitted + new, running + new
        assert running <= most
        queued, running = queued + min(end, running), running - min(end, running)
        assert queued + running <= settings_.unconsumed_groups
        if turn % 4 == 3 and queued >= batch:
            version, queued = version + 1, queued - batch
    while queued < batch:  # a step's groups are always to be had
        new = admissible_groups(version, admitted, running, settings_)
        assert new + running
        admitted, queued, running = admitted + new, queued + new + running, 0


def test_unlimited_staleness_has_to_be_asked_for_in_words_and_bounded_otherwise():
    with pytest.raises(ValidationError, match="max_concurrent_rollouts"):
        config(bound="unlimited")
    with pytest.raises(ValidationError, match="max_head_offpolicyness"):
        config(bound=-1)
    with pytest.raises(ValidationError, match="at_consumption"):
        config(bound="unlimited", max_concurrent_rollouts=4, at_consumption="wait")


def test_the_gate_lets_exactly_the_headroom_through_and_opens_on_commit_and_release():
    async def scenario():
        gate = AdmissionGate(config(batch=2, bound=0))
        admitted = [asyncio.ensure_future(gate.admit()) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [task.done() for task in admitted] == [True, True, False, False, False]
        await gate.fail()  # its admission comes back
        await asyncio.sleep(0.01)
        assert sum(task.done() for task in admitted) == 3
        await gate.finish()
        await gate.finish()
        await asyncio.sleep(0.01)
        assert sum(task.done() for task in admitted) == 3  # finished groups still count
        await gate.open_to(1)
        await asyncio.sleep(0.01)
        assert all(task.done() for task in admitted)
        assert gate.num_running == 2

    asyncio.run(scenario())


def test_waiting_is_for_groups_that_would_be_too_old_at_the_next_step():
    settings_ = config(batch=2, bound=1, at_consumption="wait")
    # At version 1, a running group of version 0 is due now: it may not be left behind.
    assert must_wait_for([1, 1], [], [0, 1], settings_, version=1) == [0]
    # It is not due yet at version 0.
    assert must_wait_for([0, 0], [], [0], settings_, version=0) == []
    # Three are due by the next step, which takes two: one of them must be taken now.
    assert must_wait_for([1, 1], [], [0, 0, 0], settings_, version=0) == [0, 1, 2]


def test_waiting_never_outlasts_what_it_could_change():
    settings_ = config(batch=2, bound=1, at_consumption="wait")
    # Too many finished groups are due at once: waiting cannot help, the surplus is dropped.
    assert must_wait_for([0, 0], [0, 0, 0], [], settings_, version=1) == []


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(1, 4),
    bound=st.integers(0, 3),
    durations=st.lists(st.integers(0, 12), min_size=60, max_size=60),
)
def test_with_wait_the_bound_holds_nothing_is_dropped_and_no_step_starves(batch, bound, durations):
    """Simulated time: one step takes one tick, group n takes durations[n] ticks."""
    settings_ = config(batch, bound, at_consumption="wait")
    version, admitted, running, queued, tick = 0, 0, [], [], 0
    while version < 12 and admitted < len(durations) - batch * (bound + 2):
        free = admissible_groups(version, admitted, len(running), settings_)
        for _ in range(min(free, len(durations) - admitted)):
            running.append((tick + durations[admitted], version))
            admitted += 1
        queued += [born for end, born in running if end <= tick]
        running = [(end, born) for end, born in running if end > tick]
        order = sorted(queued)
        taken, left = order[:batch], order[batch:]
        waits = must_wait_for(taken, left, [born for _, born in running], settings_, version)
        if len(taken) == batch and not waits:
            assert all(version - born <= bound for born in taken)
            queued, version = left, version + 1
            assert all(version - born <= bound for born in queued)  # nothing left behind too old
        tick += 1
        assert tick < 1000  # no deadlock
