"""Whether live weights are what they were made from: an engine's half of the canary."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from areal_ray.engines.packed_linear import PackedLinear


def first_difference(pairs: Iterable[tuple[str, Any, Any]]) -> str:
    """Name of the first live tensor that is not as it should be; empty if all are.

    Args:
        pairs: (name, live, as it should be): tensors, None, or dataclasses of these; live ones may
            be packed, and are compared as unpacked from the memory that products read.
    """
    for name, live, expected in pairs:
        if is_dataclass(live):
            parts = ((f.name, getattr(live, f.name), getattr(expected, f.name))
                     for f in fields(live))  # fmt: skip
            within = first_difference((f"{name}.{part}", *both) for part, *both in parts)
            if within:
                return within
        elif isinstance(live, PackedLinear):
            if not _is_same(live.plain(), expected):
                return name
        elif live is not None and not _is_same(live, expected):
            return name
    return ""


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: NaN is not equal to itself, but weights that diverged are not wrong weights."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits, others = _bits(one), _bits(other)
    # A view of wider elements has to begin and end at a multiple of their width.
    places = (len(bits), bits.storage_offset(), others.storage_offset())
    if all(int(place) % 8 == 0 for place in places):
        bits, others = bits.view(torch.int64), others.view(torch.int64)  # fewer to be compared
    return torch.equal(bits, others)


def _bits(tensor: Tensor) -> Tensor:
    """Its bytes [num_bytes], copied only where they do not lie together."""
    if tensor.dim() == 2 and not tensor.is_contiguous():
        tensor = tensor.t()  # such weights are kept transposed
    return tensor.contiguous().reshape(-1).view(torch.uint8)
