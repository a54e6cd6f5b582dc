"""What a client has not fetched yet comes once, joined, and never more of it than its turns."""

import asyncio
import time
from dataclasses import replace

import numpy as np

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import TopTokens
from areal_ray.engines.protocols import GenerationChunk, GenerationResult
from areal_ray.runtime.outbox import Outbox


def chunk(name: str, *ids: int) -> GenerationChunk:
    tokens = np.array(ids, np.int32)
    return GenerationChunk(name, tokens, -tokens.astype(np.float32), tokens + 1)


def result(name: str, *ids: int) -> GenerationResult:
    made = chunk(name, *ids)
    return GenerationResult(name, made.token_ids, made.logprobs, made.versions, StopReason.STOP)


def test_chunks_of_one_turn_are_joined_in_order_and_come_once():
    box = Outbox()
    for number in range(1000):
        box.add_chunk(chunk("a", number))
        box.add_chunk(chunk("b", 2 * number, 2 * number + 1))
    came = box.take()
    assert [one.request_id for one in came.chunks] == ["a", "b"]
    np.testing.assert_array_equal(came.chunks[0].token_ids, np.arange(1000))
    np.testing.assert_array_equal(came.chunks[1].logprobs, -np.arange(2000, dtype=np.float32))
    np.testing.assert_array_equal(came.chunks[1].versions, np.arange(1, 2001))
    assert not box.take().chunks


def test_the_likeliest_tokens_are_joined_with_those_they_stand_beside():
    box = Outbox()
    for number in range(200):
        ids = np.array([[number, number + 1]], np.int32)
        top = TopTokens(ids, -ids.astype(np.float32))
        box.add_chunk(replace(chunk("a", number), top=top))
        box.add_chunk(chunk("b", number))
    asked, other = box.take().chunks
    np.testing.assert_array_equal(asked.top.token_ids[:, 0], asked.token_ids)
    np.testing.assert_array_equal(asked.top.logprobs[:, 1], -1.0 - np.arange(200))
    assert other.top is None


def test_an_unfetched_turn_costs_a_few_objects_however_long_it_is():
    box = Outbox()
    for number in range(20_000):
        box.add_chunk(chunk("a", number))
    assert len(box._chunks["a"]) < 4000
    assert box.num_held_tokens == 20_000


def test_joining_as_they_come_takes_no_quadratic_time():
    begin = time.perf_counter()
    box = Outbox()
    for number in range(40_000):
        box.add_chunk(chunk("a", number))
    box.take()
    assert time.perf_counter() - begin < 5.0


def test_a_turn_that_ended_holds_its_tokens_once():
    box = Outbox()
    box.submitted(2)
    box.add_chunk(chunk("a", 1, 2))
    box.add_chunk(chunk("b", 7))
    box.add_result(result("a", 1, 2, 3))
    assert box.num_held_tokens == 4
    came = box.take()
    assert [one.request_id for one in came.chunks] == ["b"]
    assert [one.request_id for one in came.results] == ["a"]
    assert box.num_pending == 1


def waited(box: Outbox, poll_s: float, linger_s: float) -> float:
    async def wait() -> float:
        begin = time.monotonic()
        await box.wait(poll_s, linger_s)
        return time.monotonic() - begin

    return asyncio.run(wait())


def test_a_result_lingers_for_others_but_a_chunk_does_not():
    lingering, streaming, alone = Outbox(), Outbox(), Outbox()
    for box in (lingering, streaming):
        box.submitted(2)
        box.add_result(result("a", 1))
    streaming.add_chunk(chunk("b", 1))
    alone.submitted(1)
    alone.add_result(result("a", 1))
    assert waited(lingering, 5.0, 0.3) >= 0.3
    assert waited(streaming, 5.0, 0.3) < 0.25
    assert waited(alone, 5.0, 0.3) < 0.25


def test_a_poll_without_anything_ends():
    box = Outbox()
    assert 0.1 <= waited(box, 0.1, 0.3) < 3.0
    assert not any(box.take())
