"""Advantages of a group: how much better than its siblings an episode did."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def group_advantages(
    rewards: Sequence[float | None], *, divide_by_std: bool = True, min_spread: float = 1e-6
) -> NDArray[np.float64]:
    """(reward - mean) / std within one group, over the episodes that have a reward.

    GRPO, arXiv:2402.03300, sec. 4.1.2; without the division Dr. GRPO, arXiv:2503.20783. The
    standard deviation is the population's (divided by the true number of scored episodes), so
    nothing is added to it: where rewards are as good as equal the advantage is exactly 0.

    Args:
        rewards: [G] one an episode; None or NaN = could not be scored: its advantage is 0 and
            its siblings' are as if it had not been there.
        divide_by_std: False leaves the unit of the reward.
        min_spread: Largest minus smallest reward below which all advantages are 0.
    """
    values = np.array([np.nan if r is None else r for r in rewards], dtype=np.float64)
    scored = ~np.isnan(values)
    advantages = np.zeros(len(values))
    if not scored.any():
        return advantages
    known = values[scored]
    if not np.isfinite(known).all():
        raise ValueError(f"rewards: {list(rewards)} has an infinite entry; must be finite")
    if known.max() - known.min() <= min_spread:
        return advantages
    centred = known - known.mean()
    advantages[scored] = centred / known.std() if divide_by_std else centred
    return advantages
