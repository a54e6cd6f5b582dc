"""Evaluation: held-out tasks under one committed version, beside training.

It has a rollout replica and an agent actor of its own, so that neither holds up the other; the
replica serves a pinned version while the training fleet moves on.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_ray.core.seeds import derive_seed
from areal_ray.core.summaries import GroupSummary, ScoreSummary
from areal_ray.core.task import Task
from areal_ray.errors import ActorLost, PublishError
from areal_ray.runtime.fleet import Fleet
from areal_ray.runtime.placement import EVALUATION
from areal_ray.runtime.publish_report import Committed
from areal_ray.runtime.run_config import EvaluationConfig
from areal_ray.runtime.services import SyncService
from areal_ray.runtime.weight_files import WeightFile, pin

_TRIES = 3
_UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Pinned:
    """A version that waits to be evaluated; holds its snapshot alive."""

    step: int
    """Steps done when it was pinned."""
    committed: Committed
    pins: tuple[Path, ...] = ()
    """What keeps its file from being removed, where it lies in one."""

    def release(self) -> None:
        """It was scored, or never will be."""
        for pinned in self.pins:
            pinned.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Scores of one version."""

    step: int
    version: int
    accuracy: float
    """Share of the episodes asked for that got a reward of 1 or more."""
    reward_mean: float | None
    episodes: int
    failed_episodes: int
    """Without a reward, whatever the reason; they count as not solved."""
    sampled_tokens: int
    wall_s: float
    pass_at_n: float | None
    """Share of tasks with at least one solved episode; null where each has only one."""

    def metrics(self) -> dict[str, float | None]:
        """The row of this evaluation."""
        values = {
            "eval/accuracy_fraction": self.accuracy,
            "eval/reward_mean": self.reward_mean,
            "eval/episodes": float(self.episodes),
            "eval/failed_episodes": float(self.failed_episodes),
            "eval/sampled_tokens": float(self.sampled_tokens),
            "eval/wall_s": self.wall_s,
        }
        if self.pass_at_n is not None:
            values["eval/pass_fraction"] = self.pass_at_n
        return values


class EvaluationService:
    """Scores committed versions one after the other."""

    def __init__(
        self,
        config: EvaluationConfig,
        tasks: Sequence[Task],
        *,
        replica: Fleet | None,
        agents: Fleet,
        rewards: Fleet,
        sync: SyncService | None,
        first_version: int,
        seed: int,
    ) -> None:
        """Score `tasks` with `agents`.

        Args:
            config: What to evaluate and when.
            tasks: Held-out ones.
            replica: The one rollout actor that the agents use, to be brought to each pinned
                version; null where there is one version only.
            agents: Agent actors of its own.
            rewards: Reward actors, shared with training.
            sync: Where committed versions come from; null where there is one version only.
            first_version: What the replica was loaded with.
            seed: Of the run.
        """
        self._config = config
        self._tasks = list(tasks)
        self._replica = replica
        self._agents = agents
        self._rewards = rewards
        self._sync = sync
        self._served = first_version
        self._seed = seed
        self._waiting: asyncio.Queue[Pinned | None] = asyncio.Queue()
        self._scoring = asyncio.Lock()
        self._rounds = 0
        self.scored_version = _UNKNOWN
        """One that was scored before it was committed: it needs no pin."""

    @property
    def fleets(self) -> list[Fleet]:
        """Actors of its own, to be watched."""
        return [self._agents] if self._replica is None else [self._replica, self._agents]

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether the version after `step` steps is evaluated."""
        if step == 0:
            return self._config.before
        every = self._config.every_steps
        return step == last_step or (every > 0 and step % every == 0)

    async def pin(self, step: int) -> None:
        """Queue the version that is committed now, unless it has its score; its weights are kept
        until then."""
        assert self._sync is not None, "without training there is only one version"
        committed = await self._sync.committed()
        if committed.version == self.scored_version:
            return
        files = [file for file in committed.snapshot if isinstance(file, WeightFile)]
        pins = tuple(pin(file) for file in files)
        await self._waiting.put(Pinned(step, committed, pins))

    async def finish(self) -> None:
        """No version will be pinned any more."""
        await self._waiting.put(None)

    async def pinned(self) -> AsyncIterator[Pinned]:
        """Pinned versions in order, until finish()."""
        while (pinned := await self._waiting.get()) is not None:
            yield pinned
            pinned.release()

    async def score_committed(self, step: int) -> EvaluationResult:
        """The version that is committed now, before any other that waits."""
        assert self._sync is not None, "without training there is only one version"
        return await self.score(Pinned(step, await self._sync.committed()))

    async def score_candidate(self, step: int, candidate: Committed) -> EvaluationResult:
        """Weights that are not committed, and may never be: the replica is asked to keep them for
        this alone."""
        try:
            return await self.score(Pinned(step, candidate))
        finally:  # other weights may get that version
            self._served = _UNKNOWN

    async def score(self, pinned: Pinned) -> EvaluationResult:
        """Every held-out task, `n_samples` times, under the pinned version; one after the other.

        Raises:
            ActorLost: The replica could not be brought to the version.
        """
        async with self._scoring:
            self._rounds += 1
            return await self._score(pinned)

    async def _score(self, pinned: Pinned) -> EvaluationResult:
        started = time.monotonic()
        size = self._config.max_concurrent_tasks
        batches = [self._tasks[i : i + size] for i in range(0, len(self._tasks), size)]
        scores: list[tuple[GroupSummary, ScoreSummary]] = []
        for batch in batches:
            scores += await self._attempt(batch, pinned.committed)
        rewards = [reward for score in scores for reward in score[1].rewards]
        known = [reward for reward in rewards if reward is not None]
        samples = self._config.n_samples
        asked = len(self._tasks) * samples
        solved = [sum(r is not None and r >= 1.0 for r in score[1].rewards) for score in scores]
        return EvaluationResult(
            step=pinned.step,
            version=pinned.committed.version,
            accuracy=sum(solved) / asked,
            reward_mean=sum(known) / len(known) if known else None,
            episodes=asked,
            failed_episodes=asked - len(known),
            sampled_tokens=sum(made.num_sampled_tokens for made, _ in scores),
            wall_s=time.monotonic() - started,
            pass_at_n=sum(map(bool, solved)) / len(self._tasks) if samples > 1 else None,
        )

    async def _serve(self, committed: Committed) -> None:
        if committed.version == self._served or self._replica is None:
            return
        name = await self._replica.least_busy()  # waits while it restarts
        if committed.plan is not None:  # else nothing was published, and it was loaded with this
            version, snapshot = committed.version, committed.snapshot
            await self._replica.submit(name, "weights_load", committed.plan, version, snapshot)
            swapped = await self._replica.submit(name, "weights_swap", version, committed.check)
            if swapped.proof.difference:
                raise ActorLost(f"{name} at version {version}: {swapped.proof.difference}")
        self._served = committed.version

    async def _attempt(
        self, tasks: Sequence[Task], committed: Committed
    ) -> list[tuple[GroupSummary, ScoreSummary]]:
        for attempt in range(_TRIES):
            try:
                await self._serve(committed)
                scores = await self._run(tasks, committed.version, attempt)
            except (ActorLost, PublishError):  # it may die between load and swap, too
                if attempt + 1 == _TRIES:
                    raise
            else:
                if all(_is_of(made, committed.version) for made, _ in scores):
                    return scores
            self._served = _UNKNOWN  # a restarted replica is back at the version it began with
        raise ActorLost(
            f"{EVALUATION}: was restarted each time version {committed.version} was scored"
        )

    async def _run(
        self, tasks: Sequence[Task], version: int, attempt: int
    ) -> list[tuple[GroupSummary, ScoreSummary]]:
        # The same seed for each version: the curve shows the weights, not the dice.
        seeds = [derive_seed(self._seed, "evaluation", task.id) for task in tasks]
        group_ids = [f"eval/{version}/{task.id}/{self._rounds}.{attempt}" for task in tasks]
        samples = self._config.n_samples
        made, payloads = await self._agents.submit_payload(
            await self._agents.least_busy(), "run_groups", tasks, group_ids, samples, seeds
        )
        scored = await self._rewards.submit(
            await self._rewards.least_busy(), "score_groups", payloads, tasks
        )
        return list(zip(made, scored, strict=True))


def _is_of(made: GroupSummary, version: int) -> bool:
    """Whether every token was sampled from one version; true where none was sampled."""
    return made.oldest_version in (version, -1) and made.newest_version in (version, -1)
