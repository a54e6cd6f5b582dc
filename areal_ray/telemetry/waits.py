"""WaitBoard: who waits, for what, since when; and how many seconds that took, by metric name.

The driver's loops write on it around each await; the progress display and every deadline message
read it, so that no wait is without a name.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait that is going on."""

    role: str
    what: str
    """Such as `3 of 16 groups`."""
    for_s: float

    def __str__(self) -> str:
        return f"{self.role} waits for {self.what} ({self.for_s:.0f} s)"


class WaitBoard:
    """Waits of one run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, tuple[str, Callable[[], str], float]] = {}
        self._seconds: dict[str, float] = {}
        self._counted_to: dict[int, tuple[str, float]] = {}
        self._next = 0

    @contextmanager
    def waiting(
        self, role: str, what: str | Callable[[], str], *, metric: str = ""
    ) -> Iterator[None]:
        """Name a wait while the block runs.

        Args:
            what: Text, or a function that tells it anew each time someone looks.
            metric: Name of the `time/` metric that these seconds count under, if any.
        """
        key, self._next = self._next, self._next + 1
        now = self._clock()
        self._open[key] = (role, what if callable(what) else lambda: what, now)
        if metric:
            self._counted_to[key] = (metric, now)
        try:
            yield
        finally:
            self._count(key)
            self._counted_to.pop(key, None)
            del self._open[key]

    def waits(self) -> list[Wait]:
        """All waits that are going on, the longest first."""
        now = self._clock()
        waits = [Wait(role, what(), now - began) for role, what, began in list(self._open.values())]
        return sorted(waits, key=lambda wait: -wait.for_s)

    def by_role(self) -> dict[str, str]:
        """The longest wait of each role: `StatusView.waits`."""
        longest: dict[str, str] = {}
        for wait in self.waits():
            longest.setdefault(wait.role, wait.what)
        return longest

    def take_seconds(self) -> dict[str, float]:
        """Seconds by metric name since the last call; open waits count up to now."""
        for key in list(self._counted_to):
            self._count(key)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _count(self, key: int) -> None:
        if key in self._counted_to:
            metric, since = self._counted_to[key]
            now = self._clock()
            self._seconds[metric] = self._seconds.get(metric, 0.0) + now - since
            self._counted_to[key] = (metric, now)
