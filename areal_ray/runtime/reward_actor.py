"""RewardActor: scores the episodes of a group and writes the scored group to the run's journal.

Idempotent: scoring a group twice gives the same answer, so a call may be retried after a death.
Its state comes from the constructor alone.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from areal_ray.core.group_metrics import group_metrics
from areal_ray.core.journal import JournalPlace, SegmentWriter
from areal_ray.core.summaries import Failure, ScoreSummary
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Group, Outcome, Trajectory, decode_group, encode_group
from areal_ray.rewards.reward import RewardConfig, Scored
from areal_ray.rewards.runner import Asked, RewardRunner
from areal_ray.runtime.garbage import collect_rarely


@dataclass(frozen=True, slots=True)
class RewardHealth:
    """One reward actor's account of itself."""

    name: str
    incarnation: str
    """Differs after every restart."""
    num_scored: int
    """Groups since start."""
    num_killed: int
    """Scoring processes that had to be ended."""


class RewardActor:
    """One replica of the reward service.

    Args:
        name: For messages and journal segments.
        config: Reward function and limits.
        search: Import roots for the reward's code.
        journal: Folder of the run's journal; None = write nothing.
    """

    def __init__(
        self,
        name: str,
        config: RewardConfig,
        *,
        search: Sequence[str] = (),
        journal: str | None = None,
    ) -> None:
        self._name = name
        self._incarnation = uuid4().hex[:12]
        self._runner = RewardRunner(config, search)
        self._segments = SegmentWriter(Path(journal), name) if journal is not None else None
        self._starting = asyncio.Lock()
        self._num_scored = 0
        collect_rarely()

    async def ready(self) -> None:
        """Start a scoring process.

        Raises:
            RecipeError: The reward cannot be imported.
        """
        async with self._starting:
            await self._runner.start()

    async def score_group(self, payload: bytes, task: Task) -> tuple[ScoreSummary, bytes]:
        """Score every episode that did not score itself, and write the group to the journal.

        Args:
            payload: A group as `encode_group` writes it.
            task: The group's.

        Returns:
            The summary, and the group with rewards and outcomes filled in.
        """
        (summary,), (scored_payload,) = await self._score([payload], [task])
        return summary, scored_payload

    async def score_many(self, tasks: Sequence[Task], *payloads: bytes) -> tuple[Any, ...]:
        """`score_group` for groups that came together: the summaries, then each scored group."""
        summaries, scored_payloads = await self._score(payloads, tasks)
        return summaries, *scored_payloads

    async def score_groups(
        self, payloads: Sequence[bytes], tasks: Sequence[Task]
    ) -> list[ScoreSummary]:
        """The summaries alone; nothing is journaled. What an evaluation needs."""
        return (await self._score(payloads, tasks, journaled=False))[0]

    async def _score(
        self, payloads: Sequence[bytes], tasks: Sequence[Task], *, journaled: bool = True
    ) -> tuple[list[ScoreSummary], list[bytes]]:
        started = time.monotonic()
        groups = [decode_group(payload) for payload in payloads]
        asked = [_asked(*one) for one in zip(groups, tasks, payloads, strict=True)]
        told: list[list[Scored]] = [[] for _ in asked]
        if any(one.trajectories for one in asked):
            await self.ready()
            told = await self._runner.score_groups(asked)
        summaries, scored_payloads = [], []
        for group, one, verdicts, payload in zip(groups, asked, told, payloads, strict=True):
            scored_payload = bytes(payload)
            if verdicts:
                ids = (t.episode_id for t in one.trajectories)
                of_episode = dict(zip(ids, verdicts, strict=True))
                lines = tuple(_filled(t, of_episode) for t in group.trajectories)
                group = Group(group.group_id, group.task_id, lines)
                scored_payload = encode_group(group)
            place = None
            if self._segments is not None and journaled:
                place = self._segments.append(scored_payload)
            summary = _summary(group, place, len(scored_payload))
            slowest_s = max((scored.seconds for scored in verdicts), default=0.0)
            summaries.append(replace(summary, slowest_s=slowest_s))
            scored_payloads.append(scored_payload)
        self._num_scored += len(groups)
        seconds = (time.monotonic() - started) / max(1, len(groups))
        return [replace(summary, seconds=seconds) for summary in summaries], scored_payloads

    async def health(self) -> RewardHealth:
        """What it has done."""
        return RewardHealth(
            self._name, self._incarnation, self._num_scored, self._runner.num_killed
        )

    async def close(self) -> None:
        """End the scoring processes."""
        await self._runner.close()
        if self._segments is not None:
            self._segments.close()


def _asked(group: Group, task: Task, payload: bytes) -> Asked:
    chosen = [
        t for t in _one_per_episode(group.trajectories) if t.reward is None and t.outcome.is_scored
    ]
    whole = bytes(payload) if len(chosen) == len(group.trajectories) else None
    return Asked(task, chosen, whole)


def _one_per_episode(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Of each episode the branch that holds its last turn, in order of appearance."""
    last: dict[str, Trajectory] = {t.episode_id: t for t in trajectories}
    if len(last) == len(trajectories):
        return list(trajectories)
    last.clear()
    for trajectory in trajectories:
        known = last.get(trajectory.episode_id)
        if known is None or _last_turn(trajectory) > _last_turn(known):
            last[trajectory.episode_id] = trajectory
    return list(last.values())


def _last_turn(trajectory: Trajectory) -> int:
    return int(trajectory.turn_ids.max(initial=-1))


def _filled(trajectory: Trajectory, verdicts: dict[str, Scored]) -> Trajectory:
    scored = verdicts.get(trajectory.episode_id)
    if scored is None:
        return trajectory
    facts: dict[str, Any] = {
        "seconds": {**trajectory.seconds, "reward": round(scored.seconds, 6)},
        "details": {**trajectory.details, **scored.details},
    }
    if scored.reward is None:
        return trajectory.with_verdict(outcome=Outcome.UNSCORED, failure=scored.reason, **facts)
    return trajectory.with_verdict(reward=scored.reward, **facts)


def _summary(group: Group, place: JournalPlace | None, payload_bytes: int) -> ScoreSummary:
    episodes = _one_per_episode(group.trajectories)
    unscored = [t for t in episodes if t.reward is None]
    reasons = Counter((str(t.outcome), t.failure) for t in unscored)
    return ScoreSummary(
        group_id=group.group_id,
        rewards=tuple(t.reward for t in episodes),
        num_unscored=len(unscored),
        failures=tuple(Failure(*key, count) for key, count in reasons.items()),
        truncated=frozenset(
            place for place, t in enumerate(episodes) if t.outcome is Outcome.TRUNCATED
        ),
        metrics=group_metrics(group),
        place=place,
        payload_bytes=payload_bytes,
    )
