"""Checkpoints: numbered folders of a run, each complete or not there.

A checkpoint is written into a hidden folder beside the others, flushed to disk and renamed; only
then is an older one removed. So a crash at any moment leaves the newest complete one usable, and
`latest` finds it whatever else lies around. Plain files: what is inside is the caller's.
One process writes at a time (the run folder is locked); any may read.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from areal_ray.core.config import Config
from areal_ray.core.storage import writing

STATE_FILE = "run_state.json"
"""What the driver goes on from: step, version, task cursor, counters, seeds."""

STATE_FORMAT = 2
"""Of that file; raised when a run needs what an earlier one did not write."""

_LIST_FILE = "complete.json"
"""Name and size of every file; written last, so a folder with it was finished."""
_POINTER_FILE = "latest"
_PREFIX = "step-"
_WRITING = ".writing-"
_REMOVING = ".removing-"


class CheckpointConfig(Config):
    """When a run saves what it needs to go on, and how much of that it keeps."""

    every_steps: int | None = Field(20, ge=1)
    """Steps between two checkpoints; null = only at the end."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay; an older one goes when a newer is complete."""

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after `step` steps."""
        return self.every_steps is not None and step > 0 and step % self.every_steps == 0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One complete checkpoint."""

    step: int
    folder: Path
    state: dict[str, Any]
    """The driver's `run_state.json`."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search for the newest checkpoint came to."""

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...] = ()
    """One line for each newer one that cannot be used, newest first."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """Start nothing.

        Args:
            folder: Holds them all; made when the first is written.
            keep: Newest complete ones that stay.
        """
        self._folder = folder
        self._keep = keep

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of `step` into; `commit` makes it count."""
        draft = self._folder / f"{_WRITING}{step:06d}"
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            draft.mkdir()
        return draft

    def commit(self, step: int, state: Mapping[str, Any]) -> Checkpoint:
        """Add `state` to what was written since `begin(step)`, and make it the newest checkpoint.

        Older ones beyond `keep` are removed after that.

        Raises:
            StorageError: The disk did not take it; the previous checkpoints are untouched.
            ValueError: `state` is not JSON (NaN and infinities are not).
        """
        draft, final = self._folder / f"{_WRITING}{step:06d}", self._path(step)
        text = json.dumps(state, indent=1, allow_nan=False)
        with writing(draft):
            (draft / STATE_FILE).write_text(text, encoding="utf-8")
            _write_list(draft)
            for path in [*draft.rglob("*"), draft]:
                _flush(path)
            if final.exists():  # a run that went back to an earlier step comes by again
                final.rename(self._folder / f"{_REMOVING}{final.name}")
            draft.rename(final)
            _flush(self._folder)
            self._point_to(final)
            self._remove_old()
        return Checkpoint(step, final, json.loads(text))

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint of `step` lies, if there is one."""
        return self._path(step)

    def steps(self) -> list[int]:
        """Of all folders there are, complete or not; the newest first."""
        return [step for step, _ in self._newest_first()]

    def remove(self, step: int) -> None:
        """Remove the checkpoint of `step`."""
        final = self._path(step)
        with writing(self._folder):
            final.rename(self._folder / f"{_REMOVING}{final.name}")
            self._sweep()

    def latest(self) -> Found:
        """The newest complete checkpoint, by number, and why newer ones were passed over."""
        skipped: list[str] = []
        for step, folder in self._newest_first():
            problem = _problem(folder)
            if problem is None:
                state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
                return Found(Checkpoint(step, folder, state), tuple(skipped))
            skipped.append(f"{folder}: {problem}; taking the one before it")
        return Found(None, tuple(skipped))

    def _path(self, step: int) -> Path:
        return self._folder / f"{_PREFIX}{step:06d}"

    def _newest_first(self) -> list[tuple[int, Path]]:
        if not self._folder.is_dir():
            return []
        numbered = []
        for folder in self._folder.iterdir():
            number = folder.name.removeprefix(_PREFIX)
            if folder.is_dir() and number != folder.name and number.isdecimal():
                numbered.append((int(number), folder))
        return sorted(numbered, reverse=True)

    def _point_to(self, final: Path) -> None:
        """Leave the newest one's name in a file, for people and scripts."""
        draft = self._folder / f"{_WRITING}{_POINTER_FILE}"
        draft.write_text(final.name + "\n", encoding="utf-8")
        _flush(draft)
        draft.rename(self._folder / _POINTER_FILE)

    def _remove_old(self) -> None:
        complete = [folder for _, folder in self._newest_first() if _problem(folder) is None]
        for folder in complete[self._keep :]:
            # Renamed first: a half-removed folder must not look like a checkpoint.
            folder.rename(self._folder / f"{_REMOVING}{folder.name}")
        self._sweep()

    def _sweep(self) -> None:
        """Remove what an earlier process left unfinished."""
        for path in list(self._folder.iterdir()):
            if path.name.startswith((_WRITING, _REMOVING)):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def _write_list(folder: Path) -> None:
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / _LIST_FILE).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


def _problem(folder: Path) -> str | None:
    """Why a folder is not a complete checkpoint; None if it is one."""
    try:
        sizes = json.loads((folder / _LIST_FILE).read_text(encoding="utf-8"))
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing, so it was not finished"
    except ValueError as error:
        return f"its {STATE_FILE} or {_LIST_FILE} is broken ({error})"
    if not isinstance(sizes, dict) or not isinstance(state, dict):
        return f"its {STATE_FILE} or {_LIST_FILE} is broken (no JSON object)"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
