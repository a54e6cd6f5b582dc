"""The queue holds the staleness bound at consumption, loses no group and hands none out twice."""

import asyncio

import pytest

from areal_ray.core.queue import Ticket, TrajectoryQueue
from areal_ray.core.versions import AdmissionConfig


def ticket(name, version, newest=None):
    return Ticket(
        group_id=name,
        task_id=name,
        ref=object(),
        versions=(version,) if newest is None else (version, newest),
        num_tokens=10,
    )


def queue(policy="drop", batch=2, bound=1, capacity=100):
    config = AdmissionConfig(
        groups_per_step=batch, max_head_offpolicyness=bound, at_consumption=policy
    )
    return TrajectoryQueue(config, capacity=capacity)


def names(tickets):
    return [t.group_id for t in tickets]


def test_surplus_groups_wait_for_the_next_step_and_none_is_seen_twice():
    async def scenario():
        waiting = queue(batch=4)
        for i in range(6):
            await waiting.put(ticket(f"g{i}", 0))
        first = await waiting.take(0)
        assert names(first.tickets) == ["g0", "g1", "g2", "g3"]
        await waiting.put(ticket("g6", 1))
        await waiting.put(ticket("g7", 1))
        second = await waiting.take(1)
        assert names(second.tickets) == ["g4", "g5", "g6", "g7"]
        assert len(waiting) == 0

    asyncio.run(scenario())


def test_drop_hands_back_what_is_too_old_before_the_step_fills_up():
    async def scenario():
        waiting = queue("drop", batch=2, bound=1)
        await waiting.put(ticket("old", 0))
        await waiting.put(ticket("young", 1))
        taken = await waiting.take(2)
        assert (names(taken.tickets), names(taken.dropped)) == ([], ["old"])
        await waiting.put(ticket("new", 2))
        taken = await waiting.take(2)
        assert names(taken.tickets) == ["young", "new"]

    asyncio.run(scenario())


def test_mask_keeps_old_groups_for_their_younger_tokens():
    async def scenario():
        waiting = queue("mask", batch=2, bound=1)
        await waiting.put(ticket("old", 0, newest=3))
        await waiting.put(ticket("new", 3))
        taken = await waiting.take(3)
        assert names(taken.tickets) == ["old", "new"]
        assert taken.dropped == []

    asyncio.run(scenario())


def test_wait_holds_the_step_back_until_the_due_group_arrives():
    async def scenario():
        waiting = queue("wait", batch=2, bound=1)
        waiting.expect("slow", 0)
        for i in range(2):
            await waiting.put(ticket(f"fast{i}", 1))
        step = asyncio.ensure_future(waiting.take(1))
        await asyncio.sleep(0.01)
        assert not step.done()
        await waiting.put(ticket("slow", 0))
        assert names((await step).tickets) == ["slow", "fast0"]

    asyncio.run(scenario())


def test_wait_goes_on_when_the_due_group_failed():
    async def scenario():
        waiting = queue("wait", batch=2, bound=1)
        waiting.expect("doomed", 0)
        for i in range(2):
            await waiting.put(ticket(f"fast{i}", 1))
        step = asyncio.ensure_future(waiting.take(1))
        await asyncio.sleep(0.01)
        await waiting.forget("doomed")
        assert names((await step).tickets) == ["fast0", "fast1"]

    asyncio.run(scenario())


def test_a_full_queue_is_a_defect_not_a_silent_loss():
    async def scenario():
        waiting = queue(capacity=1)
        await waiting.put(ticket("a", 0))
        with pytest.raises(RuntimeError, match="unadmitted"):
            await waiting.put(ticket("b", 0))

    asyncio.run(scenario())


def test_closing_unblocks_the_learner():
    async def scenario():
        waiting = queue()
        step = asyncio.ensure_future(waiting.take(0))
        await asyncio.sleep(0.01)
        await waiting.close()
        assert await step is None

    asyncio.run(scenario())
