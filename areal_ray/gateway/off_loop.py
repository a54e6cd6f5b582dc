"""Work on large bodies and long replies, on threads beside the event loop all streams run on.

Reading, matching and rendering a conversation is Python, which the threads share with the loop a
few milliseconds at a time; tokenizing runs beside it. What is small stays on the loop: there it is
done before a thread would have begun.
"""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from areal_ray.gateway.call import Call

T = TypeVar("T")

LARGE_CHARACTERS = 1 << 15
"""Of a body or a conversation: what takes the loop some milliseconds."""
_OF_A_MESSAGE, _OF_A_TOOL = 100, 1000
"""Characters that each is worth beside its text, about."""
OF_A_TOKEN = 4
"""Characters that a sampled token is worth."""
_THREADS = 2
"""More would have the loop wait for its turn among them, and be no faster together."""


class OffLoop:
    """Threads for large work; they are started by the first of it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="large body")

    async def run(self, num_characters: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises; on a thread where there is that much to read.

        Where the wait is cancelled, `work` is done to its end all the same, and the cancellation
        comes after it: what it opened can be closed.
        """
        if num_characters < LARGE_CHARACTERS:
            return work()
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():  # who cancels once more does not end it either
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({running})
            raise


def num_characters(call: Call) -> int:
    """About as many as a call's conversation and tools have."""
    said = sum(len(message["content"]) for message in call.messages)
    return said + _OF_A_MESSAGE * len(call.messages) + _OF_A_TOOL * len(call.tools or ())
