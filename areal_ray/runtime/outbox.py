"""What one client of a replica has not fetched yet, and waiting for it.

Held by the RolloutActor, one for each client, on its event loop. Nothing is lost on a client that
fetches seldom, and it costs no more than its turns: what a streamed turn sampled is joined, and
given up for the whole turn once that has ended.

wait() waits for: a turn's end or a chunk; unblocked by the engine; bounded by `poll_s`.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from areal_ray.core.turn import joined_tops
from areal_ray.engines.protocols import GenerationChunk, GenerationResult
from areal_ray.runtime.turn_wire import ChunkBatch, Collected, ResultBatch

_JOINED_AT = 64
"""Chunks of one turn that may lie side by side; an object for a token is dear."""


def joined(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """Chunks of one turn as one."""
    if len(chunks) == 1:
        return chunks[0]
    return GenerationChunk(
        chunks[0].request_id,
        np.concatenate([chunk.token_ids for chunk in chunks]),
        np.concatenate([chunk.logprobs for chunk in chunks]),
        np.concatenate([chunk.versions for chunk in chunks]),
        joined_tops([chunk.top for chunk in chunks]),
    )


def append_joined(chunks: list[GenerationChunk], chunk: GenerationChunk) -> None:
    """Add one to a turn's chunks, in place; now and then they become one."""
    chunks.append(chunk)
    # Longer ones are joined less often, so that a token is copied a few times at most.
    if len(chunks) > _JOINED_AT and len(chunks) * 8 > len(chunks[0].token_ids):
        chunks[:] = [joined(chunks)]


class Outbox:
    """Turns that ended, and what streamed ones sampled since they were last fetched."""

    def __init__(self) -> None:
        self.num_pending = 0
        """Turns submitted and not yet fetched whole."""
        self.last_seen_s = time.monotonic()
        self._results: list[GenerationResult] = []
        self._chunks: dict[str, list[GenerationChunk]] = {}
        self._filled = asyncio.Event()

    @property
    def num_held_tokens(self) -> int:
        """Tokens that wait to be fetched."""
        streamed = sum(len(c.token_ids) for some in self._chunks.values() for c in some)
        return streamed + sum(len(result.token_ids) for result in self._results)

    def submitted(self, count: int) -> None:
        """So many more turns are under way."""
        self.num_pending += count
        self.last_seen_s = time.monotonic()

    def add_chunk(self, chunk: GenerationChunk) -> None:
        """Hold what a turn sampled."""
        held = self._chunks.get(chunk.request_id)
        if held is None:
            self._chunks[chunk.request_id] = [chunk]
        else:
            append_joined(held, chunk)
        self._filled.set()

    def add_result(self, result: GenerationResult) -> None:
        """Hold a turn that ended; the client knows which of its tokens it has had."""
        self._chunks.pop(result.request_id, None)
        self._results.append(result)
        self._filled.set()

    async def wait(self, poll_s: float, linger_s: float) -> None:
        """Return once there is something to fetch, or after `poll_s` without.

        Args:
            poll_s: Longest wait.
            linger_s: Once one turn has ended, wait this long for others to travel along; chunks do
                not wait.
        """
        self.last_seen_s = time.monotonic()
        try:
            async with asyncio.timeout(poll_s):
                await self._filled.wait()
        except TimeoutError:
            return
        if linger_s > 0 and not self._chunks and self.num_pending > len(self._results):
            await asyncio.sleep(linger_s)

    def take(self) -> Collected:
        """All that is here, a chunk for each streamed turn at most."""
        results, self._results = ResultBatch(self._results), []
        chunks, self._chunks = self._chunks, {}
        self._filled.clear()
        self.num_pending -= len(results)
        return Collected(results, ChunkBatch(map(joined, chunks.values())))
