"""What counts as a number where user code hands one back."""

import math
import numbers
from typing import Any


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
