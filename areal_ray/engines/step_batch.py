"""From lines and their advantages to the flat token columns that a policy loss takes.

All trained tokens of a rank's minibatch lie end to end in each column; micro-batches point into
them by `MicroBatch.origins`. What cannot change the gradient is left out here.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.packing import TrainSequence
from areal_ray.engines.advantage_columns import line_lengths
from areal_ray.engines.train_rows import Line, RowShare, TrainCounts, train_sequences


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """One rank's share of one minibatch; every column is over the N tokens to be computed."""

    sequences: list[TrainSequence]
    """What must be computed."""
    behaviour_logprobs: NDArray[np.float32]
    """[N]"""
    versions: NDArray[np.int32]
    """[N] that sampled the token."""
    advantages: NDArray[np.float64]
    """[N]"""
    sequence_tokens: NDArray[np.int64]
    """[N] trained tokens of the token's trajectory."""
    rollout_tokens: NDArray[np.int64]
    """[N] trained tokens of the token's episode, all its branches together."""
    sequence_ids: NDArray[np.int64]
    """[N] equal where the trajectory is the same; ascending."""
    chosen: NDArray[np.bool_]
    """[M] of all trained tokens of the share, True on these N."""
    counts: TrainCounts
    """Of the whole share, what is not computed included."""
    max_staleness: int
    """Largest number of versions a counted token lies behind the learner; 0 if there is none."""


def train_batch(
    share: RowShare,
    advantages: NDArray[np.float64],
    equal_groups: int,
    objective: ObjectiveConfig,
) -> TrainBatch:
    """Columns of a share.

    Args:
        share: Lines of whole groups.
        advantages: [M] of all their trained tokens, end to end.
        equal_groups: Groups whose rewards teach nothing, to be counted.
        objective: Whether what has advantage 0 may be left out.
    """
    lengths = line_lengths(share.lines)
    keeps = np.ones(len(lengths), bool)
    if objective.may_skip and len(lengths):
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        keeps = np.add.reduceat(advantages != 0.0, starts, dtype=np.int64) > 0
    kept = [line for line, is_kept in zip(share.lines, keeps, strict=True) if is_kept]
    chosen, own = np.repeat(keeps, lengths), lengths[keeps]
    counts = replace(
        share.counts,
        teaching_tokens=int(np.count_nonzero(advantages)),
        equal_groups=equal_groups,
    )
    return TrainBatch(
        sequences=train_sequences(kept),
        behaviour_logprobs=behaviour_logprobs(kept),
        versions=_end_to_end([line.versions for line in kept], np.dtype(np.int32)),
        advantages=advantages[chosen],
        sequence_tokens=np.repeat(own, own),
        rollout_tokens=np.repeat(_rollout_tokens(share.lines)[keeps], own),
        sequence_ids=np.repeat(np.arange(len(kept)), own),
        chosen=chosen,
        counts=counts,
        max_staleness=share.max_staleness,
    )


def behaviour_logprobs(lines: Sequence[Line]) -> NDArray[np.float32]:
    """[M] of all trained tokens of the lines."""
    columns = [line.trajectory.behaviour_logprobs[line.trained] for line in lines]
    return _end_to_end(columns, np.dtype(np.float32))


def _rollout_tokens(lines: Sequence[Line]) -> NDArray[np.int64]:
    """[L] trained tokens of each line's episode."""
    totals: Counter[tuple[int, int]] = Counter()
    for line in lines:
        totals[line.group, line.episode] += line.num_trained
    return np.array([totals[line.group, line.episode] for line in lines], np.int64)


def _end_to_end(columns: list[NDArray], dtype: np.dtype) -> NDArray:  # type: ignore[type-arg]
    return np.concatenate(columns) if columns else np.zeros(0, dtype)
