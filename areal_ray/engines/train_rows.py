"""From groups of trajectories to lines: who trains, who counts, who is too old.

`advantage_columns` says what each line is worth, `step_batch` makes the token columns of it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.packing import TrainSequence
from areal_ray.core.trajectory import Group, Outcome, StopReason, Trajectory, edges_above


@dataclass(frozen=True, slots=True)
class TrainCounts:
    """What a minibatch holds; adds up over ranks."""

    tokens: int = 0
    """Tokens that count in a token mean: of scored trajectories, not too old."""
    sequences: int = 0
    """Trajectories with any such token."""
    rollouts: int = 0
    """Episodes with any such token, all branches of one together."""
    teaching_tokens: int = 0
    """Of `tokens`, those with an advantage other than 0."""
    equal_groups: int = 0
    """Groups whose episodes all have advantage 0 by their rewards."""
    stale_tokens: int = 0
    """Left out because sampled by too old a version."""
    mixed_sequences: int = 0
    """Of `sequences`, those sampled by more than one version."""
    left_out: int = 0
    """Episodes without a reward, or cut short under `mask_truncated`."""
    staleness: int = 0
    """Sum over `tokens` of versions behind the learner."""


@dataclass(frozen=True, slots=True)
class Line:
    """One trajectory with something to train."""

    trajectory: Trajectory
    trained: NDArray[np.bool_]
    """[T] sampled tokens that are not too old."""
    versions: NDArray[np.int32]
    """[N] of those tokens, at least one."""
    group: int
    """Number of its group in the share."""
    episode: int
    """Place of its episode in the group."""
    is_last: bool = True
    """It holds the turn that its episode sampled last; other branches had ended before."""
    num_edges: int = 0
    """Calls of sub-agents between the main agent and this branch."""

    @property
    def is_truncated(self) -> bool:
        """Whether a limit cut it short, so that more reward might have followed its end."""
        cut = self.is_last or self.trajectory.stop_reason is StopReason.LENGTH
        return cut and self.trajectory.outcome is Outcome.TRUNCATED

    @property
    def num_trained(self) -> int:
        """N, its tokens that train."""
        return len(self.versions)


@dataclass(frozen=True, slots=True)
class RowShare:
    """One rank's share of one minibatch, not yet judged."""

    lines: list[Line]
    rewards: list[list[float | None]]
    """[group][episode] as scored; None = left out."""
    lengths: list[list[int]]
    """[group][episode] sampled tokens, all branches together."""
    counts: TrainCounts
    """Without those that need advantages: `teaching_tokens` and `equal_groups`."""
    max_staleness: int
    """Largest number of versions a counted token lies behind the learner; 0 if there is none."""


def collect_lines(
    groups: Sequence[Group], objective: ObjectiveConfig, version: int, oldest_version: int | None
) -> RowShare:
    """Lines and rewards of whole groups.

    Args:
        groups: Whole: a baseline is a statistic over siblings.
        objective: What it leaves out.
        version: The learner's.
        oldest_version: Tokens sampled by an older version do not train; None keeps all.
    """
    collector = _Collector(objective, version, oldest_version)
    for number, group in enumerate(groups):
        collector.add(group, number)
    return collector.finish()


class _Collector:
    def __init__(
        self, objective: ObjectiveConfig, version: int, oldest_version: int | None
    ) -> None:
        self._objective = objective
        self._version = version
        self._oldest = oldest_version
        self._lines: list[Line] = []
        self._rewards: list[list[float | None]] = []
        self._lengths: list[list[int]] = []
        self._sums = dict.fromkeys(TrainCounts.__slots__, 0)
        self._max_staleness = 0

    def add(self, group: Group, number: int) -> None:
        rewards = self._episode_rewards(group)
        places = {episode: place for place, episode in enumerate(rewards)}
        values, lengths = list(rewards.values()), [0] * len(rewards)
        self._sums["left_out"] += values.count(None)
        training, edges, last_turns = set(), _edges(group), _last_turns(group)
        for trajectory in group.trajectories:
            name = trajectory.episode_id
            place = places[name]
            lengths[place] += trajectory.num_sampled_tokens
            if values[place] is None:
                continue
            trained = self._trained(trajectory)
            versions = trajectory.versions[trained]
            if len(versions):
                self._count(versions)
                training.add(place)
                is_last = _last_turn(trajectory) == last_turns[name]
                num_edges = edges[name][trajectory.branch_id]
                self._lines.append(
                    Line(trajectory, trained, versions, number, place, is_last, num_edges)
                )
        self._sums["rollouts"] += len(training)
        self._rewards.append(values)
        self._lengths.append(lengths)

    def _episode_rewards(self, group: Group) -> dict[str, float | None]:
        """Reward of each episode, once however many branches it has."""
        rewards = {t.episode_id: self._reward(t) for t in group.trajectories if t.branch_id == 0}
        for trajectory in group.trajectories:
            rewards.setdefault(trajectory.episode_id, self._reward(trajectory))
        return rewards

    def _reward(self, trajectory: Trajectory) -> float | None:
        if not trajectory.outcome.is_scored:
            return None
        if self._objective.mask_truncated and trajectory.outcome is Outcome.TRUNCATED:
            return None
        if not self._objective.needs_rewards:
            return 0.0  # its teacher judges it token by token
        reward = trajectory.reward
        return None if reward is None or math.isnan(reward) else reward

    def _trained(self, trajectory: Trajectory) -> NDArray[np.bool_]:
        """[T] sampled tokens that are not too old; those that are, counted."""
        trained = trajectory.loss_mask
        if self._oldest is None:
            return trained
        fresh: NDArray[np.bool_] = trained & (trajectory.versions >= self._oldest)
        self._sums["stale_tokens"] += int(trained.sum()) - int(fresh.sum())
        return fresh

    def _count(self, versions: NDArray[np.int32]) -> None:
        count, oldest = len(versions), int(versions.min())
        self._sums["tokens"] += count
        self._sums["sequences"] += 1
        self._sums["mixed_sequences"] += int(versions.max()) != oldest
        self._sums["staleness"] += count * self._version - int(versions.sum(dtype=np.int64))
        self._max_staleness = max(self._max_staleness, self._version - oldest)

    def finish(self) -> RowShare:
        counts = TrainCounts(**self._sums)
        return RowShare(self._lines, self._rewards, self._lengths, counts, self._max_staleness)


def _last_turns(group: Group) -> dict[str, int]:
    """Episode -> the turn that it sampled last, in whichever branch."""
    found: dict[str, int] = {}
    for trajectory in group.trajectories:
        last = _last_turn(trajectory)
        found[trajectory.episode_id] = max(last, found.get(trajectory.episode_id, last))
    return found


def _last_turn(trajectory: Trajectory) -> int:
    return int(trajectory.turn_ids.max(initial=-1))


def _edges(group: Group) -> dict[str, dict[int, int]]:
    """Episode -> branch -> calls of sub-agents above it."""
    parents: dict[str, dict[int, int]] = {}
    for trajectory in group.trajectories:
        of_episode = parents.setdefault(trajectory.episode_id, {})
        of_episode[trajectory.branch_id] = trajectory.parent_branch_id
    return {episode: edges_above(tree) for episode, tree in parents.items()}


def train_sequences(lines: Sequence[Line]) -> list[TrainSequence]:
    """What a forward pass over the lines computes."""
    return [TrainSequence(line.trajectory.token_ids, line.trained, line.group) for line in lines]


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
