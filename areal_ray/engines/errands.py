"""What other threads ask of an engine's loop between two of its steps, in the order they asked.

Called by the torch generation engine, under its lock; a swap, a score, going to sleep and waking
are such errands. The asking thread waits on `done`; unblocked by the loop, also at its end.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from areal_ray.errors import EngineError


@dataclass(slots=True)
class Errand:
    """One piece of work for the loop thread."""

    name: str
    work: Callable[[], Any]
    waits_for_drain: bool = False
    """Done once no turn runs; new turns wait for it."""
    ends_loop: bool = False
    """Whether its failure leaves nothing sound to go on with."""
    done: threading.Event = field(default_factory=threading.Event)
    outcome: Any = None
    failure: Exception | None = None

    def wait(self) -> Any:
        """What the work returned, once the loop has done it.

        Raises:
            EngineError: The work failed, or the loop ended before it.
        """
        self.done.wait()
        if self.failure is None:
            return self.outcome
        if isinstance(self.failure, EngineError):
            raise self.failure
        why = f"{type(self.failure).__name__}: {self.failure}"
        raise EngineError(f"torch generation engine: {self.name}: {why}") from self.failure


class Errands:
    """Errands that wait for the loop."""

    def __init__(self) -> None:
        self._waiting: deque[Errand] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, errand: Errand) -> None:
        """Put one behind those that wait."""
        self._waiting.append(errand)

    def take(self, *, is_drained: bool) -> Errand | None:
        """The one to do now. One that waits for running turns to end holds up those behind it."""
        if self._waiting and (is_drained or not self._waiting[0].waits_for_drain):
            return self._waiting.popleft()
        return None

    def refuse_first(self, failure: Exception) -> None:
        """Release who has waited for the longest: it cannot be done."""
        errand = self._waiting.popleft()
        errand.failure = failure
        errand.done.set()

    def end(self, failure: Exception) -> None:
        """Release everyone who waits: the loop is over."""
        while self._waiting:
            self.refuse_first(failure)
