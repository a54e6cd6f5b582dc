"""The command line in a process of its own, as a user starts it."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_BY_A_SESSION = ("RAY_ADDRESS", "RAY_AUTH_MODE")


def command(*words: str) -> list[str]:
    """Words that start `areal-ray`."""
    return [sys.executable, "-m", "areal_ray.cli", *words]


def clean_environment() -> dict[str, str]:
    """Without the shared session of the other tests: each run here has a Ray of its own."""
    return {name: value for name, value in os.environ.items() if name not in LEFT_BY_A_SESSION}


def descendants(pid: int) -> set[int]:
    """All processes below one, by what /proc tells."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def is_alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
