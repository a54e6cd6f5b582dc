"""Ledger: every admitted group ends exactly once.

    reserved -> leased -> committed -> trained(step) | dropped(reason)
                    \\-> failed(reason)                 (its task is tried again, or given up)

At any moment admitted = trained + dropped + failed + in flight. Ended entries leave only their
counts behind, so memory stays flat; commits and ends are also appended to the run's journal.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from areal_ray.core.reasons import count_reason
from areal_ray.core.task import Task


class LedgerState(StrEnum):
    """Where an admitted group is."""

    RESERVED = "reserved"
    LEASED = "leased"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class Lease:
    """One admitted attempt at a task."""

    epoch: int
    task: Task
    attempt: int
    admitted_version: int
    admitted_s: float = 0.0
    """Monotonic clock at admission."""
    state: LedgerState = LedgerState.RESERVED

    @property
    def key(self) -> tuple[int, str, int]:
        """(epoch, task id, attempt): what the ledger is keyed by."""
        return (self.epoch, self.task.id, self.attempt)

    @property
    def group_id(self) -> str:
        """The key as one string, unique in a run."""
        return f"{self.epoch}/{self.task.id}/{self.attempt}"


class Ledger:
    """Bookkeeping of all groups of a run. Raises ValueError on any illegal or repeated end."""

    def __init__(self, journal: Callable[[dict[str, Any]], None] = lambda record: None) -> None:
        self._journal = journal
        self._followers: list[Callable[[dict[str, Any]], None]] = []
        self._open: dict[str, Lease] = {}
        self.admitted = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def follow(self, follower: Callable[[dict[str, Any]], None]) -> None:
        """Have `follower` called with each further event, after the journal has it."""
        self._followers.append(follower)

    @property
    def in_flight(self) -> int:
        """Groups that have not ended, those waiting in the queue included."""
        return len(self._open)

    def open_leases(self) -> list[Lease]:
        """Groups that have not ended, oldest admission first."""
        return list(self._open.values())

    def reserve(self, lease: Lease) -> Lease:
        """Enter a newly admitted group."""
        if lease.group_id in self._open:
            raise ValueError(f"group {lease.group_id} is in flight already; it was admitted twice")
        self.admitted += 1
        self._open[lease.group_id] = lease
        return lease

    def lease(self, group_id: str) -> None:
        """An agent actor began the group."""
        self._move(group_id, LedgerState.RESERVED, LedgerState.LEASED)

    def commit(self, group_id: str, record: dict[str, Any]) -> None:
        """The group is scored and its payload is safe; `record` goes to the journal."""
        self._move(group_id, LedgerState.LEASED, LedgerState.COMMITTED)
        self._write({"event": "committed", "group": group_id, **record})

    def train(self, group_ids: Iterable[str], step: int) -> None:
        """The groups were consumed by optimizer step `step`."""
        group_ids = list(group_ids)
        for group_id in group_ids:
            self._end(group_id, LedgerState.COMMITTED)
        self.trained += len(group_ids)
        self._write({"event": "trained", "step": step, "groups": group_ids})

    def roll_back(self, step: int, to: int, reason: str) -> None:
        """What `step` made was refused; its version has the weights of version `to` again."""
        self._write({"event": "rolled_back", "step": step, "to": to, "reason": reason})

    def drop(self, group_id: str, reason: str) -> None:
        """A scored group is not trained on: too stale, or it teaches nothing."""
        self._end(group_id, LedgerState.LEASED, LedgerState.COMMITTED)
        count_reason(self.dropped, reason)
        self._write({"event": "dropped", "group": group_id, "reason": reason})

    def fail(self, group_id: str, reason: str) -> None:
        """The group gave no usable result."""
        self._end(group_id, LedgerState.RESERVED, LedgerState.LEASED)
        count_reason(self.failed, reason)
        self._write({"event": "failed", "group": group_id, "reason": reason})

    def counts(self) -> dict[str, int]:
        """admitted, trained, dropped, failed, in_flight; the first is the sum of the others."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "dropped": self.dropped.total(),
            "failed": self.failed.total(),
            "in_flight": self.in_flight,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counts that a resumed run goes on from; what was in flight is counted as dropped."""
        dropped = self.dropped + Counter({"run_ended": self.in_flight})
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "dropped": dict(dropped),
            "failed": dict(self.failed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`, into an empty ledger."""
        assert not self._open, "a ledger in use cannot be overwritten"
        self.admitted, self.trained = state["admitted"], state["trained"]
        self.dropped, self.failed = Counter(state["dropped"]), Counter(state["failed"])

    def _write(self, event: dict[str, Any]) -> None:
        self._journal(event)
        for follower in self._followers:
            follower(event)

    def _move(self, group_id: str, expected: LedgerState, state: LedgerState) -> None:
        lease = self._open.get(group_id)
        if lease is None or lease.state is not expected:
            raise ValueError(
                f"group {group_id} is {lease.state if lease else 'not in flight'}; "
                f"only a {expected} group can become {state}"
            )
        self._open[group_id] = replace(lease, state=state)

    def _end(self, group_id: str, *expected: LedgerState) -> None:
        lease = self._open.get(group_id)
        if lease is None or lease.state not in expected:
            raise ValueError(
                f"group {group_id} is {lease.state if lease else 'not in flight'}; "
                f"it can end only once, and here only from {' or '.join(expected)}"
            )
        del self._open[group_id]
