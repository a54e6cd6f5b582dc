"""Runs the function of `model.create` in a process of its own, which a stop can end.

Such a function may download or train for minutes, start programs of its own, and load what the
driver has no other use for. It writes into a folder beside the wanted one, renamed once it is
whole: a run that was killed leaves no half a model, and of two that make the same one the later
uses the earlier's.

make_apart waits for the function; not bounded, since only it knows how long that takes, but `check`
is asked all the while.
"""

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from areal_ray.core.child import child_command
from areal_ray.core.imports import resolve
from areal_ray.errors import ArealRayError, RecipeError

_STOPS = (signal.SIGINT, signal.SIGTERM)
_POLL_S = 0.2
_GRACE_S = 2.0


def is_made(folder: Path) -> bool:
    """Whether a checkpoint is there."""
    return (folder / "config.json").is_file()


def check_function(reference: str, search: Sequence[Path]) -> None:
    """Refuse what cannot be called with (folder, seed).

    Raises:
        RecipeError: There is no such function, or it takes other arguments.
    """
    function = resolve(reference, search, where="model.create")
    try:
        inspect.signature(function).bind(Path(), 0)
    except TypeError as error:
        raise RecipeError(
            f"model.create: {reference} must take (folder, seed): {error}."
        ) from error


def make_apart(
    reference: str, folder: Path, seed: int, *, search: Sequence[Path], check: Callable[[], None]
) -> None:
    """Call the function in a child process and put what it wrote in place.

    Args:
        reference: `package.module:name`.
        folder: Where the checkpoint must be in the end.
        seed: For the function.
        search: Import roots.
        check: Called while it works; what it raises ends it.

    Raises:
        RecipeError: It raised, died, or left no checkpoint.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as beside:
        made = Path(beside, folder.name)
        made.mkdir()
        _call_in_child(reference, made.resolve(), seed, search, check)
        if not is_made(made):
            raise RecipeError(
                f"model.create: {reference} wrote no Hugging Face checkpoint into the folder it "
                "was given (no config.json)."
            )
        try:
            made.replace(folder)
        except OSError:
            if not is_made(folder):  # another run was faster, and made the same
                raise


def _call_in_child(
    reference: str, folder: Path, seed: int, search: Sequence[Path], check: Callable[[], None]
) -> None:
    told = folder.with_name("told")
    settings = {
        "create": reference,
        "folder": str(folder),
        "seed": seed,
        "search": [str(root) for root in search],
        "told": str(told),
    }
    child = subprocess.Popen(
        child_command("areal_ray.model_function", settings),
        stdin=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
                break
            check()
    finally:
        _end(child)
    if child.returncode or not told.exists():
        reason = told.read_text(encoding="utf-8") if told.exists() else ""
        raise RecipeError(
            f"model.create: {reference} failed: {reason or _how_it_ended(child.returncode)}"
        )


def _end(child: "subprocess.Popen[bytes]") -> None:
    """End the child and all that it started."""
    for ask in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, ask)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
            return


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code}"


def main(settings: str) -> None:
    """The child: call the function, and write down what it raised.

    Args:
        settings: JSON with create, folder, seed, search and told, the file to write to.
    """
    # The command line blocks them for itself, and a child inherits that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    asked = json.loads(settings)
    told = Path(asked["told"])
    try:
        function = resolve(asked["create"], asked["search"], where="model.create")
        function(Path(asked["folder"]), asked["seed"])
    except ArealRayError as error:
        reason = str(error)
    except Exception as error:  # a recipe's own code may raise anything
        reason = f"{type(error).__name__}: {error}"
    else:
        told.write_text("", encoding="utf-8")
        return
    told.write_text(reason, encoding="utf-8")
    sys.exit(1)
