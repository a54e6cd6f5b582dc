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
from uuid import uuid4

from areal_ray.core.group_metrics import group_metrics
from areal_ray.core.journal import SegmentWriter
from areal_ray.core.summaries import Failure, ScoreSummary
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Group, Outcome, Trajectory, decode_group, encode_group
from areal_ray.rewards.reward import RewardConfig, Scored
from areal_ray.rewards.runner import RewardRunner
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

    async def score_group(
        self, payload: bytes, task: Task, journaled: bool = True
    ) -> tuple[ScoreSummary, bytes]:
        """Score every episode that did not score itself.

        Args:
            payload: A group as `encode_group` writes it.
            task: The group's.
            journaled: Whether to write the scored group to the journal; not for evaluations.

        Returns:
            The summary, and the group with rewards and outcomes filled in.
        """
        started = time.monotonic()
        group = decode_group(payload)
        chosen = _one_per_episode(group.trajectories)
        asked = [t for t in chosen if t.reward is None and t.outcome.is_scored]
        verdicts: dict[str, Scored] = {}
        if asked:
            await self.ready()
            whole = bytes(payload) if len(asked) == len(group.trajectories) else None
            told = await self._runner.score(task, asked, whole)
            verdicts = {t.episode_id: scored for t, scored in zip(asked, told, strict=True)}
        scored_group = replace(
            group, trajectories=tuple(_filled(t, verdicts) for t in group.trajectories)
        )
        scored_payload = encode_group(scored_group) if verdicts else bytes(payload)
        place = None
        if self._segments is not None and journaled:
            place = self._segments.append(scored_payload)
        self._num_scored += 1
        summary = _summary(scored_group)
        seconds = time.monotonic() - started
        return replace(
            summary, place=place, payload_bytes=len(scored_payload), seconds=seconds
        ), scored_payload

    async def score_groups(
        self, payloads: Sequence[bytes], tasks: Sequence[Task]
    ) -> list[ScoreSummary]:
        """`score_group` for many groups in one call, the summaries alone; nothing is journaled."""
        scored = await asyncio.gather(
            *(
                self.score_group(payload, task, journaled=False)
                for payload, task in zip(payloads, tasks, strict=True)
            )
        )
        return [summary for summary, _ in scored]

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


def _one_per_episode(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Of each episode the branch that holds its last turn, in order of appearance."""
    last: dict[str, Trajectory] = {}
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
    seconds = {**trajectory.seconds, "reward": scored.seconds}
    details = {**trajectory.details, **scored.details}
    if scored.reward is None:
        return replace(
            trajectory,
            outcome=Outcome.UNSCORED,
            failure=scored.reason,
            seconds=seconds,
            details=details,
        )
    return replace(trajectory, reward=scored.reward, seconds=seconds, details=details)


def _summary(group: Group) -> ScoreSummary:
    episodes = _one_per_episode(group.trajectories)
    unscored = [t for t in episodes if t.reward is None]
    reasons = Counter((str(t.outcome), t.failure) for t in unscored)
    return ScoreSummary(
        group_id=group.group_id,
        rewards=tuple(t.reward for t in episodes),
        num_unscored=len(unscored),
        failures=tuple(Failure(*key, count) for key, count in reasons.items()),
        truncated=sum(t.outcome is Outcome.TRUNCATED for t in episodes),
        metrics=group_metrics(group),
    )
