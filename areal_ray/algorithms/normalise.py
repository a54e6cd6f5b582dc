"""Centre and scale of rewards and advantages: how much better than its like a sample did.

All in float64, over true group sizes, over entries whose mask is True; what the others hold is
never read (it may be NaN) and their result is 0. A spread below the floor counts as none.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from areal_ray.algorithms.objective_parts import NormConfig

Values = NDArray[np.float64]
SumOverRanks = Callable[[list[float]], list[float]]
"""Adds up each of a few numbers over all ranks; every rank must call it."""

_ROUNDING = 1e-13
"""What float64 may lose of a mean over very many values, of their size."""


def normalise(
    values: Values,
    mask: NDArray[np.bool_],
    groups: NDArray[np.int64],
    config: NormConfig,
    *,
    min_spread: float = 1e-6,
    sum_over_ranks: SumOverRanks = lambda numbers: numbers,
) -> Values:
    """[N] (value - mean) / std, each over the group, the batch, or left out.

    GRPO: group, group (arXiv:2402.03300, sec. 4.1.2); Dr. GRPO: group, none (arXiv:2503.20783);
    RLOO: leave_one_out, none (arXiv:2402.14740); LitePPO: group, batch (arXiv:2508.08221);
    REINFORCE++: batch, batch (arXiv:2501.03262). Standard deviations are the population's unless
    `config.unbiased`, taken around the mean of their own scope, and nothing is added to them.
    Where the spread (largest less smallest) of a group, or the deviation of the batch, is at most
    `min_spread`, a value centred on that scope is exactly 0, and no value is divided.

    With scope batch, `sum_over_ranks` is called twice whatever this rank holds, else not at all.

    Args:
        values: [N] of this rank; finite where the mask is True.
        mask: [N] True on what counts.
        groups: [N] number of the group of each.
        config: Scopes.
        min_spread: In the unit of the values.
        sum_over_ranks: Identity for one rank.
    """
    known = values[mask].astype(np.float64)
    if not np.isfinite(known).all():
        raise ValueError("values: one that counts is infinite or NaN; must be finite")
    if "batch" in (config.mean, config.std):
        batch_mean, batch_std = _batch_statistics(known, config.unbiased, sum_over_ranks)
    centred = known
    if config.mean in ("group", "leave_one_out") or config.std == "group":
        of = _Groups(known, groups[mask], min_spread)
    if config.mean == "group":
        centred = of.centred
    elif config.mean == "leave_one_out":
        centred = of.centred * of.sizes / np.maximum(of.sizes - 1.0, 1.0)
    elif config.mean == "batch":
        centred = known - batch_mean if batch_std > min_spread else np.zeros_like(known)
    if config.std == "group":
        centred = centred / of.deviations(config.unbiased)
    elif config.std == "batch" and batch_std > min_spread:
        centred = centred / batch_std
    result = np.zeros(len(values))
    result[mask] = centred
    return result


class _Groups:
    """Statistics of each value's group; all [N]."""

    def __init__(self, values: Values, groups: NDArray[np.int64], min_spread: float) -> None:
        names, self._place = np.unique(groups, return_inverse=True)
        self._num_groups = len(names)
        self.sizes = self._sum(np.ones(len(values)))
        self.is_flat = self._spread(values) <= min_spread
        self.centred = np.where(self.is_flat, 0.0, values - self._sum(values) / self.sizes)

    def deviations(self, unbiased: bool) -> Values:
        """Standard deviation; 1 where the group has no spread."""
        degrees = np.maximum(self.sizes - unbiased, 1.0)
        spread = np.sqrt(self._sum(self.centred**2) / degrees)
        return np.where(self.is_flat, 1.0, spread)

    def _sum(self, values: Values) -> Values:
        totals: Values = np.bincount(self._place, values, self._num_groups).astype(np.float64)
        return totals[self._place]

    def _spread(self, values: Values) -> Values:
        low, high = np.full(self._num_groups, np.inf), np.full(self._num_groups, -np.inf)
        np.minimum.at(low, self._place, values)
        np.maximum.at(high, self._place, values)
        return (high - low)[self._place]


def _batch_statistics(
    values: Values, unbiased: bool, sum_over_ranks: SumOverRanks
) -> tuple[float, float]:
    """Mean and standard deviation over all ranks, in two passes; 0 and 0 of nothing."""
    count, total = sum_over_ranks([float(len(values)), float(values.sum())])
    mean = total / count if count else 0.0
    (squares,) = sum_over_ranks([float(np.square(values - mean).sum())])
    spread = float(np.sqrt(squares / max(1.0, count - unbiased)))
    # Of equal values the mean may be a rounding away, and their deviation just that.
    return mean, spread if spread > _ROUNDING * abs(mean) else 0.0
