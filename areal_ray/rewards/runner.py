"""Scores episodes in killable child processes; the child side is `worker.py`.

A reward that hangs, dies or eats memory costs its own episode, never the actor: the child's whole
process group is killed and a new child takes over the rest.

Verdicts come one by one through a file that parent and child share, which costs neither a wake-up;
the parent looks there when the child says it is done, is gone, or has had the time of one episode.

score() waits for: a free child, then its answer; bounded by `timeout_s` an episode.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from areal_ray.core.child import child_command, end_below
from areal_ray.core.task import UNSENDABLE, Task, sending_problem
from areal_ray.core.trajectory import Group, Trajectory, encode_group
from areal_ray.errors import DataError, DeadlineExceeded, RecipeError
from areal_ray.rewards.reward import RewardConfig, Scored
from areal_ray.rewards.worker import FRAME

_QUICK_S = 0.02
"""An episode scored faster than this is not worth a child of its own."""
_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class Asked:
    """Episodes of one group to score."""

    task: Task
    trajectories: Sequence[Trajectory]
    encoded: bytes | None = None
    """The same as a group's payload, where the caller has it already."""


@dataclass(slots=True, eq=False)
class _Child:
    running: asyncio.subprocess.Process
    verdicts: IO[bytes]
    """The file that it writes verdicts to."""
    is_async: bool = False
    taken: int = 0
    """Bytes of the file that were read."""

    @property
    def is_gone(self) -> bool:
        """Whether its pipe is closed, as far as the event loop has seen."""
        assert self.running.stdin is not None
        return self.running.stdin.is_closing()

    async def send(self, frame: bytes) -> None:
        """Hand it a frame.

        Raises:
            ConnectionError: It is gone.
        """
        assert self.running.stdin is not None
        if self.is_gone:  # uvloop would raise a RuntimeError
            raise ConnectionResetError("the scoring process is gone")
        self.running.stdin.write(FRAME.pack(len(frame)) + frame)
        await self.running.stdin.drain()

    def begin(self) -> None:
        """Empty the file for the next frame."""
        os.ftruncate(self.verdicts.fileno(), 0)
        self.taken = 0

    def new_verdicts(self) -> list[tuple[int, float, list[Any]]]:
        """(index in the frame, when, reward, reason, details and seconds) since the last look."""
        file = self.verdicts.fileno()
        lines = os.pread(file, os.fstat(file).st_size - self.taken, self.taken)
        whole = lines[: lines.rfind(b"\n") + 1]
        self.taken += len(whole)
        told: list[Any] = json.loads(b"[" + whole[:-1].replace(b"\n", b",") + b"]")
        return told


def _open_shared_file() -> IO[bytes]:
    """A nameless file, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("verdicts"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


_Place = tuple[int, int]
"""(group, trajectory) among those asked for."""


def _frame(asked: Sequence[Asked], mine: Sequence[_Place]) -> bytes:
    """What a child is sent.

    Raises:
        DataError: A task cannot travel; names it.
    """
    parts = _parts(asked, mine)
    try:
        return pickle.dumps(parts)
    except UNSENDABLE as error:
        told = sending_problem(task for task, _ in parts)
        if told is None:
            raise
        raise DataError(told) from error


def _parts(asked: Sequence[Asked], mine: Sequence[_Place]) -> list[tuple[Task, bytes]]:
    """The task of each group and the episodes of it that are chosen."""
    parts = []
    for group, places in itertools.groupby(mine, key=lambda place: place[0]):
        one = asked[group]
        chosen = tuple(one.trajectories[i] for _, i in places)
        payload = one.encoded if len(chosen) == len(one.trajectories) else None
        parts.append((one.task, payload or encode_group(Group("", one.task.id, chosen))))
    return parts


class RewardRunner:
    """A pool of scoring processes for one reward function.

    Args:
        config: Reward and limits.
        search: Import roots for the reward's code.
    """

    def __init__(self, config: RewardConfig, search: Sequence[Path | str] = ()) -> None:
        self._config = config
        self._settings = {
            "score": config.score,
            "args": config.args,
            "search": [str(root) for root in search],
            "timeout_s": config.timeout_s,
            "memory_bytes": config.memory_bytes,
        }
        self._idle: list[_Child] = []
        self._seats = asyncio.Semaphore(config.workers)
        self._alive: set[_Child] = set()
        self._seconds: float | None = None  # of one episode, lately
        self.num_killed = 0
        """Children that had to be ended."""

    async def start(self) -> None:
        """Start one child, to learn early that the reward cannot be imported.

        Raises:
            RecipeError: It cannot.
        """
        if not self._alive:
            self._idle.append(await self._spawn())

    async def score(
        self, task: Task, trajectories: Sequence[Trajectory], encoded: bytes | None = None
    ) -> list[Scored]:
        """`score_groups` for one."""
        return (await self.score_groups([Asked(task, trajectories, encoded)]))[0]

    async def score_groups(self, asked: Sequence[Asked]) -> list[list[Scored]]:
        """One verdict a trajectory, in order; never raises for what the reward does.

        Where the reward is quick, one child takes all groups at once.
        """
        batches = [asked] if self.is_quick else [[one] for one in asked]
        told = await asyncio.gather(*(self._score_batch(batch) for batch in batches))
        return [verdicts for batch in told for verdicts in batch]

    @property
    def is_quick(self) -> bool:
        """Whether an episode takes so little that what surrounds it matters more."""
        return self._seconds is not None and self._seconds < _QUICK_S

    async def _score_batch(self, asked: Sequence[Asked]) -> list[list[Scored]]:
        places = [(g, i) for g, one in enumerate(asked) for i in range(len(one.trajectories))]
        verdicts: dict[_Place, Scored] = {}
        waiting = deque(places)
        lanes = 1 if self.is_quick else self._config.workers
        share = max(1, -(-len(places) // lanes))

        async def work() -> None:
            while waiting:
                async with self._seats:
                    mine = [waiting.popleft() for _ in range(min(share, len(waiting)))]
                    if mine:
                        frame = _frame(asked, mine)
                        left = await self._score_share(frame, mine, verdicts)
                        waiting.extendleft(reversed(left))

        num_lanes = -(-len(places) // share) if places else 0
        await asyncio.gather(*(work() for _ in range(min(num_lanes, self._config.workers))))
        missing = Scored(None, "was not scored")
        return [
            [verdicts.get((g, i), missing) for i in range(len(one.trajectories))]
            for g, one in enumerate(asked)
        ]

    async def close(self) -> None:
        """End all children and whatever they started."""
        for child in list(self._alive):
            await self._kill(child)
        self._idle.clear()

    async def _score_share(
        self, frame: bytes, mine: Sequence[_Place], verdicts: dict[_Place, Scored]
    ) -> list[_Place]:
        """Fill in verdicts; the episodes still to do when the child had to be killed."""
        child = await self._free_child()
        child.begin()
        try:
            await child.send(frame)
            await self._await_verdicts(child, mine, verdicts)
        except (TimeoutError, EOFError, ConnectionError) as error:
            self._take(child, mine, verdicts)
            reason = await self._reason_of_end(child, error)
            left = [place for place in mine if place not in verdicts]
            # Together, nobody can tell which of a group's episodes held up the others.
            culprits = [p for p in left if child.is_async and p[0] == left[0][0]] or left[:1]
            seconds = self._config.timeout_s if isinstance(error, TimeoutError) else 0.0
            for place in culprits:
                verdicts[place] = Scored(None, reason, seconds=seconds)
            return [place for place in left if place not in culprits]
        except BaseException:  # cancelled: the child is in the middle of something
            await self._kill(child)
            raise
        self._idle.append(child)
        return []

    async def _await_verdicts(
        self, child: _Child, mine: Sequence[_Place], verdicts: dict[_Place, Scored]
    ) -> None:
        """Until the child says it is done.

        Raises:
            TimeoutError: One episode has taken longer than it may.
            EOFError: The child is gone.
        """
        limit_s = self._config.timeout_s + _GRACE_S * child.is_async
        deadline = time.monotonic() + limit_s  # the clock of asyncio's loop, and of the child
        done = asyncio.ensure_future(self._receive(child))
        try:
            while not (await asyncio.wait({done}, timeout=deadline - time.monotonic()))[0]:
                latest = self._take(child, mine, verdicts)
                if latest + limit_s <= deadline:
                    raise TimeoutError
                deadline = latest + limit_s
            await done
        finally:
            done.cancel()
        self._take(child, mine, verdicts)

    def _take(self, child: _Child, mine: Sequence[_Place], verdicts: dict[_Place, Scored]) -> float:
        """Read what the child has written; when it wrote last, 0 if it wrote nothing."""
        told = child.new_verdicts()
        for index, _, verdict in told:
            scored = verdicts[mine[index]] = Scored(*verdict)
            self._note(scored.seconds)
        return told[-1][1] if told else 0.0

    def _note(self, seconds: float) -> None:
        old = seconds if self._seconds is None else self._seconds
        self._seconds = 0.8 * old + 0.2 * seconds

    async def _reason_of_end(self, child: _Child, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            await self._kill(child)
            return f"the reward exceeded {self._config.timeout_s:g} s"
        with contextlib.suppress(TimeoutError):  # it closed its pipe: it is ending
            async with asyncio.timeout(1.0):
                await child.running.wait()
        code = child.running.returncode
        await self._kill(child)
        if code is not None and code < 0:
            return f"the scoring process died ({signal.Signals(-code).name})"
        return f"the scoring process ended (exit code {code})"

    async def _free_child(self) -> _Child:
        """An idle child or a new one. Who died while idle takes no episode along."""
        while self._idle:
            child = self._idle.pop()
            if not child.is_gone:
                return child
            await self._kill(child)
        return await self._spawn()

    async def _spawn(self) -> _Child:
        verdicts = _open_shared_file()
        settings = {**self._settings, "verdicts": verdicts.fileno()}
        running = await asyncio.create_subprocess_exec(
            *child_command("areal_ray.rewards.worker", settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(verdicts.fileno(),),
            start_new_session=True,  # so that it can be killed with all it started
        )
        child = _Child(running, verdicts)
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                told = await self._receive(child)
        except TimeoutError:
            await self._kill(child)
            raise DeadlineExceeded(
                f"reward.score: importing '{self._config.score}' took more than "
                f"{self._config.start_timeout_s:g} s. Raise reward.start_timeout_s"
            ) from None
        except EOFError:
            await self._kill(child)
            raise RecipeError(
                f"reward.score: the process that imports '{self._config.score}' died at once; "
                "its standard error says why."
            ) from None
        if "error" in told:
            await self._kill(child)
            raise RecipeError(told["error"])
        child.is_async = told["is_async"]
        self._alive.add(child)
        return child

    async def _receive(self, child: _Child) -> dict[str, Any]:
        assert child.running.stdout is not None
        (length,) = FRAME.unpack(await child.running.stdout.readexactly(FRAME.size))
        told: dict[str, Any] = json.loads(await child.running.stdout.readexactly(length))
        return told

    async def _kill(self, child: _Child) -> None:
        self._alive.discard(child)
        self.num_killed += 1
        pid = child.running.pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            end_below(pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        await child.running.wait()  # reaped: no zombie stays
        child.verdicts.close()
