"""Reward functions with the manners of rewards in the wild; the scoring processes import them."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def sleeper() -> list[str]:
    """Command of a child that outlives whoever does not end it; it names the pytest it is of."""
    return [sys.executable, "-c", "import time; time.sleep(600)", os.environ["TEST_RUN"]]


def length(task: Any, trajectory: Any, scale: float = 1.0) -> float:
    """Characters of the final text."""
    print("a reward may print")
    return scale * len(trajectory.final_text)


def as_said(task: Any, trajectory: Any) -> Any:
    """Does what the final text says."""
    said = trajectory.final_text
    if said == "hang":
        while True:
            pass
    if said == "child":
        subprocess.Popen(sleeper())
        time.sleep(600)
    if said == "escape":  # out of the process group, as does what is below it
        shell = ["sh", "-c", '"$@" & exec sleep 600', "sh", *sleeper()]
        subprocess.Popen(shell, start_new_session=True)
        time.sleep(600)
    if said == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if said == "exit":
        sys.exit(3)
    if said == "memory":
        return len(bytearray(4 * 2**30))
    if said == "raise":
        raise RuntimeError("judge\nunreachable")
    return None if said == "abstain" else {"reward": 1.0, "said": said}


def meets_workers(task: Any, trajectory: Any) -> float:
    """Waits until four processes are in the folder that the final text names."""
    folder = Path(trajectory.final_text)
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 4:
        time.sleep(0.01)
    return 1.0


async def meets_siblings(task: Any, trajectory: Any) -> float:
    """Waits, as for a judge's answer, until 16 siblings are being scored."""
    _inside.append(trajectory.final_text)
    while len(_inside) < 16:
        await asyncio.sleep(0.01)
    return float(trajectory.final_text)


_inside: list[str] = []


async def async_as_said(task: Any, trajectory: Any) -> float:
    """Waits for ever if it is told so."""
    await asyncio.sleep(600 if trajectory.final_text == "hang" else 0)
    return 1.0


def always_raises(task: Any, trajectory: Any) -> float:
    raise ValueError("no verdict today")


class _Unprepared:
    """Its weights are not there."""

    def prepare(self) -> None:
        raise OSError("no weights here")

    def __call__(self, task: Any, trajectory: Any) -> float:
        return 1.0


unprepared = _Unprepared()
