"""TrajectoryQueue: version-tagged references between the rollout fleet and the learner.

The gate is the only back-pressure; `capacity` is its limit, so a full queue is a bug.
put:  waits for nothing.
take: waits for `groups_per_step` tickets it may consume; unblocked by put(), forget() and close().
"""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from areal_ray.core.journal import JournalPlace
from areal_ray.core.versions import UNLIMITED, AdmissionConfig, must_wait_for, oldest_allowed

RefT = TypeVar("RefT")


@dataclass(frozen=True, slots=True)
class Ticket(Generic[RefT]):
    """One committed group: a reference to its payload and what must be known without reading it."""

    group_id: str
    task_id: str
    ref: RefT
    versions: tuple[int, ...]
    """Of its sampled tokens, each once, the oldest first."""
    num_tokens: int
    """All tokens of all siblings: what the group costs the learner."""
    num_rewarded: int = 0
    """Siblings with a reward."""
    metrics: tuple[tuple[str, float, float], ...] = ()
    """(name, value, weight) that the group adds to the row of the step that trains on it."""
    place: JournalPlace | None = None
    """Where its bytes lie in the journal."""
    arrived_s: float = field(default_factory=time.monotonic)
    """Monotonic clock."""

    @property
    def oldest_version(self) -> int:
        """Of any of its sampled tokens."""
        return self.versions[0]

    def oldest_trained(self, oldest_allowed: int) -> int | None:
        """Oldest behaviour version, those below `oldest_allowed` masked; None if all are."""
        return next((version for version in self.versions if version >= oldest_allowed), None)


@dataclass(frozen=True, slots=True)
class Take(Generic[RefT]):
    """What one learner step got from the queue."""

    tickets: list[Ticket[RefT]]
    dropped: list[Ticket[RefT]]
    """Too old for this step; out of the queue and not trained on."""


class TrajectoryQueue(Generic[RefT]):
    """FIFO of tickets that holds the staleness bound at consumption."""

    def __init__(self, config: AdmissionConfig, *, capacity: int, least_rewarded: int = 0) -> None:
        """`least_rewarded`: episodes with a reward that wait here before any group is taken."""
        self._config = config
        self._least_rewarded = least_rewarded
        self._capacity = capacity
        self._tickets: list[Ticket[RefT]] = []
        self._expected: dict[str, int] = {}
        self._changed = asyncio.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def lacks_rewarded(self) -> int:
        """Episodes with a reward that are still to come before any group is taken."""
        return max(0, self._least_rewarded - sum(t.num_rewarded for t in self._tickets))

    def expect(self, group_id: str, version: int) -> None:
        """A group was admitted at `version`; it will be put or forgotten."""
        self._expected[group_id] = version

    async def forget(self, group_id: str) -> None:
        """An expected group ended without reaching the queue."""
        async with self._changed:
            self._expected.pop(group_id, None)
            self._changed.notify_all()

    async def put(self, ticket: Ticket[RefT]) -> None:
        """Add a committed group."""
        async with self._changed:
            if len(self._tickets) >= self._capacity:
                raise RuntimeError(f"queue is full at {self._capacity} groups; one was unadmitted")
            self._expected.pop(ticket.group_id, None)
            self._tickets.append(ticket)
            self._changed.notify_all()

    async def take(self, version: int) -> Take[RefT] | None:
        """The next `groups_per_step` tickets, oldest behaviour first; None once closed.

        The caller drops `Take.dropped` and hands their admissions back *before* asking again:
        an empty `tickets` with something dropped means just that.
        """
        count = self._config.groups_per_step
        async with self._changed:
            while True:
                if self._closed:
                    return None
                dropped = self._remove_stale(version)
                if dropped:  # their admissions are needed back before the step can fill up
                    return Take([], dropped)
                # Oldest first; among equals in order of arrival (sort is stable).
                order = sorted(self._tickets, key=lambda ticket: ticket.oldest_version)
                taken, left = order[:count], order[count:]
                is_enough = len(taken) == count and not self.lacks_rewarded
                if is_enough and not self._waits(taken, left, version):
                    self._tickets = left
                    return Take(taken, [])
                await self._changed.wait()

    async def close(self) -> None:
        """Unblock take(): nothing more will be taken."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _remove_stale(self, version: int) -> list[Ticket[RefT]]:
        if (
            self._config.at_consumption == "mask"
            or self._config.max_head_offpolicyness == UNLIMITED
        ):
            return []
        oldest = oldest_allowed(version, self._config)
        stale = [t for t in self._tickets if t.oldest_version < oldest]
        self._tickets = [t for t in self._tickets if t.oldest_version >= oldest]
        return stale

    def _waits(self, taken: list[Ticket[RefT]], left: list[Ticket[RefT]], version: int) -> bool:
        if self._config.at_consumption != "wait":
            return False
        return bool(
            must_wait_for(
                [t.oldest_version for t in taken],
                [t.oldest_version for t in left],
                list(self._expected.values()),
                self._config,
                version,
            )
        )
