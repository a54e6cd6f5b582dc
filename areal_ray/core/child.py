"""Child processes that run a module of this package: their command line, and ending what they
started. Linux alone."""

import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_START = "import sys; sys.path[:0] = [sys.argv[1]]; from {} import main; main(sys.argv[2])"


def child_command(module: str, settings: Mapping[str, Any]) -> list[str]:
    """Have this interpreter call `main` of a module with the settings as JSON.

    The package is found wherever this process has it from; nothing else is looked for first.
    """
    home = str(Path(__file__).parents[2])
    return [sys.executable, "-c", _START.format(module), home, json.dumps(settings)]


def end_below(pid: int) -> None:
    """Kill all processes below one, also those that left its process group, but no daemon of
    theirs: that is below nobody. The process itself should stand still, or it may start more."""
    known: set[int] = set()
    while new := set(_below(pid)) - known:
        _signal(new, signal.SIGSTOP)  # first: what is killed would leave its children to nobody
        known |= new
    _signal(known, signal.SIGKILL)


def _below(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError, ValueError):  # it has just ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return children + [below for child in children for below in _below(child)]


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
