"""Command lines of the product in processes of their own, and what they leave behind."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.whole_runs import ROOT

BIN = Path(sys.executable).parent


def environment(**more: str) -> dict[str, str]:
    """Of a shell that knows of no Ray."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")}
    return {**clean, "OMP_NUM_THREADS": "1", **more}


def start(*words: str, **more: str) -> subprocess.Popen[str]:
    """A program of the environment, such as `areal-ray` or `ray`; `more` are variables of its."""
    program, *rest = words
    return subprocess.Popen(
        [str(BIN / program), *rest],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**more),
    )


def descendants(pid: int) -> set[int]:
    """Processes below one, by the kernel's account."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(stat[1])
    found = {pid}
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        grown = bool(more)
        found |= more
    return found - {pid}


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie does not."""
    running = set()
    for pid in pids:
        with suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state not in ("Z", "X"):
                running.add(pid)
    return running


def naming(text: str) -> set[int]:
    """Processes whose command line has the text in it."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if text in (entry / "cmdline").read_bytes().decode(errors="replace"):
                    found.add(int(entry.name))
    return found
