"""Many turns in one message: lists that travel as a few columns instead of object by object.

A list of turns holds one to three small arrays each, and Ray ships every array of a message as a
buffer of its own; packed end to end they cost a fraction, at both ends of the wire.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.protocols import (
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    SamplingConfig,
)

Column = list[Any]


class RequestBatch(list[GenerationRequest]):
    """Requests on their way to a replica."""

    def __reduce__(self) -> tuple[Any, ...]:
        known: dict[int, int] = {}  # siblings share one sampling object
        kinds: list[SamplingConfig] = []
        kind_of: list[int] = []
        for request in self:
            number = known.setdefault(id(request.sampling), len(kinds))
            if number == len(kinds):
                kinds.append(request.sampling)
            kind_of.append(number)
        return _requests, (
            [request.request_id for request in self],
            *_joined([request.prompt_ids for request in self], np.int32),
            (kinds, kind_of),
            [request.seed for request in self],
            [request.prefix_key for request in self],
            [request.is_streamed for request in self],
            [request.grammar for request in self],
            [request.top_logprobs for request in self],
        )


class ResultBatch(list[GenerationResult]):
    """Finished turns on their way to the client that asked for them."""

    def __reduce__(self) -> tuple[Any, ...]:
        tokens, lengths = _joined([result.token_ids for result in self], np.int32)
        return _results, (
            [result.request_id for result in self],
            tokens,
            lengths,
            _joined([result.logprobs for result in self], np.float32)[0],
            _joined([result.versions for result in self], np.int32)[0],
            [str(result.stop_reason) for result in self],
            [result.error for result in self],
            [result.is_refused for result in self],
            [result.top for result in self],
        )


class ChunkBatch(list[GenerationChunk]):
    """What streamed turns of one client sampled, on its way there in one message."""

    def __reduce__(self) -> tuple[Any, ...]:
        tokens, lengths = _joined([chunk.token_ids for chunk in self], np.int32)
        return _chunks, (
            [chunk.request_id for chunk in self],
            tokens,
            lengths,
            _joined([chunk.logprobs for chunk in self], np.float32)[0],
            _joined([chunk.versions for chunk in self], np.int32)[0],
            [chunk.top for chunk in self],
        )


class Collected(NamedTuple):
    """What a replica has for one client."""

    results: ResultBatch
    """Turns that ended. Chunks of theirs that were not fetched before are only in here."""
    chunks: ChunkBatch
    """What streamed turns under way sampled since the last message, one chunk a turn."""


def _requests(
    ids: Column,
    tokens: bytes,
    lengths: Column,
    samplings: tuple[list[SamplingConfig], list[int]],
    seeds: Column,
    keys: Column,
    *further: Column,
) -> list[GenerationRequest]:
    prompts = _cut(tokens, np.int32, lengths)
    kinds, kind_of = samplings
    each = [kinds[number] for number in kind_of]
    return RequestBatch(map(GenerationRequest, ids, prompts, each, seeds, keys, *further))


def _results(
    ids: Column,
    tokens: bytes,
    lengths: Column,
    logprobs: bytes,
    versions: bytes,
    reasons: Column,
    *further: Column,
) -> list[GenerationResult]:
    return ResultBatch(
        map(
            GenerationResult,
            ids,
            _cut(tokens, np.int32, lengths),
            _cut(logprobs, np.float32, lengths),
            _cut(versions, np.int32, lengths),
            map(StopReason, reasons),
            *further,
        )
    )


def _chunks(
    ids: Column, tokens: bytes, lengths: Column, logprobs: bytes, versions: bytes, tops: Column
) -> list[GenerationChunk]:
    columns = (
        _cut(tokens, np.int32, lengths),
        _cut(logprobs, np.float32, lengths),
        _cut(versions, np.int32, lengths),
        tops,
    )
    return ChunkBatch(map(GenerationChunk, ids, *columns))


def _joined(arrays: Sequence[NDArray[Any]], dtype: type) -> tuple[bytes, list[int]]:
    """The arrays end to end, and the length of each."""
    if not arrays:
        return b"", []
    return np.concatenate(arrays).astype(dtype, copy=False).tobytes(), [len(a) for a in arrays]


def _cut(joined: bytes, dtype: type, lengths: Sequence[int]) -> list[NDArray[Any]]:
    """Inverse of `_joined`: read-only views."""
    column: NDArray[Any] = np.frombuffer(joined, dtype)
    views, start = [], 0
    for length in lengths:
        views.append(column[start : start + length])
        start += length
    return views
