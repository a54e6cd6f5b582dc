"""RunFolder: the folder of one run, held by one process at a time; and how to find a run again.

A lock that ends with its process tells whether a run is going on, also after a crash. A folder
that holds another run is never taken over silently: its checkpoints and rows would be taken for
the new run's.
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_ray.core.storage import replace_text, writing
from areal_ray.errors import RecipeError

RECIPE_FILE = "recipe.yaml"
"""The recipe as run."""
STATUS_FILE = "status.json"
"""What goes on: written about once a second by the run."""

_LOCK_FILE = ".lock"
_LOCK_S = 0.5
"""How long a folder that looks held is tried: whoever asks for its status holds it for less."""
_SUMMARY_FILE = "summary.json"
_TRACES = ("metrics.jsonl", "checkpoints/*", "journal/*")


class FolderInUse(RecipeError):
    """A run folder is held by a run that goes on."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What is known of a run from its folder."""

    name: str
    folder: Path
    is_running: bool
    status: Mapping[str, Any]
    """Last status.json; empty where the run never got so far."""


class RunFolder:
    """A run folder while this process holds it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._before: dict[Path, str | None] = {}

    @classmethod
    def hold(cls, path: Path) -> "RunFolder":
        """Make the folder where it is missing, and hold it; what is in it stays.

        Raises:
            FolderInUse: Another run holds it.
            RecipeError: It cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path)
        except OSError as error:
            raise RecipeError(
                f"cluster.fileroot: {path} cannot be written ({error.strerror}). "
                "Choose another folder."
            ) from error
        if lock is None:
            raise FolderInUse(_going_on(path))
        return cls(path, lock)

    @classmethod
    def claim(
        cls, path: Path, recipe_yaml: str, *, resume: bool = False, overwrite: bool = False
    ) -> "RunFolder":
        """`hold` and `begin`."""
        folder = cls.hold(path)
        folder.begin(recipe_yaml, resume=resume, overwrite=overwrite)
        return folder

    def begin(self, recipe_yaml: str, *, resume: bool = False, overwrite: bool = False) -> None:
        """Make it the folder of a run, and save the recipe in it; let go of it on failure.

        Args:
            recipe_yaml: The recipe as run.
            resume: Go on with the run that is there.
            overwrite: Delete the run that is there.

        Raises:
            RecipeError: It holds another run or foreign files.
        """
        try:
            problem = None if resume else conflict(self.path, overwrite=overwrite)
            if problem is not None:
                raise RecipeError(problem)
            with writing(self.path):
                if resume:  # its summary is of an earlier end
                    told = [self.path / RECIPE_FILE, self.path / _SUMMARY_FILE]
                    self._before = {path: _text(path) for path in told}
                    (self.path / _SUMMARY_FILE).unlink(missing_ok=True)
                else:
                    _empty(self.path)
            replace_text(self.path / RECIPE_FILE, recipe_yaml)
        except BaseException:
            self.release()
            raise

    def put_back(self) -> None:
        """Undo a `begin` that goes on with a run: it could not go on so, and is as it was."""
        for path, text in self._before.items():
            if text is None:
                path.unlink(missing_ok=True)
            else:
                replace_text(path, text)

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace status.json; a reader sees the old or the new one, whole."""
        replace_text(self.path / STATUS_FILE, json.dumps({**status, "written_at_s": time.time()}))

    def release(self) -> None:
        """Let go of the folder; the run is over."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def conflict(path: Path, *, overwrite: bool = False) -> str | None:
    """Why a new run may not start in this folder, whoever holds it; None where it may."""
    if not path.is_dir():
        return f"name: {path} is a file; must be a folder." if path.exists() else None
    names = {entry.name for entry in path.iterdir()} - {_LOCK_FILE}
    if names and RECIPE_FILE not in names:
        return (
            f"name: {path} is not empty and holds no run; a run would mix with what is there. "
            "Choose another name or cluster.fileroot."
        )
    if not overwrite and _has_begun(path):
        return (
            f"name: {path} holds another run. `areal-ray resume {path}` goes on with it, "
            "name=OTHER starts beside it, --overwrite deletes it."
        )
    return None


def _has_begun(path: Path) -> bool:
    """Whether a run left anything behind: one that failed before its first step did not."""
    if any(trace.is_dir() or trace.stat().st_size for name in _TRACES for trace in path.glob(name)):
        return True
    try:
        summary = json.loads((path / _SUMMARY_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return not isinstance(summary, dict) or bool(summary.get("steps", 1))


def in_use(path: Path) -> str | None:
    """Why no run may start or go on in this folder now; None where none is going on."""
    return _going_on(path) if _is_held(path / _LOCK_FILE) else None


def _going_on(path: Path) -> str:
    return (
        f"name: the run in {path} is going on in another process; a folder holds one run. "
        "Stop it, or choose another name."
    )


def find_run(run: str, fileroot: Path | str = "runs") -> Path:
    """The folder of a run, given its folder or its name.

    Raises:
        RecipeError: no such run; names those there are.
    """
    for folder in (Path(run), Path(fileroot) / run):
        if (folder / RECIPE_FILE).is_file():
            return folder
    known = ", ".join(path.name for path in run_folders(fileroot)[:8])
    raise RecipeError(
        f"run {run!r}: neither a run folder nor a run in {fileroot}/. "
        + (f"There are: {known}." if known else "There are none yet.")
    )


def run_folders(fileroot: Path | str) -> list[Path]:
    """Run folders, the newest first."""
    recipes = list(Path(fileroot).glob(f"*/{RECIPE_FILE}"))
    return [path.parent for path in sorted(recipes, key=lambda path: -path.stat().st_mtime)]


def read_status(folder: Path) -> RunStatus:
    """What is known of a run, also while it runs and after it was killed."""
    status: dict[str, Any] = {}
    with contextlib.suppress(OSError, json.JSONDecodeError):
        status = json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))
    return RunStatus(folder.name, folder, _is_held(folder / _LOCK_FILE), status)


def _is_held(lock_file: Path) -> bool:
    """Whether a process holds the folder. Changes nothing there, also where it may not write."""
    try:
        lock = os.open(lock_file, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared and for a moment: readers do not see each other, and _lock tries again.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def _lock(path: Path) -> int | None:
    """A lock that ends with this process; None where another process has it."""
    lock = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    end = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(lock)
                return None
            time.sleep(_LOCK_S / 50)
        else:
            return lock


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        if entry.name == _LOCK_FILE:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
