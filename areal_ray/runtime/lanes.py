"""A rollout client's ways to the replicas: which there are, which take turns, which are to go."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_ray.engines.protocols import GenerationRequest
from areal_ray.errors import DeadlineExceeded
from areal_ray.runtime.pending_turn import PendingTurn
from areal_ray.runtime.replica_choice import ReplicaChoice


@dataclass(slots=True, eq=False)
class Lane:
    """The way to one replica and what is under way on it."""

    name: str
    replica: Any
    outbox: list[GenerationRequest] = field(default_factory=list)
    pending: dict[str, PendingTurn] = field(default_factory=dict)
    incarnation: str = ""
    down_reason: str = ""
    """Why it is not answering; empty while it is."""
    collector: "asyncio.Task[None] | None" = None
    is_flush_due: bool = False

    @property
    def num_pending(self) -> int:
        """Turns under way on it."""
        return len(self.pending)

    def fail(self, request_ids: Iterable[str], error: Exception) -> None:
        """End turns with an error."""
        for request_id in list(request_ids):
            pending = self.pending.get(request_id)
            if pending is not None and not pending.future.done():
                pending.future.set_exception(error)
                del self.pending[request_id]

    def handed_over(self) -> list[PendingTurn]:
        """Turns that another replica can go on with, taken from this one; the others stay."""
        moved = {
            request_id: pending
            for request_id, pending in self.pending.items()
            if pending.stream is None or not pending.stream.why_not_continued()
        }
        if moved and not self.down_reason:
            self.replica.abort.remote(list(moved))
        self.outbox = [r for r in self.outbox if r.request_id not in moved]
        for request_id, pending in moved.items():
            del self.pending[request_id]
            pending.tries -= 1  # nothing was lost
        return list(moved.values())


class Lanes:
    """All ways, those out of use too while something is under way on them.

    Args:
        replicas: Handles by name, at least one.
        spill_requests: As `ReplicaChoice`.
    """

    def __init__(self, replicas: Mapping[str, Any], spill_requests: int) -> None:
        self._open = [Lane(name, replica) for name, replica in replicas.items()]
        if not self._open:
            raise ValueError("replicas: is empty; at least one rollout replica is needed")
        self._leaving: list[Lane] = []
        self._choice = ReplicaChoice(spill_requests)

    def __iter__(self) -> Iterator[Lane]:
        return iter([*self._open, *self._leaving])

    def choose(self, prefix_key: str) -> Lane:
        """Where a turn goes; never to a replica that is to go."""
        return self._choice.choose(self._open, prefix_key)

    def can_take_over(self) -> bool:
        """Whether a replica answers that takes turns."""
        return any(not lane.down_reason for lane in self._open)

    def change(self, replicas: Mapping[str, Any]) -> list[Lane]:
        """Let these, and no others, take turns from now on; the ways that are to go, until
        `forget`."""
        if not replicas:
            raise ValueError("replicas: is empty; at least one rollout replica has to stay")
        known = {lane.name: lane for lane in self}
        self._open = [known.get(name) or Lane(name, one) for name, one in replicas.items()]
        self._leaving = [lane for name, lane in known.items() if name not in replicas]
        return list(self._leaving)

    def forget(self, gone: list[Lane]) -> None:
        """Nothing is under way any more on these."""
        for lane in gone:
            if lane.collector is not None:
                lane.collector.cancel()
        self._leaving = [lane for lane in self._leaving if lane not in gone]

    def end_overdue(self, now_s: float, deadline_s: float) -> float | None:
        """Give up the turns whose time is over; when the next one's is, if any waits.

        Args:
            now_s: On the loop's clock.
            deadline_s: Of each turn, for the message.
        """
        waiting = [p for lane in self for p in lane.pending.values() if not p.future.done()]
        for pending in waiting:
            if pending.due_s <= now_s:
                told = self._overdue(pending.request_id, deadline_s)
                pending.future.set_exception(DeadlineExceeded(told))
        return min((p.due_s for p in waiting if not p.future.done()), default=None)

    def _overdue(self, request_id: str, deadline_s: float) -> str:
        lane = next((lane for lane in self if request_id in lane.pending), None)
        where = "no replica" if lane is None else lane.name
        state = f", which is down ({lane.down_reason})" if lane and lane.down_reason else ""
        started = f"turn {request_id} waited {deadline_s:g} s for {where}{state}"
        counts = ", ".join(f"{lane.name} {len(lane.pending)}" for lane in self)
        return f"{started}. Turns pending: {counts}. Raise agent.turn_timeout_s if this is normal"
