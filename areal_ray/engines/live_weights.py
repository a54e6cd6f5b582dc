"""Whether live weights are what they were made from: an engine's half of the canary."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


def first_difference(pairs: Iterable[tuple[str, Any, Any]]) -> str:
    """Name of the first live tensor that is not as it should be; empty if all are.

    Args:
        pairs: (name, live, as it should be): tensors, None, or dataclasses of these.
    """
    for name, live, expected in pairs:
        if is_dataclass(live):
            parts = ((f.name, getattr(live, f.name), getattr(expected, f.name))
                     for f in fields(live))  # fmt: skip
            within = first_difference((f"{name}.{part}", *both) for part, *both in parts)
            if within:
                return within
        elif live is not None and not _is_same(live, expected):
            return name
    return ""


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # NaN is not equal to itself, but weights that diverged are not wrong weights.
    return torch.equal(one, other) or torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )
