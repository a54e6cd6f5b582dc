"""`areal-ray serve` in a process of its own, with a Ray of its own, as a user starts it."""

import re
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command_line import ROOT, clean_environment, command

_PATIENCE_S = 200.0
_OURS = ("AREAL_RAY_API_KEY", "AREAL_RAY_ADMIN_KEY")


@dataclass
class Served:
    """A server that was started, and what it has said."""

    child: "subprocess.Popen[str]"
    folder: Path
    """Of its run."""
    lines: list[str] = field(default_factory=list)

    def told(self, name: str) -> str:
        """What follows a word at the beginning of a line, once it is there."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            said = "".join(self.lines)
            if found := re.search(rf"^{name} +(\S.*)$", said, re.MULTILINE):
                return found[1]
            assert self.child.poll() is None, said
            assert time.monotonic() < end, said
            time.sleep(0.1)

    def read(self) -> None:
        """Take in all that it says."""
        assert self.child.stdout is not None
        self.lines += self.child.stdout


@contextmanager
def serving(
    target: str, *words: str, fileroot: Path, name: str = "inference", **variables: str
) -> Iterator[Served]:
    """Serve a target with these words after it; killed at the end if it goes on.

    Args:
        target: A recipe file, or `inference`.
        words: Its model, and overrides.
        fileroot: Of the runs.
        name: Of the run.
        variables: Of the server's environment.
    """
    asked = ("serve", target, *words, f"cluster.fileroot={fileroot}")
    with commanded(*asked, folder=fileroot / name, **variables) as made:
        yield made


@contextmanager
def commanded(*words: str, folder: Path, **variables: str) -> Iterator[Served]:
    """A command of `areal-ray` that serves; killed at the end if it goes on.

    Args:
        words: Of the command.
        folder: Of its run.
        variables: Of its environment.
    """
    environment = {**clean_environment(), **variables}
    for variable in set(_OURS) - set(variables):
        environment.pop(variable, None)
    child = subprocess.Popen(
        command(*words),
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    made = Served(child, folder)
    reader = threading.Thread(target=made.read, daemon=True)
    reader.start()
    try:
        yield made
    finally:
        child.kill()
        reader.join(30)
