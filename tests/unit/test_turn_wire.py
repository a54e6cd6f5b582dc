"""Promises about turns that travel together."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import TopTokens
from areal_ray.engines.protocols import (
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    SamplingConfig,
)
from areal_ray.runtime.turn_wire import ChunkBatch, Collected, RequestBatch, ResultBatch

_IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda ids: np.array(ids, np.int32))
_GREEDY, _WARM = SamplingConfig(temperature=0.0), SamplingConfig(max_new_tokens=7)

_REQUESTS = st.lists(
    st.builds(
        GenerationRequest,
        request_id=st.text(max_size=4),
        prompt_ids=_IDS,
        sampling=st.sampled_from([_GREEDY, _WARM]),
        seed=st.integers(0, 2**63 - 1),
        prefix_key=st.text(max_size=3),
        is_streamed=st.booleans(),
        grammar=st.text(max_size=3),
        top_logprobs=st.integers(0, 20),
    ),
    max_size=6,
)


@st.composite
def _results(draw: st.DrawFn) -> GenerationResult:
    ids = draw(_IDS)
    floats = st.lists(st.floats(-50, 0, width=32), min_size=len(ids), max_size=len(ids))
    return GenerationResult(
        request_id=draw(st.text(max_size=4)),
        token_ids=ids,
        logprobs=np.array(draw(floats), np.float32),
        versions=np.arange(len(ids), dtype=np.int32),
        stop_reason=draw(st.sampled_from(StopReason)),
        error=draw(st.text(max_size=3)),
        is_refused=draw(st.booleans()),
        top=draw(st.sampled_from([None, _top(len(ids))])),
    )


def _top(count: int) -> TopTokens:
    ids = np.arange(3 * count, dtype=np.int32).reshape(count, 3)
    return TopTokens(ids, -ids.astype(np.float32))


def _fields(turn: object) -> list[object]:
    values = [getattr(turn, name) for name in turn.__slots__]
    return [
        (value.dtype, value.tolist())
        if isinstance(value, np.ndarray)
        else _fields(value)
        if isinstance(value, TopTokens)
        else value
        for value in values
    ]


@given(_REQUESTS)
def test_requests_arrive_as_they_were_sent(requests: list[GenerationRequest]) -> None:
    arrived = pickle.loads(pickle.dumps(RequestBatch(requests)))
    assert list(map(_fields, arrived)) == list(map(_fields, requests))


@given(st.lists(_results(), max_size=6))
def test_results_arrive_as_they_were_sent(results: list[GenerationResult]) -> None:
    arrived = pickle.loads(pickle.dumps(ResultBatch(results)))
    assert list(map(_fields, arrived)) == list(map(_fields, results))
    assert all(type(turn.stop_reason) is StopReason for turn in arrived)


@given(st.lists(_results(), max_size=6))
def test_chunks_arrive_beside_results_as_they_were_sent(results: list[GenerationResult]) -> None:
    chunks = [
        GenerationChunk(each.request_id, each.token_ids, each.logprobs, each.versions, each.top)
        for each in results
    ]
    sent = Collected(ResultBatch(results[:2]), ChunkBatch(chunks))
    arrived = pickle.loads(pickle.dumps(sent))
    assert list(map(_fields, arrived.chunks)) == list(map(_fields, chunks))
    assert list(map(_fields, arrived.results)) == list(map(_fields, results[:2]))


def test_a_batch_may_be_sent_on() -> None:
    request = GenerationRequest("a", np.array([1, 2], np.int32), _WARM, 3, "key")
    once = pickle.loads(pickle.dumps(RequestBatch([request] * 2)))
    twice = pickle.loads(pickle.dumps(once))
    assert list(map(_fields, twice)) == [_fields(request)] * 2
