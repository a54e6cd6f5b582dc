"""The child process that runs reward functions; the parent side is `runner.py`.

Started by the runner, told what to import on its command line. It reads frames from standard input
(pickled tasks and encoded groups: the parent is trusted). Each verdict is written at once to a file
that the two share, which wakes nobody; a frame on a pipe tells the parent when all are there. Both
carry JSON, so that nothing the reward leaves behind is ever unpickled. What the reward prints goes
to standard error.
"""

import asyncio
import inspect
import json
import os
import pickle
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, BinaryIO

from areal_ray.core.child import end_below
from areal_ray.core.imports import resolve
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Trajectory, decode_group
from areal_ray.errors import ArealRayError
from areal_ray.rewards.reward import Scored, read_returned

FRAME = struct.Struct("<I")
_REASON_CHARACTERS = 300
_PARENT_LOOK_S = 1.0


def main(settings: str) -> None:
    """Serve until standard input closes.

    Args:
        settings: JSON with score, args, search, timeout_s, memory_bytes and verdicts, the number
            of the shared file.
    """
    asked = json.loads(settings)
    incoming, outgoing = _claim_pipes()
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    try:
        reward = resolve(asked["score"], asked["search"], where="reward.score")
        if hasattr(reward, "prepare"):
            reward.prepare(**asked["args"])
    except ArealRayError as error:
        _send(outgoing, {"error": str(error)})
        return
    except (Exception, SystemExit) as error:  # the reward's own code
        told = f"{type(error).__name__}: {error}"
        _send(outgoing, {"error": f"reward.score: preparing {asked['score']} raised {told}"})
        return
    if asked["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (asked["memory_bytes"], asked["memory_bytes"]))
    is_async = inspect.iscoroutinefunction(reward)
    _send(outgoing, {"ready": True, "is_async": is_async})
    os.set_inheritable(asked["verdicts"], False)  # what the reward starts has no business there
    while (frame := _receive(incoming)) is not None:
        verdicts = _Verdicts(asked["verdicts"])
        for task, payload in pickle.loads(frame):
            trajectories = decode_group(payload).trajectories
            call = _caller(reward, task, asked["args"])
            if is_async:
                asyncio.run(_score_together(call, trajectories, asked["timeout_s"], verdicts))
            else:
                for index, trajectory in enumerate(trajectories):
                    started = time.monotonic()
                    verdicts.add(index, _score_one(call, trajectory), started)
            verdicts.first += len(trajectories)
        _send(outgoing, {})


class _Verdicts:
    """The verdicts on one frame, a line each, in the file shared with the parent."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._end = 0
        self.first = 0
        """Place in the frame of the group's first episode."""

    def add(self, index: int, scored: Scored, started: float) -> None:
        """The verdict on an episode of the group, begun at `started`."""
        now = time.monotonic()
        verdict = (scored.reward, scored.reason, scored.details, now - started)
        line = json.dumps((self.first + index, now, verdict)).encode() + b"\n"
        self._end += os.pwrite(self._file, line, self._end)


def _caller(reward: Any, task: Task, args: dict[str, Any]) -> Callable[[Trajectory], Any]:
    return lambda trajectory: reward(task, trajectory, **args)


def _score_one(call: Callable[[Trajectory], Any], trajectory: Trajectory) -> Scored:
    try:
        returned = call(trajectory)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_await(returned))
        return read_returned(returned)
    except (Exception, SystemExit) as error:  # user code: its failure is data
        return Scored(None, _reason(error))


async def _score_together(
    call: Callable[[Trajectory], Any],
    trajectories: Sequence[Trajectory],
    timeout_s: float,
    verdicts: _Verdicts,
) -> None:
    async def one(index: int, trajectory: Trajectory) -> None:
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s) as limit:
                scored = read_returned(await call(trajectory))
        except (Exception, SystemExit) as error:  # user code: its failure is data
            overran = f"the reward exceeded {timeout_s:g} s"
            scored = Scored(None, overran if limit.expired() else _reason(error))
        verdicts.add(index, scored, started)

    await asyncio.gather(*(one(i, trajectory) for i, trajectory in enumerate(trajectories)))


async def _await(returned: Awaitable[Any]) -> Any:
    return await returned


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "the reward ran out of memory (reward.memory_bytes)"
    text = " ".join(f"the reward raised {type(error).__name__}: {error}".split())
    return text[:_REASON_CHARACTERS]


def _claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the two pipes for frames alone; prints and reads of user code go elsewhere."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb")


def _die_with(parent: int) -> None:
    """End this process and all it started once its parent is gone, whatever it is doing."""
    while os.getppid() == parent:
        time.sleep(_PARENT_LOOK_S)
    end_below(os.getpid())
    os.killpg(0, signal.SIGKILL)


def _send(pipe: BinaryIO, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    pipe.write(FRAME.pack(len(body)) + body)
    pipe.flush()


def _receive(pipe: BinaryIO) -> bytes | None:
    header = pipe.read(FRAME.size)
    if len(header) < FRAME.size:
        return None
    (length,) = FRAME.unpack(header)
    body = pipe.read(length)
    return body if len(body) == length else None


if __name__ == "__main__":
    main(sys.argv[1])
