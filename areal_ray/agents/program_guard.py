"""Runs one program in a folder of its own and ends it with all that it started.

A script without imports of ours, so that it starts in hundredths of a second; `program.py` starts
one for each episode. It is the *subreaper* of what it runs: a descendant that leaves the program's
session, or whose parent ends, becomes the guard's child, and so is found and killed with the rest.

On standard input come one line of JSON (`_Asked`), and after it nothing: when that pipe closes,
because the caller has had enough or is gone, the program is ended. On standard output goes one
line of JSON, what became of it. Linux alone.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TypedDict

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
_LOOK_S = 0.1
_KILL_S = 5.0
"""For processes that were killed to be gone; one may hang in the kernel."""
_PIECE = 1 << 16
_TAIL_BYTES = 8192
_SPARE_BYTES = 1 << 30
_MOST_PROCESSES = 512
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _Asked(TypedDict):
    command: list[str]
    environment: dict[str, str]
    folder: str
    """Made for the program, and removed with all in it."""
    files: dict[str, str]
    """Written there before it starts: name -> text."""
    standard_input: str
    """Name of one of these."""
    max_output_bytes: int
    max_memory_bytes: int
    grace_s: float
    """Between SIGTERM and SIGKILL where it has to be ended."""


def main() -> None:
    """Run what standard input asks for, and tell its end on standard output."""
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the caller closes the pipe instead
    asked: _Asked = json.loads(sys.stdin.buffer.readline())
    folder = asked["folder"]
    os.makedirs(folder, mode=0o700)
    try:
        for name, text in asked["files"].items():
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)
        told = _Program(asked).run()
    finally:
        _remove(folder)
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


class _Program:
    """The program while it runs."""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked
        self._tails = {"output": b"", "errors": b""}
        self._pipes: dict[int, str] = {}
        self._num_bytes = 0
        self._peak_bytes = 0
        self._look_at_s = 0.0
        self._ended_for = ""
        self._status: int | None = None

    def run(self) -> dict[str, Any]:
        """From its start until nothing of it is left."""
        self._pid, refused = self._start()
        if not refused:
            self._watch()
        self._read_all()
        self._end_all()
        exit_code = None if self._status is None else os.waitstatus_to_exitcode(self._status)
        return {
            "exit_code": exit_code,
            "refused": refused,
            "ended_for": self._ended_for,
            "peak_memory_bytes": self._peak_bytes,
            **{name: tail.decode("utf-8", "replace") for name, tail in self._tails.items()},
        }

    def _start(self) -> tuple[int, str]:
        """Its pid, and why it could not be executed."""
        ends = {name: os.pipe() for name in self._tails}
        verdict, telling = os.pipe()  # closes by itself where the program is executed
        pid = os.fork()
        if not pid:
            self._become(ends["output"][1], ends["errors"][1], telling)
        os.close(telling)
        for name, (reading, writing) in ends.items():
            os.close(writing)
            os.set_blocking(reading, False)
            self._pipes[reading] = name
        with open(verdict, "rb") as pipe:
            return pid, pipe.read().decode("utf-8", "replace")

    def _become(self, output: int, errors: int, telling: int) -> None:
        """In the child: turn into the program."""
        asked = self._asked
        try:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.chdir(asked["folder"])
            given = os.open(asked["standard_input"], os.O_RDONLY)
            for ours, theirs in ((given, 0), (output, 1), (errors, 2)):
                os.dup2(ours, theirs)
            # What the watch is too slow for. Address space would say nothing: node reserves much.
            most = asked["max_memory_bytes"] + _SPARE_BYTES
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            command = asked["command"]
            os.execvpe(command[0], command, asked["environment"])
        except (OSError, ValueError) as error:
            os.write(telling, (getattr(error, "strerror", "") or str(error)).encode())
        finally:
            os._exit(127)

    def _watch(self) -> None:
        """Until the program ends, or has to be ended."""
        poll = select.poll()
        ended = os.pidfd_open(self._pid)
        for file in (0, ended, *self._pipes):
            poll.register(file, select.POLLIN)
        while not self._ended_for:
            ready = {file for file, _ in poll.poll(_LOOK_S * 1000)}
            if 0 in ready and not os.read(0, _PIECE):
                self._ended_for = "asked"
            for file in ready & set(self._pipes):
                if not self._read(file):
                    poll.unregister(file)
                    os.close(file)
                    del self._pipes[file]
            if ended in ready:
                break
            self._check_memory()
        os.close(ended)

    def _read(self, file: int) -> bool:
        """Take what is there; whether more may come."""
        try:
            piece = os.read(file, _PIECE)
        except BlockingIOError:
            return True
        name = self._pipes[file]
        self._tails[name] = (self._tails[name] + piece)[-_TAIL_BYTES:]
        self._num_bytes += len(piece)
        if self._num_bytes > self._asked["max_output_bytes"]:
            self._ended_for = "output"
        return bool(piece)

    def _read_all(self) -> None:
        """The rest of what was written; who still holds a pipe open is not waited for."""
        for file in list(self._pipes):
            left = _TAIL_BYTES * 16  # what a pipe holds at most
            while left > 0 and not self._ended_for and self._read_some(file):
                left -= _PIECE
            os.close(file)
        self._pipes.clear()

    def _read_some(self, file: int) -> bool:
        ready, _, _ = select.select([file], [], [], 0)
        return bool(ready) and self._read(file)

    def _check_memory(self) -> None:
        if time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + _LOOK_S
        alive = descendants()
        used = sum(map(_resident_bytes, alive))
        self._peak_bytes = max(self._peak_bytes, used)
        if used > self._asked["max_memory_bytes"]:
            self._ended_for = "memory"
        elif len(alive) > _MOST_PROCESSES:
            self._ended_for = "processes"

    def _end_all(self) -> None:
        """Kill what is left: politely where that may help, then all there is."""
        self._reap()
        if self._ended_for == "asked" and self._status is None:
            _quietly(os.killpg, self._pid, signal.SIGTERM)
            end = time.monotonic() + self._asked["grace_s"]
            while self._status is None and time.monotonic() < end:
                time.sleep(0.02)
                self._reap()
        end = time.monotonic() + _KILL_S
        while (alive := descendants()) and time.monotonic() < end:
            for pid in alive:
                _quietly(os.kill, pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.002)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid == self._pid:
                self._status = status


def descendants() -> list[int]:
    """All processes below this one that still run, zombies not counted."""
    found: list[int] = []
    parents = [os.getpid()]
    while parents:
        children = [child for parent in parents for child in _children(parent)]
        found += [pid for pid in children if not _is_zombie(pid)]
        parents = children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except (OSError, ValueError):  # it has just ended
        pass
    return found


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except (OSError, IndexError):
        return True


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _remove(folder: str) -> None:
    """The folder with all in it, as far as it lets itself be removed."""
    _quietly(os.chmod, folder, 0o700)
    for above, folders, files in os.walk(folder):
        for name in files:
            _quietly(os.unlink, os.path.join(above, name))
        for name in folders:  # a link to a folder stands among them
            path = os.path.join(above, name)
            _quietly(os.unlink if os.path.islink(path) else _open_up, path)
    for above, _, _ in os.walk(folder, topdown=False):
        _quietly(os.rmdir, above)


def _open_up(path: str) -> None:
    os.chmod(path, 0o700)


def _quietly(call: Callable[..., object], *arguments: Any) -> None:
    with contextlib.suppress(OSError):
        call(*arguments)


if __name__ == "__main__":
    main()
