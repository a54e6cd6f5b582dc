"""Lineage: which groups, and in kind online which sessions, shaped which version of the weights.

Read from the run's ledger alone, so that it can be told of a run that goes on, ended or crashed.
Step N makes version N out of its parent; where what it made was refused, version N is an earlier
one's weights again, and the steps since then shaped nothing that is in force.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_ray.errors import DataError


@dataclass(frozen=True, slots=True)
class ShapingGroup:
    """One group that a step trained on."""

    group: str
    """The ledger's name of it: epoch/task/attempt."""
    rewards: tuple[float | None, ...]
    """Of its episodes; null = could not be scored."""
    tokens: int
    sampled_by: tuple[int, int]
    """Oldest and newest version that sampled it."""
    sessions: tuple[str, ...] = ()
    """Of the gateway, in the order of the rewards."""
    task: str = ""
    """What clients named the sessions' task; empty elsewhere, where the group's name has it."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """How one version came about."""

    version: int
    """Of the step of the same number; 0 = the starting model."""
    parent: int | None
    """Version whose weights the step began with; null for the starting model."""
    groups: tuple[ShapingGroup, ...] = ()
    """What the step trained on."""
    restored: int | None = None
    """Version whose weights these are, since what the step made was refused."""
    refusal: str = ""
    """Why it was."""
    undone_by: int | None = None
    """Version with which the weights that the step made were given up; its own where they never
    reached a rollout."""

    @property
    def sessions(self) -> tuple[str, ...]:
        """Of all its groups."""
        return tuple(session for group in self.groups for session in group.sessions)


@dataclass(frozen=True, slots=True)
class Lineage:
    """A version, and those whose training is in its weights."""

    record: VersionRecord
    shaped_by: tuple[VersionRecord, ...]
    """Its own record unless its weights are an earlier one's, then its ancestors; newest first."""


def lineage_of(events: Iterable[Mapping[str, Any]], version: int) -> Lineage:
    """How `version` came about, from all events of a run's ledger.

    Raises:
        DataError: The run has no such version.
    """
    records = version_records(events)
    if version not in records:
        known = f"0 to {max(records)}"
        raise DataError(f"version {version}: the run has {known}; must be one of them. Choose one")
    shaped_by = []
    at: int | None = version
    while at is not None:
        record = records[at]
        if record.restored is not None:
            at = record.restored
        else:
            shaped_by.append(record)
            at = record.parent
    return Lineage(records[version], tuple(shaped_by))


def version_records(events: Iterable[Mapping[str, Any]]) -> dict[int, VersionRecord]:
    """Every version of a run, the starting model included; of a step taken twice, the last time."""
    committed: dict[str, Mapping[str, Any]] = {}
    trained: dict[int, Mapping[str, Any]] = {}
    undone: dict[int, Mapping[str, Any]] = {}
    for event in events:
        kind = event["event"]
        if kind == "committed":
            committed[event["group"]] = event
        elif kind == "trained":
            trained[event["step"]] = {
                "groups": [_shaping(group, committed.pop(group, {})) for group in event["groups"]]
            }
        elif kind == "rolled_back":
            undone[event["step"]] = event
        elif kind == "resumed":  # what was trained after that checkpoint was forgotten
            trained = {step: one for step, one in trained.items() if step <= event["step"]}
            undone = {step: one for step, one in undone.items() if step <= event["step"]}
    records = {0: VersionRecord(0, None)}
    for step in sorted(trained):
        rollback = undone.get(step)
        records[step] = VersionRecord(
            step,
            parent=step - 1,
            groups=tuple(trained[step]["groups"]),
            restored=rollback["to"] if rollback else None,
            refusal=rollback["reason"] if rollback else "",
            undone_by=min((n for n, one in undone.items() if one["to"] < step <= n), default=None),
        )
    return records


def _shaping(group: str, record: Mapping[str, Any]) -> ShapingGroup:
    return ShapingGroup(
        group=group,
        rewards=tuple(record.get("rewards", ())),
        tokens=record.get("tokens", 0),
        sampled_by=(record.get("oldest_version", -1), record.get("newest_version", -1)),
        sessions=tuple(record.get("sessions", ())),
        task=record.get("task", ""),
    )
