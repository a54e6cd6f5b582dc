"""Scores episodes in killable child processes; the child side is `worker.py`.

A reward that hangs, dies or eats memory costs its own episode, never the actor: the child's whole
process group is killed and a new child takes over the rest.

score() waits for: a free child, then its answer; bounded by `timeout_s` an episode.
"""

import asyncio
import contextlib
import json
import os
import pickle
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import areal_ray
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Group, Trajectory, encode_group
from areal_ray.errors import DeadlineExceeded, RecipeError
from areal_ray.rewards.reward import RewardConfig, Scored
from areal_ray.rewards.worker import FRAME

_QUICK_S = 0.02
"""An episode scored faster than this is not worth a child of its own."""
_GRACE_S = 0.5
_READ_BYTES = 65536
_START = (
    "import sys; sys.path[:0] = [sys.argv[1]]; from areal_ray.rewards.worker import main; "
    "main(sys.argv[2])"
)


@dataclass(slots=True, eq=False)
class _Child:
    running: asyncio.subprocess.Process
    is_async: bool
    unread: bytearray = field(default_factory=bytearray)
    """Answers that came in one piece with an earlier one."""

    def next_answer(self) -> dict[str, Any] | None:
        """The next whole answer that has arrived."""
        if len(self.unread) < FRAME.size:
            return None
        end = FRAME.size + FRAME.unpack_from(self.unread)[0]
        if len(self.unread) < end:
            return None
        told: dict[str, Any] = json.loads(self.unread[FRAME.size : end])
        del self.unread[:end]
        return told


class RewardRunner:
    """A pool of scoring processes for one reward function.

    Args:
        config: Reward and limits.
        search: Import roots for the reward's code.
    """

    def __init__(self, config: RewardConfig, search: Sequence[Path | str] = ()) -> None:
        self._config = config
        self._settings = json.dumps(
            {
                "score": config.score,
                "args": config.args,
                "search": [str(root) for root in search],
                "timeout_s": config.timeout_s,
                "memory_bytes": config.memory_bytes,
            }
        )
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
        """One verdict a trajectory, in order; never raises for what the reward does.

        Args:
            task: Theirs.
            trajectories: What to score.
            encoded: The same as a group's payload, where the caller has it already.
        """
        verdicts: list[Scored | None] = [None] * len(trajectories)
        waiting = deque(range(len(trajectories)))
        share = self._share(len(trajectories))

        async def work() -> None:
            while waiting:
                async with self._seats:
                    mine = [waiting.popleft() for _ in range(min(share, len(waiting)))]
                    if mine:
                        chosen = tuple(trajectories[i] for i in mine)
                        payload = encoded if len(chosen) == len(trajectories) else None
                        payload = payload or encode_group(Group("", task.id, chosen))
                        left = await self._score_share((task, payload), mine, verdicts)
                        waiting.extendleft(reversed(left))

        num_lanes = -(-len(trajectories) // share) if trajectories else 0
        await asyncio.gather(*(work() for _ in range(min(num_lanes, self._config.workers))))
        return [v if v is not None else Scored(None, "was not scored") for v in verdicts]

    async def close(self) -> None:
        """End all children and whatever they started."""
        for child in list(self._alive):
            await self._kill(child)
        self._idle.clear()

    def _share(self, count: int) -> int:
        """Episodes that one child takes at a time."""
        if self._seconds is not None and self._seconds < _QUICK_S:
            return max(1, count)
        return max(1, -(-count // self._config.workers))

    async def _score_share(
        self,
        asked: tuple[Task, bytes],
        mine: Sequence[int],
        verdicts: list[Scored | None],
    ) -> list[int]:
        """Fill in verdicts; the episodes still to do when the child had to be killed."""
        child = self._idle.pop() if self._idle else await self._spawn()
        frame = pickle.dumps(asked)
        left = list(mine)
        try:
            assert child.running.stdin is not None
            child.running.stdin.write(FRAME.pack(len(frame)) + frame)
            await child.running.stdin.drain()
            while left:
                told = child.next_answer()
                if told is None:
                    async with asyncio.timeout(self._config.timeout_s + _GRACE_S * child.is_async):
                        told = await self._receive(child)
                scored = Scored(told["reward"], told["reason"], told["details"], told["seconds"])
                index = mine[told["index"]]
                verdicts[index] = scored
                left.remove(index)
                self._note(scored.seconds)
        except (TimeoutError, EOFError, ConnectionError) as error:
            reason = await self._reason_of_end(child, error)
            # Together, nobody can tell which of them held up the others.
            culprits = left if child.is_async else left[:1]
            for index in culprits:
                verdicts[index] = Scored(None, reason)
            return left[len(culprits) :]
        except BaseException:  # cancelled: the child is in the middle of something
            await self._kill(child)
            raise
        self._idle.append(child)
        return []

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

    async def _spawn(self) -> _Child:
        root = str(Path(areal_ray.__file__).parents[1])
        running = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _START,
            root,
            self._settings,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # so that it can be killed with all it started
        )
        child = _Child(running, is_async=False)
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
        while (told := child.next_answer()) is None:
            arrived = await child.running.stdout.read(_READ_BYTES)
            if not arrived:
                raise EOFError("the scoring process closed its pipe")
            child.unread += arrived
        return told

    async def _kill(self, child: _Child) -> None:
        self._alive.discard(child)
        self.num_killed += 1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.running.pid, signal.SIGKILL)
        await child.running.wait()  # reaped: no zombie stays
