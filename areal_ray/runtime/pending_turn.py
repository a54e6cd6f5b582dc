"""A turn that a rollout client has given to a replica and waits for."""

import asyncio
from dataclasses import dataclass

from areal_ray.engines.protocols import GenerationChunk, GenerationRequest, GenerationResult
from areal_ray.errors import ActorLost
from areal_ray.runtime.streamed_turn import StreamedTurn


@dataclass(slots=True)
class PendingTurn:
    """One turn, over all replicas that are given it."""

    request: GenerationRequest
    """What the present replica has to sample."""
    future: "asyncio.Future[GenerationResult]"
    due_s: float
    """On the loop's clock; then it is given up."""
    stream: StreamedTurn | None = None
    tries: int = 0

    @property
    def request_id(self) -> str:
        """Of every try."""
        return self.request.request_id

    def add(self, chunk: GenerationChunk) -> None:
        """Take what a streamed turn sampled."""
        if self.stream is not None and not self.future.done():
            self.stream.add(chunk)

    def end(self, result: GenerationResult) -> None:
        """Hand the turn to whoever waits for it."""
        self.future.set_result(result if self.stream is None else self.stream.finish(result))

    def may_try_again(self, max_tries: int, last: str) -> bool:
        """Whether `request` now says what another replica has to sample; else the turn has ended.

        Args:
            max_tries: Replicas one turn is given to.
            last: Where and how it was lost.
        """
        why = ""
        if self.tries >= max_tries:
            why = f"was given to a replica {self.tries} times"
        elif self.stream is not None and (looking := self.stream.why_not_continued()):
            why = f"was streamed in part and cannot go on elsewhere, for its {looking}"
        if why:
            self.future.set_exception(ActorLost(f"turn {self.request_id} {why}; last, {last}"))
            return False
        if self.stream is None:
            return True
        rest = self.stream.rest()
        if isinstance(rest, GenerationResult):
            self.future.set_result(rest)
            return False
        self.request = rest
        return True
