"""Rows of metrics.jsonl: what is written and how it is read back."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal_ray.errors import DataError

RowKind = Literal["step", "eval"]


@dataclass(frozen=True, slots=True)
class Row:
    """All metrics of one step, or of one evaluation (which may end steps after it began)."""

    step: int
    """Steps done; 0 only for the evaluation before the first."""
    version: int
    """The version committed after the step; the version an evaluation was pinned to."""
    wall_s: float
    """Since the run began, interruptions left out."""
    values: Mapping[str, float | None]
    """By declared name."""
    kind: RowKind = "step"

    def to_json(self) -> dict[str, Any]:
        """The flat form of a line."""
        head = {"kind": self.kind, "step": self.step, "version": self.version}
        return {**head, "wall_s": round(self.wall_s, 3), **self.values}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl that may still be written to; a torn last line is left out."""
    return [row for row, _ in iter_rows(path)]


def iter_rows(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Each whole line of a JSON-lines file as value and as bytes; nothing if there is no file.

    Raises:
        DataError: A line is no JSON object; names it.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}: line {number} is not JSON ({error})") from error
            if not isinstance(row, dict) or "step" not in row:
                raise DataError(f"{path}: line {number} is no row; must hold a step")
            yield row, line


def keep_rows_through(path: Path, step: int) -> dict[str, Any] | None:
    """Cut a JSON-lines file back to rows of steps up to `step`; the last one kept.

    A resumed run repeats the steps after its checkpoint: their rows, and a line torn by the
    crash, must not stay beside the new ones.
    """
    if not path.exists():
        return None
    kept = [(row, line) for row, line in iter_rows(path) if row["step"] <= step]
    shorter = path.with_name(path.name + ".partial")
    shorter.write_bytes(b"".join(line for _, line in kept))
    shorter.replace(path)
    return kept[-1][0] if kept else None
