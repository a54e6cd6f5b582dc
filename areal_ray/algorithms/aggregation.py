"""From token losses to one number: the weight of each token's loss.

Weights divide by counts over all ranks and micro-batches of a minibatch, so that the plain sum
of weight * loss over everything is the value wanted, however the minibatch was cut. Counts are
of tokens that train, before anything is masked by a correction.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_ray.algorithms.presets import AggregationName


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """What a minibatch holds over all ranks."""

    tokens: int
    """Trained tokens."""
    sequences: int
    """Trajectories with any."""
    rollouts: int
    """Episodes with any, all branches together."""


def token_weights(
    kind: AggregationName,
    sequence_tokens: NDArray[np.int64],
    rollout_tokens: NDArray[np.int64],
    counts: GlobalCounts,
    fixed_length: int | None = None,
) -> NDArray[np.float64]:
    """[T] weight of each token's loss; the sum over everything is

    - token_mean: the mean over all tokens (DAPO, arXiv:2503.14476, eq. 8);
    - sequence_mean: the mean over sequences of each one's token mean (GRPO, arXiv:2402.03300);
    - sequence_sum: the mean over sequences of each one's token sum (RLOO, arXiv:2402.14740);
    - fixed_length: the same over a constant length (Dr. GRPO, arXiv:2503.20783, sec. 3.2);
    - rollout_mean: the mean over episodes of the token mean over all branches of each.

    Args:
        kind: Which of these.
        sequence_tokens: [T] trained tokens of the token's trajectory.
        rollout_tokens: [T] trained tokens of all branches of its episode.
        counts: Over all ranks and micro-batches.
        fixed_length: Tokens; of fixed_length.
    """
    if not len(sequence_tokens):
        return np.zeros(0)
    if min(counts.tokens, counts.sequences, counts.rollouts) < 1:
        raise ValueError(f"counts: are {counts}, but there are tokens; must count them all")
    if kind == "token_mean":
        return np.full(len(sequence_tokens), 1.0 / counts.tokens)
    if kind == "sequence_mean":
        return 1.0 / (sequence_tokens * np.float64(counts.sequences))
    if kind == "rollout_mean":
        return 1.0 / (rollout_tokens * np.float64(counts.rollouts))
    if kind == "sequence_sum":
        return np.full(len(sequence_tokens), 1.0 / counts.sequences)
    if fixed_length is None:
        raise ValueError("fixed_length: is None with aggregation 'fixed_length'; must be given")
    return np.full(len(sequence_tokens), 1.0 / (fixed_length * counts.sequences))
