"""Turns that an engine hands back unfinished, or loses, are sampled whole and handed out once."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.protocols import (
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    SamplingConfig,
)
from areal_ray.errors import ActorLost, EngineError
from areal_ray.runtime.rollout_client import RolloutClient
from tests.support.scripted_replica import ScriptedReplica

LIMIT = 16
PARTS = ("token_ids", "logprobs", "versions")
REQUEST = GenerationRequest(
    "e#0", np.arange(4, dtype=np.int32), SamplingConfig(max_new_tokens=LIMIT), seed=3
)


def sampled(count: int, reason: StopReason, version: int = 0, error: str = "") -> GenerationResult:
    return GenerationResult(
        request_id=REQUEST.request_id,
        token_ids=np.arange(count, dtype=np.int32),
        logprobs=np.full(count, -1.0, np.float32),
        versions=np.full(count, version, np.int32),
        stop_reason=reason,
        error=error,
    )


def generate(*script: GenerationResult, **fields: Any) -> tuple[ScriptedReplica, Any]:
    async def run() -> tuple[ScriptedReplica, Any]:
        replica = ScriptedReplica(*[[result] for result in script])
        client = RolloutClient({"rollout-0": replica}, "agent", **fields)
        try:
            async with asyncio.timeout(20):
                result: Any = await client.generate(REQUEST)
        except (ActorLost, EngineError) as error:
            result = error
        assert client.num_pending == 0
        await client.close()
        return replica, result

    return asyncio.run(run())


@pytest.mark.parametrize("before", [[6], [0], [6, 15, 0]])
def test_an_aborted_turn_is_sampled_anew_within_its_limit_and_nothing_of_it_is_kept(before):
    aborted = [sampled(count, StopReason.ABORT, version=1) for count in before]
    replica, result = generate(*aborted, sampled(LIMIT, StopReason.LENGTH, version=2))
    assert (len(result.token_ids), result.stop_reason) == (LIMIT, StopReason.LENGTH)
    assert set(result.versions.tolist()) == {2}
    assert len(replica.given) == len(before) + 1
    assert {(r.request_id, r.seed, r.sampling.max_new_tokens) for r in replica.given} == {
        ("e#0", 3, LIMIT)
    }


@pytest.mark.parametrize("reason", [StopReason.LENGTH, StopReason.STOP, StopReason.ABORT])
def test_a_turn_that_ended_is_not_asked_for_again(reason):
    """Nor is one that was aborted with its last token: it is as long as it may be."""
    replica, result = generate(sampled(LIMIT, reason))
    told = StopReason.LENGTH if reason is StopReason.ABORT else reason
    assert (len(replica.given), len(result.token_ids), result.stop_reason) == (1, LIMIT, told)
    assert replica.aborted == []


def test_a_turn_that_is_aborted_over_and_over_is_given_up_by_name():
    replica, error = generate(*[sampled(1, StopReason.ABORT)] * 9, max_tries=3)
    assert isinstance(error, ActorLost)
    assert "turn e#0 was given to a replica 3 times; last, rollout-0: aborted" in str(error)
    assert len(replica.given) == 3


def test_a_turn_that_the_engine_refuses_is_an_error_and_no_empty_sample():
    replica, error = generate(sampled(0, StopReason.ABORT, error="the prompt is empty"))
    assert isinstance(error, EngineError)
    assert "the prompt is empty" in str(error)
    assert len(replica.given) == 1


def named(name: str) -> GenerationRequest:
    return replace(REQUEST, request_id=name)


def ended(name: str) -> list[GenerationResult]:
    return [replace(sampled(LIMIT, StopReason.LENGTH), request_id=name)]


def test_replicas_that_come_get_turns_and_those_that_go_end_theirs_and_get_no_more():
    async def go() -> None:
        may_end = asyncio.Event()
        old = ScriptedReplica(may_end, ended("a#0"))
        new = ScriptedReplica(ended("b#0"), ended("c#0"))
        client = RolloutClient({"rollout-0": old}, "agent")
        first = asyncio.create_task(client.generate(named("a#0")))
        await old.waiting.wait()
        await client.use({"rollout-0": old, "rollout-1": new})
        assert (await client.generate(named("b#0"))).request_id == "b#0"  # by the less busy one
        leaving = asyncio.create_task(client.use({"rollout-1": new}))
        assert (await client.generate(named("c#0"))).request_id == "c#0"
        assert not leaving.done()
        may_end.set()
        await leaving
        assert (await first).request_id == "a#0"
        assert [[r.request_id for r in one.given] for one in (old, new)] == [
            ["a#0"],
            ["b#0", "c#0"],
        ]
        assert old.aborted == []
        await client.close()

    asyncio.run(asyncio.wait_for(go(), 20))


def test_turns_that_do_not_end_on_a_replica_that_goes_are_given_to_others_as_often_as_it_takes():
    async def go() -> None:
        old, new = ScriptedReplica(asyncio.Event()), ScriptedReplica(ended("a#0"))
        client = RolloutClient({"rollout-0": old}, "agent", max_tries=1)
        turn = asyncio.create_task(client.generate(named("a#0")))
        await old.waiting.wait()
        await client.use({"rollout-1": new}, drain_s=0.0)
        assert (await turn).request_id == "a#0"
        assert old.aborted == ["a#0"]
        assert [r.seed for r in new.given] == [REQUEST.seed]
        await client.close()

    asyncio.run(asyncio.wait_for(go(), 20))


def test_a_stream_that_cannot_go_on_elsewhere_ends_where_it_is():
    async def go() -> None:
        may_end = asyncio.Event()
        part = GenerationChunk("a#0", *(getattr(sampled(3, StopReason.STOP), n) for n in PARTS))
        old, new = ScriptedReplica([part], may_end, ended("a#0")), ScriptedReplica()
        client = RolloutClient({"rollout-0": old}, "agent")
        sampling = REQUEST.sampling.model_copy(update={"stop": ("so",)})
        stream = client.stream(replace(named("a#0"), sampling=sampling))
        assert len((await anext(stream)).token_ids) == 3
        leaving = asyncio.create_task(client.use({"rollout-1": new}, drain_s=0.0))
        await asyncio.sleep(0.2)
        assert not leaving.done()
        may_end.set()
        rest = [one async for one in stream]
        await leaving
        assert len(rest[-1].token_ids) == LIMIT
        assert new.given == []
        await client.close()

    asyncio.run(asyncio.wait_for(go(), 20))
