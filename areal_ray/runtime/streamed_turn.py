"""One streamed turn at its consumer's end of the way: what came, and what was not taken yet.

Owned by the rollout client, filled by its collector and emptied by whoever iterates over the turn.
A slow consumer holds nobody up: what it has not taken is joined, and is never more than the turn.

next_chunk() waits for: a chunk or the turn's end; unblocked by the collector, or by the client when
the turn is overdue.
"""

import asyncio
from dataclasses import replace

import numpy as np

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.protocols import GenerationChunk, GenerationRequest, GenerationResult
from areal_ray.runtime.outbox import append_joined, joined


class StreamedTurn:
    """What has come of a turn, over all replicas that were given it."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = replace(request, is_streamed=True)
        self._come: list[GenerationChunk] = []
        self._untaken: list[GenerationChunk] = []
        self._num_come = 0
        self._num_before = 0
        """Tokens that came before the present try."""
        self._changed = asyncio.Event()

    def add(self, chunk: GenerationChunk) -> None:
        """Take what the replica sampled."""
        self._num_come += len(chunk.token_ids)
        append_joined(self._come, chunk)
        append_joined(self._untaken, chunk)
        self._changed.set()

    def finish(self, result: GenerationResult) -> GenerationResult:
        """The turn as a whole; what of it had not come is there for the consumer now."""
        if result.error:
            return result
        had = self._num_come - self._num_before
        if had < len(result.token_ids):
            ids, logprobs, versions = result.token_ids, result.logprobs, result.versions
            top = None if result.top is None else result.top.part(had)
            rest = GenerationChunk(
                result.request_id, ids[had:], logprobs[had:], versions[had:], top
            )
            self.add(rest)
        if not self._num_before:
            return result
        return self._whole(result.stop_reason)

    def _whole(self, reason: StopReason) -> GenerationResult:
        whole = joined(self._come)
        return GenerationResult(
            whole.request_id,
            whole.token_ids,
            whole.logprobs,
            whole.versions,
            reason,
            top=whole.top,
        )

    def why_not_continued(self) -> str:
        """Empty if another replica can go on where this one broke off."""
        sampling = self.request.sampling
        if self._num_come in (0, sampling.max_new_tokens):
            return ""
        if self.request.grammar:
            return "grammar, whose beginning was streamed already"
        if sampling.stop:
            return "stop texts, which may begin in what was streamed already"
        if sampling.presence_penalty or sampling.frequency_penalty:
            return "penalties that count what was streamed already"
        return ""

    def rest(self) -> GenerationRequest | GenerationResult:
        """What is left to sample after what came; the whole turn if nothing is."""
        self._num_before = self._num_come
        if not self._num_come:
            return self.request
        sampling = self.request.sampling
        left = sampling.max_new_tokens - self._num_come
        if left <= 0:
            return self._whole(StopReason.LENGTH)
        return replace(
            self.request,
            prompt_ids=np.concatenate([self.request.prompt_ids, joined(self._come).token_ids]),
            sampling=sampling.model_copy(update={"max_new_tokens": left}),
        )

    def wake(self, _: object = None) -> None:
        """The turn has ended, well or not."""
        self._changed.set()

    async def next_chunk(self, end: "asyncio.Future[GenerationResult]") -> GenerationChunk | None:
        """What came since the last call, once there is something; None at the turn's end.

        Raises:
            ArealRayError: What the turn ended with, once all that came was taken.
        """
        while not self._untaken:
            if end.done():
                end.result()
                return None
            await self._changed.wait()
            self._changed.clear()
        chunk = joined(self._untaken)
        self._untaken.clear()
        return chunk
