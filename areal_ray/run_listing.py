"""Runs as text, from what their folders hold: a list of all, or one in detail."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_ray.core.journal import JOURNAL_FOLDER, read_ledger, resumption_lines
from areal_ray.core.lineage import Lineage, lineage_of
from areal_ray.run_folder import read_status
from areal_ray.telemetry.summary import read_summary
from areal_ray.telemetry.views import duration_text

_UNKNOWN = "-"
_MOST_TASK = 40


def list_runs(folders: Sequence[Path]) -> str:
    """A line for each run: name, state, steps, reward, held-out accuracy, age."""
    if not folders:
        return ""
    rows: list[tuple[str, ...]] = [
        ("run", "state", "step", "version", "reward", "held-out", "changed")
    ]
    rows += [_row(folder) for folder in folders]
    return _table(rows)


def describe_run(folder: Path) -> str:
    """All that is known of one run, a line a fact."""
    known = read_status(folder)
    summary = read_summary(folder) or {}
    lines = [f"run      {known.name}: {state_of(folder)}", f"folder   {folder}"]
    lines += [f"resumed  {told}" for told in resumption_lines(folder / JOURNAL_FOLDER)]
    if known.is_running:
        lines += [f"{name:<8} {told}" for name, told in _flat(known.status) if told != ""]
        return "\n".join(lines)
    if summary:
        version = "" if summary["version"] is None else f", version {summary['version']}"
        lines.append(
            f"steps    {summary['steps']} of {summary['planned_steps']} in "
            f"{duration_text(summary['wall_s'])}{version}"
        )
        for name, section, first, last in (
            ("reward", "reward", "first", "last"),
            ("held-out", "eval", "before", "after"),
        ):
            values = summary.get(section) or {}
            if values.get(last) is not None:
                lines.append(f"{name:<8} {_number(values.get(first))} -> {_number(values[last])}")
        if summary.get("failure"):
            lines.append(f"failure  {summary['failure']}")
    return "\n".join(lines)


def state_of(folder: Path) -> str:
    """running, finished, stopped, failed; `ended without a summary` where it was killed."""
    if read_status(folder).is_running:
        return "running"
    summary = read_summary(folder)
    return str(summary["outcome"]) if summary else "ended without a summary"


def read_lineage(folder: Path, version: int) -> Lineage:
    """How a version of a run came about.

    Raises:
        DataError: The run has no such version, or its ledger is damaged.
    """
    return lineage_of(read_ledger(folder / JOURNAL_FOLDER), version)


def describe_lineage(folder: Path, lineage: Lineage) -> str:
    """Which groups and sessions shaped a version: a line a fact, then a line a group."""
    record = lineage.record
    lines = [f"run      {folder.name}", f"version  {record.version}"]
    if record.parent is None:
        return "\n".join([*lines, "weights  the starting model"])
    made = "its candidate" if record.restored is not None else "it"
    lines.append(f"step     {record.version} made {made} from version {record.parent}")
    if record.restored is not None:
        lines.append(f"weights  of version {record.restored} again: {record.refusal}")
    elif record.undone_by is not None:
        lines.append(f"undone   by version {record.undone_by}, which went back behind it")
    shaped = [str(one.version) for one in lineage.shaped_by]
    lines.append("in it    versions " + _shortened(shaped, " <- "))
    rewards = [r for group in record.groups for r in group.rewards if r is not None]
    mean = f", mean reward {sum(rewards) / len(rewards):.3f}" if rewards else ""
    lines.append(
        f"groups   {len(record.groups)}, {len(rewards)} episodes with a reward{mean}"
        + (f", {len(record.sessions)} sessions" if record.sessions else "")
    )
    head = ("group", "task", "sampled by", "tokens", "rewards", "sessions")
    table: list[tuple[str, ...]] = [head]
    for group in record.groups:
        oldest, newest = group.sampled_by
        by = str(oldest) if oldest == newest else f"{oldest} to {newest}"
        given = " ".join(_UNKNOWN if r is None else f"{r:g}" for r in group.rewards)
        task = group.task if len(group.task) <= _MOST_TASK else group.task[:_MOST_TASK] + "..."
        sessions = " ".join(group.sessions)
        table.append((group.group, task, by, str(group.tokens), given, sessions))
    if not any(group.task for group in record.groups):  # the groups' names have them
        table = [(row[0], *row[2:]) for row in table]
    return "\n".join([*lines, _table(table)])


def _shortened(names: Sequence[str], between: str, most: int = 12) -> str:
    """The first names and the last, where there are many."""
    if len(names) > most:
        names = [*names[: most - 2], "...", names[-1]]
    return between.join(names)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _row(folder: Path) -> tuple[str, ...]:
    known = read_status(folder)
    summary = read_summary(folder) or {}
    now: dict[str, Any] = dict(known.status) if known.is_running else summary
    planned, step = now.get("planned_steps"), now.get("step", now.get("steps"))
    age_s = max(0.0, time.time() - max(p.stat().st_mtime for p in [folder, *folder.iterdir()]))
    return (
        folder.name,
        state_of(folder),
        _UNKNOWN if step is None else f"{step} of {planned}" if planned else str(step),
        _UNKNOWN if now.get("version") is None else str(now["version"]),
        _number((summary.get("reward") or {}).get("last")),
        _number((summary.get("eval") or {}).get("after")),
        f"{duration_text(age_s)} ago",
    )


def _flat(status: Any, prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in status.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{name}.")
        elif name != "written_at_s":
            pairs.append(
                (prefix + name, f"{value:.4g}" if isinstance(value, float) else str(value))
            )
    return pairs


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.3f}"
