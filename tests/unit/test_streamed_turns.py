"""A streamed turn reaches its consumer whole and in order, whatever becomes of its replica."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import TopTokens
from areal_ray.engines.protocols import (
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    SamplingConfig,
)
from areal_ray.errors import ActorLost, DeadlineExceeded, EngineError
from areal_ray.runtime.rollout_client import RolloutClient
from tests.support.scripted_replica import ScriptedReplica

PROMPT = np.arange(4, dtype=np.int32)
LOST = ActorUnavailableError("the connection broke", b"0" * 16)


def request(name: str = "t", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        name, PROMPT, SamplingConfig(**{"max_new_tokens": 8, **sampling}), seed=3
    )


def tokens(first: int, end: int, version: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token k of a turn is k, wherever it was sampled."""
    ids = np.arange(first, end, dtype=np.int32)
    return ids, -ids.astype(np.float32), np.full(len(ids), version, np.int32)


def chunk(first: int, end: int, version: int = 0, name: str = "t") -> GenerationChunk:
    return GenerationChunk(name, *tokens(first, end, version))


def result(
    first: int, end: int, reason: StopReason = StopReason.LENGTH, version: int = 0, error: str = ""
) -> GenerationResult:
    return GenerationResult("t", *tokens(first, end, version), reason, error)


async def consumed(client: RolloutClient, sent: GenerationRequest, parts: list[Any]) -> None:
    async for part in client.stream(sent):
        parts.append(part)


def streamed(
    *replicas: ScriptedReplica, sent: GenerationRequest | None = None, **fields: Any
) -> list[Any]:
    """What a consumer gets, and last the error if there was one."""

    async def run() -> list[Any]:
        client = RolloutClient({f"r{i}": r for i, r in enumerate(replicas)}, "agent", **fields)
        parts: list[Any] = []
        try:
            async with asyncio.timeout(20):
                await consumed(client, sent or request(), parts)
        except (ActorLost, EngineError, DeadlineExceeded) as error:
            parts.append(error)
        assert client.num_pending == 0
        await client.close()
        return parts

    return asyncio.run(run())


def sampled(parts: list[Any]) -> list[int]:
    """Ids of all chunks, end to end, which are those of the result too."""
    chunks = [part for part in parts if isinstance(part, GenerationChunk)]
    ids = [i for part in chunks for i in part.token_ids.tolist()]
    if isinstance(parts[-1], GenerationResult):
        assert parts[-1].token_ids.tolist() == ids
        versions = [v for part in chunks for v in part.versions.tolist()]
        assert parts[-1].versions.tolist() == versions
        assert parts[-1].logprobs.tolist() == [-float(i) for i in ids]
    return ids


def test_chunks_come_in_order_and_the_whole_turn_last():
    replica = ScriptedReplica([chunk(0, 1)], [chunk(1, 3)], [chunk(3, 4)], [result(0, 4)])
    parts = streamed(replica)
    assert sampled(parts) == [0, 1, 2, 3]
    assert parts[-1].stop_reason is StopReason.LENGTH
    assert replica.given[0].is_streamed
    assert not replica.aborted


def test_tokens_that_came_only_with_the_result_are_a_chunk_too():
    parts = streamed(ScriptedReplica([chunk(0, 1)], [result(0, 6)]))
    assert sampled(parts) == [0, 1, 2, 3, 4, 5]
    assert sampled(streamed(ScriptedReplica([result(0, 2)]))) == [0, 1]


def test_another_replica_goes_on_where_the_first_broke_off():
    first = ScriptedReplica([chunk(0, 2)], [chunk(2, 3)], LOST)
    second = ScriptedReplica([chunk(3, 5, version=1)], [result(3, 8, version=1)])
    parts = streamed(first, second)
    assert sampled(parts) == list(range(8))
    assert parts[-1].versions.tolist() == [0] * 3 + [1] * 5
    (rest,) = second.given
    assert rest.prompt_ids.tolist() == [*PROMPT.tolist(), 0, 1, 2]
    assert (rest.sampling.max_new_tokens, rest.seed, rest.is_streamed) == (5, 3, True)


def test_the_likeliest_tokens_are_told_of_every_token_over_all_replicas():
    def told(part: Any, first: int, end: int) -> Any:
        ids = np.arange(first, end, dtype=np.int32)[:, None] + np.arange(3, dtype=np.int32)
        return replace(part, top=TopTokens(ids, -ids.astype(np.float32)))

    first = ScriptedReplica([told(chunk(0, 2), 0, 2)], LOST)
    second = ScriptedReplica([told(chunk(2, 3), 2, 3)], [told(result(2, 8), 2, 8)])
    parts = streamed(first, second, sent=replace(request(), top_logprobs=3))
    assert sampled(parts) == list(range(8))
    for part in parts:
        np.testing.assert_array_equal(part.top.token_ids[:, 0], part.token_ids)
        np.testing.assert_array_equal(part.top.logprobs, -part.top.token_ids)
    assert second.given[0].top_logprobs == 3


def test_a_turn_that_the_engine_hands_back_goes_on_after_what_was_streamed():
    replica = ScriptedReplica(
        [chunk(0, 2)],
        [result(0, 5, StopReason.ABORT)],  # three of its tokens were never streamed
        [chunk(2, 4, version=1)],
        [result(2, 4, StopReason.STOP, version=1)],
    )
    parts = streamed(replica)
    assert sampled(parts) == [0, 1, 2, 3]
    assert parts[-1].stop_reason is StopReason.STOP
    assert replica.given[1].prompt_ids.tolist() == [*PROMPT.tolist(), 0, 1]


@pytest.mark.parametrize("end", [LOST, [result(0, 8, StopReason.ABORT)]], ids=["lost", "aborted"])
@pytest.mark.parametrize("stop", [(), ("end",)])
def test_a_turn_that_had_come_whole_needs_no_other_replica(end, stop):
    first, second = ScriptedReplica([chunk(0, 8)], end), ScriptedReplica()
    parts = streamed(first, second, sent=request(stop=stop))
    assert sampled(parts) == list(range(8))
    assert parts[-1].stop_reason is StopReason.LENGTH
    assert not second.given
    assert len(first.given) == 1


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (request(stop=("xy",)), "for its stop texts"),
        (request(frequency_penalty=1.0), "for its penalties"),
        (replace(request(), grammar='start: "ab"'), "for its grammar"),
    ],
)
def test_what_looks_back_at_the_turn_cannot_go_on_elsewhere(sent, why):
    parts = streamed(ScriptedReplica([chunk(0, 2)], LOST), ScriptedReplica(), sent=sent)
    assert sampled(parts) == [0, 1]
    assert isinstance(parts[-1], ActorLost)
    assert f"turn t was streamed in part and cannot go on elsewhere, {why}" in str(parts[-1])
    fresh = streamed(ScriptedReplica(LOST), ScriptedReplica([result(0, 8)]), sent=sent)
    assert sampled(fresh) == list(range(8))


def test_an_error_comes_after_what_was_streamed():
    parts = streamed(
        ScriptedReplica([chunk(0, 2)], [result(0, 0, StopReason.ABORT, error="not finite")])
    )
    assert sampled(parts) == [0, 1]
    assert isinstance(parts[-1], EngineError)
    parts = streamed(ScriptedReplica([chunk(0, 2)]), deadline_s=0.2)
    assert sampled(parts) == [0, 1]
    assert isinstance(parts[-1], DeadlineExceeded)


def test_a_consumer_that_breaks_off_aborts_its_turn_and_no_other():
    async def run() -> ScriptedReplica:
        replica = ScriptedReplica(*[[chunk(i, i + 1), chunk(i, i + 1, name="u")] for i in range(5)])
        client = RolloutClient({"r": replica}, "agent")
        other: list[Any] = []
        beside = asyncio.ensure_future(consumed(client, request("u"), other))
        async for part in client.stream(request()):
            if part.token_ids[-1] >= 1:
                break
        for _ in range(20):
            await asyncio.sleep(0)
        assert client.num_pending == 1
        assert replica.aborted == ["t"]
        async with asyncio.timeout(5):
            while sum(len(part.token_ids) for part in other) < 5:
                await asyncio.sleep(0.01)
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
        assert replica.aborted == ["t", "u"]
        await client.close()
        return replica

    asyncio.run(run())


def test_a_slow_consumer_gets_longer_chunks_and_holds_nobody_up():
    async def run() -> tuple[list[Any], list[Any]]:
        steps = [[chunk(i, i + 1), chunk(i, i + 1, name="u")] for i in range(200)]
        client = RolloutClient({"r": ScriptedReplica(*steps)}, "agent")
        slow = client.stream(request(max_new_tokens=500))
        first = await anext(slow)
        quick: list[Any] = []
        beside = asyncio.ensure_future(consumed(client, request("u"), quick))
        async with asyncio.timeout(10):
            while sum(len(part.token_ids) for part in quick) < 190:
                await asyncio.sleep(0.01)
        second = await anext(slow)
        assert len(second.token_ids) > 150
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
        await slow.aclose()
        await client.close()
        return [first, second], quick

    parts, _ = asyncio.run(run())
    assert sampled(parts) == list(range(len(sampled(parts))))
