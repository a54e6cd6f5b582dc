"""From groups of trajectories to the flat token columns that a policy loss takes.

All trained tokens of a rank's minibatch lie end to end in each column; micro-batches point into
them by `MicroBatch.origins`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_ray.algorithms.advantages import group_advantages
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.packing import TrainSequence
from areal_ray.core.trajectory import Group, Outcome, Trajectory


@dataclass(frozen=True, slots=True)
class TrainCounts:
    """What a minibatch holds; adds up over ranks."""

    tokens: int = 0
    """Tokens that count in a token mean: of scored trajectories, not too old."""
    sequences: int = 0
    """Trajectories with any such token."""
    teaching_tokens: int = 0
    """Of `tokens`, those with an advantage other than 0."""
    equal_groups: int = 0
    """Groups whose advantages are all 0."""
    stale_tokens: int = 0
    """Left out because sampled by too old a version."""
    mixed_sequences: int = 0
    """Of `sequences`, those sampled by more than one version."""
    left_out: int = 0
    """Episodes without a reward, or cut short under `mask_truncated`."""
    staleness: int = 0
    """Sum over `tokens` of versions behind the learner."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One rank's share of one minibatch."""

    sequences: list[TrainSequence]
    """What must be computed."""
    behaviour_logprobs: NDArray[np.float32]
    """[N] of the computed trained tokens, as all columns here."""
    advantages: NDArray[np.float64]
    """[N]"""
    sequence_tokens: NDArray[np.int64]
    """[N] trained tokens of the token's trajectory."""
    counts: TrainCounts
    max_staleness: int
    """Largest number of versions a counted token lies behind the learner; 0 if there is none."""


def train_batch(
    groups: Sequence[Group], objective: ObjectiveConfig, version: int, oldest_version: int | None
) -> TrainBatch:
    """Advantages and masks of whole groups.

    Args:
        groups: Whole: the baseline is the mean over siblings.
        objective: Its advantage and what it leaves out.
        version: The learner's.
        oldest_version: Tokens sampled by an older version do not train; None keeps all.
    """
    builder = _Builder(objective, version, oldest_version)
    for number, group in enumerate(groups):
        builder.add(group, number)
    return builder.finish()


class _Builder:
    def __init__(
        self, objective: ObjectiveConfig, version: int, oldest_version: int | None
    ) -> None:
        self._objective = objective
        self._version = version
        self._oldest = oldest_version
        self._sequences: list[TrainSequence] = []
        self._columns: list[tuple[NDArray[np.float32], float, int]] = []
        self._sums = dict.fromkeys(TrainCounts.__slots__, 0)
        self._max_staleness = 0

    def add(self, group: Group, number: int) -> None:
        advantages = self._episode_advantages(group)
        self._sums["equal_groups"] += not any(advantages.values())
        self._sums["left_out"] += sum(a is None for a in advantages.values())
        for trajectory in group.trajectories:
            advantage = advantages[trajectory.episode_id]
            if advantage is not None:
                self._add_trajectory(trajectory, advantage, number)

    def _episode_advantages(self, group: Group) -> dict[str, float | None]:
        """Advantage of each episode, once however many branches it has; None = left out."""
        rewards = {t.episode_id: self._reward(t) for t in group.trajectories if t.branch_id == 0}
        for trajectory in group.trajectories:
            rewards.setdefault(trajectory.episode_id, self._reward(trajectory))
        values = group_advantages(
            list(rewards.values()),
            divide_by_std=self._objective.advantage == "group_mean_std",
            min_spread=self._objective.min_reward_spread,
        )
        return {
            episode: None if reward is None else float(value)
            for (episode, reward), value in zip(rewards.items(), values, strict=True)
        }

    def _reward(self, trajectory: Trajectory) -> float | None:
        if not trajectory.outcome.is_scored:
            return None
        if self._objective.mask_truncated and trajectory.outcome is Outcome.TRUNCATED:
            return None
        return trajectory.reward

    def _add_trajectory(self, trajectory: Trajectory, advantage: float, group: int) -> None:
        trained = trajectory.loss_mask
        if self._oldest is not None:
            fresh = trained & (trajectory.versions >= self._oldest)
            self._sums["stale_tokens"] += int(trained.sum()) - int(fresh.sum())
            trained = fresh
        count = int(trained.sum())
        if count == 0:
            return
        self._count(trajectory, trained, count, advantage)
        if advantage == 0.0 and self._objective.skip_zero_advantage:
            return
        self._sequences.append(TrainSequence(trajectory.token_ids, trained, group))
        self._columns.append((trajectory.behaviour_logprobs[trained], advantage, count))

    def _count(
        self, trajectory: Trajectory, trained: NDArray[np.bool_], count: int, advantage: float
    ) -> None:
        versions = trajectory.versions[trained]
        for name, value in {
            "tokens": count,
            "sequences": 1,
            "teaching_tokens": count if advantage else 0,
            "mixed_sequences": versions.min() != versions.max(),
            "staleness": count * self._version - int(versions.sum(dtype=np.int64)),
        }.items():
            self._sums[name] += int(value)
        self._max_staleness = max(self._max_staleness, self._version - int(versions.min()))

    def finish(self) -> TrainBatch:
        lengths = [count for _, _, count in self._columns]
        behaviour = [column for column, _, _ in self._columns]
        return TrainBatch(
            self._sequences,
            np.concatenate(behaviour) if behaviour else np.zeros(0, np.float32),
            np.repeat(np.array([a for _, a, _ in self._columns], np.float64), lengths),
            np.repeat(np.array(lengths, np.int64), lengths),
            TrainCounts(**self._sums),
            self._max_staleness,
        )


def sft_sequences(
    token_ids: Iterator[NDArray[np.int32]], masks: Iterator[NDArray[np.bool_]]
) -> list[TrainSequence]:
    """Sequences that share nothing, one a conversation; the first token of each cannot train."""
    sequences = []
    for number, (tokens, mask) in enumerate(zip(token_ids, masks, strict=True)):
        trained = mask.copy()
        trained[:1] = False
        sequences.append(TrainSequence(tokens, trained, number))
    return sequences
