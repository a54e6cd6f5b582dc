"""Which replica a turn goes to: the one that holds its prefix, else the least loaded."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

_REMEMBERED_PREFIXES = 8192


class Loaded(Protocol):
    """A way to a replica."""

    down_reason: str
    """Why it is not answering; empty while it is."""

    @property
    def num_pending(self) -> int:
        """Turns under way on it."""


L = TypeVar("L", bound=Loaded)


class ReplicaChoice:
    """Remembers where prefixes went.

    Args:
        spill_requests: A prefix leaves its replica when that one has so many more requests pending
            than the least loaded.
    """

    def __init__(self, spill_requests: int) -> None:
        self._spill_requests = spill_requests
        self._homes: OrderedDict[str, Loaded] = OrderedDict()

    def choose(self, lanes: Sequence[L], prefix_key: str) -> L:
        """One of the lanes; one that is down only where all are."""
        alive = [lane for lane in lanes if not lane.down_reason] or lanes
        least = min(alive, key=lambda lane: lane.num_pending)
        home = self._homes.get(prefix_key) if prefix_key else None
        limit = least.num_pending + self._spill_requests
        for lane in alive:
            if lane is home and lane.num_pending < limit:
                self._homes.move_to_end(prefix_key)
                return lane
        if prefix_key:
            self._homes[prefix_key] = least
            if len(self._homes) > _REMEMBERED_PREFIXES:
                self._homes.popitem(last=False)
        return least
