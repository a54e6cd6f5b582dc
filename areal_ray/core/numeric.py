"""What counts as a number where user code hands one back."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

LARGEST_REWARD = 1e18
"""Its square is finite in float32 and its powers in float64, so that one absurd reward stops
neither the statistics of a step nor a critic."""


def as_number(value: Any) -> float | None:
    """The value of a Python, NumPy or torch scalar, truth values included; None = no number.

    An integer too large for a float becomes infinite.
    """
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_reward(value: float) -> bool:
    """Whether a number can be trained on: finite, and at most 1e18 either way."""
    return abs(value) <= LARGEST_REWARD  # False for NaN


def is_flat(rewards: Sequence[float], min_spread: float) -> bool:
    """Whether siblings' rewards are as good as equal, so that none did better than another."""
    return not len(rewards) or max(rewards) - min(rewards) <= min_spread
