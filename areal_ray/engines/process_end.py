"""How a process of an engine's ended, and what it said last: for the run that has to be told."""

import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent

_READ_BYTES = 16384
_TOLD_LINES = 12
_LINE_CHARS = 300
_SHELL_SIGNALS = 128
"""Shells, and the guard of an SGLang server, add it to the signal that ended a process."""


class OomWatch:
    """Counts what the kernel kills on this machine for want of memory, from now on."""

    def __init__(self) -> None:
        self._before = _oom_kills()

    def told(self) -> str:
        """Empty where nothing was killed so."""
        count = _oom_kills() - self._before
        if not count:
            return ""
        return (
            f"; the kernel's out-of-memory killer has ended {count} process(es) on this machine "
            "since it started"
        )


def ended_how(code: int | None) -> str:
    """What an exit code says, as the rest of a sentence; negative ones are signals."""
    if code is None:
        return "ended"
    number = -code if code < 0 else code - _SHELL_SIGNALS
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with code {code}"
    return f"ended with code {code} ({name})"


def own_output() -> list[Path]:
    """The files that this process, and those it starts, write to as stdout and stderr."""
    found: list[Path] = []
    for descriptor in (1, 2):
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        if path.is_file() and path not in found:
            found.append(path)
    return found


def output_sizes(paths: Iterable[Path]) -> dict[Path, int]:
    """How far each file goes now, in bytes."""
    return {path: path.stat().st_size for path in paths}


def last_lines(path: Path, since_bytes: int = 0) -> str:
    """The last lines of a file after its first `since_bytes`, without colours; empty if none."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(since_bytes, end - _READ_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.rstrip()[:_LINE_CHARS] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_TOLD_LINES:])


def words_from(sizes: dict[Path, int]) -> str:
    """Under its file's name, the last that each file says after the given size."""
    told = [(path, last_lines(path, size)) for path, size in sizes.items()]
    parts = [f"The last lines of {path}:\n{indent(lines, '  ')}" for path, lines in told if lines]
    return "\n".join(parts) or f"Nothing stands in {', '.join(map(str, sizes)) or 'a log'}."


def _oom_kills() -> int:
    try:
        text = Path("/proc/vmstat").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0
