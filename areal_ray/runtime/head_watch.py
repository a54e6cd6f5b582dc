"""HeadWatch: whether Ray's head answers.

Ray ends every process of its cluster, the driver too, once the head has been away for
RAY_gcs_rpc_server_reconnect_timeout_s: without a word of what the run came to. A run that sees it
go ends in order before that, and can be resumed.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from areal_ray.runtime.ray_store import StoreSilent, read_stored

_TOLD_S = 5.0
_NOT_ASKED_S = 6.0
"""Counted as silence, at most, of the time in which nobody asked: a driver that loads a model, or
was stopped for a while, has heard nothing and knows nothing."""
_LEAST_ASKED = 2
_NOTHING = b"areal_ray.head"


@dataclass(frozen=True, slots=True)
class HeadNews:
    """What one look at the head found."""

    event: str = ""
    """A line where it fell silent or is back."""
    gone: str = ""
    """Why the run cannot go on."""


async def head_answers() -> bool:
    """Whether it answers anything now; takes some seconds where it does not."""
    try:
        await read_stored(_NOTHING)
    except StoreSilent:
        return False
    return True


class HeadWatch:
    """Looks at the head of the cluster that this process is connected to."""

    def __init__(
        self,
        patience_s: float,
        answers: Callable[[], Awaitable[bool]] = head_answers,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look not yet.

        Args:
            patience_s: How long the head may be silent before it counts as gone.
            answers: Asks it.
            clock: In seconds.
        """
        self._patience_s = patience_s
        self._answers = answers
        self._clock = clock
        self._silent_since = clock()
        """Its last answer; or later, where it was not asked."""
        self._num_unanswered = 0
        self._is_told = False

    async def look(self) -> HeadNews:
        """Ask it anything; takes some seconds where it does not answer."""
        began = self._clock()
        if await self._answers():
            was_told, self._is_told = self._is_told, False
            self._silent_since, self._num_unanswered = self._clock(), 0
            return HeadNews("Ray's head answers again" if was_told else "")
        if not self._num_unanswered:
            self._silent_since = max(self._silent_since, began - _NOT_ASKED_S)
        self._num_unanswered += 1
        silent_s = self._clock() - self._silent_since
        # One look proves nothing: this process may have stood still during it.
        if silent_s >= self._patience_s and self._num_unanswered >= _LEAST_ASKED:
            return HeadNews(
                gone=f"Ray's head has not answered for {silent_s:.0f} s. Start the cluster anew, "
                "then `areal-ray resume`; where a head comes back by itself (fault tolerance), set "
                "RAY_gcs_rpc_server_reconnect_timeout_s to twice the time that takes"
            )
        if silent_s >= _TOLD_S and not self._is_told:
            self._is_told = True
            return HeadNews(f"Ray's head has not answered for {silent_s:.0f} s")
        return HeadNews()
