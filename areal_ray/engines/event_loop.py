"""An asyncio event loop in a thread of its own, for engines whose verbs any thread may call."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from areal_ray.errors import EngineError

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines for other threads until `stop`."""

    def __init__(self, name: str) -> None:
        """Start it; `name` is the thread's, for messages too."""
        self._name = name
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the loop's own thread, which must never wait for it."""
        return threading.current_thread() is self._thread

    def ask(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine and wait for what it returns.

        Raises:
            EngineError: Called on the loop's own thread.
            TimeoutError: It took longer than that; it goes on.
        """
        if self.is_current:
            work.close()
            raise EngineError(f"{self._name}: a verb that waits was called from on_results.")
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def tell(self, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have a coroutine made and run there without waiting for it."""
        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(make()))

    def stop(self, deadline_s: float) -> None:
        """End the loop; from another thread also wait that long for the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.is_current:
            self._thread.join(deadline_s)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
