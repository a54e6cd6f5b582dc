"""Rows of weights that lie one below the other, made slice by slice as they are packed.

So what is joined, reordered and multiplied stays in a core's cache until it is packed, instead of
going through memory as a whole; threads may read slices of one at once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class JoinedRows:
    """Parts [rows, in], with their rows in an order of their own and times a factor."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        orders: Sequence[Tensor | None] | None = None,
        factor: Tensor | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            parts: Weights [rows, in] of one width.
            orders: For each part, which of its rows [rows] comes first, second, ...; None = as is.
            factor: [in] that every row is multiplied by; None = one.
        """
        self._parts = parts
        self._orders = orders if orders is not None else [None] * len(parts)
        self._factor = factor
        self.shape = torch.Size((sum(map(len, parts)), parts[0].shape[1]))

    def read(self, rows: slice, room: Callable[[torch.Size], Tensor]) -> Tensor:
        """[rows, in] of them: in memory that `room` gives, or where they lie if they lie there so.

        Args:
            rows: First and end (exclusive), both given.
            room: Gives memory of a shape, in the type and place that is wanted.
        """
        target = room(torch.Size((rows.stop - rows.start, self.shape[1])))
        if self._are_as_they_lie(target):
            return self._parts[0][rows]
        start = 0
        for part, order in zip(self._parts, self._orders, strict=True):
            low, high = max(rows.start, start), min(rows.stop, start + len(part))
            if low < high:
                place = target[low - rows.start : high - rows.start]
                write(place, _taken(part, order, slice(low - start, high - start), place),
                      self._factor)  # fmt: skip
            start += len(part)
        return target

    def _are_as_they_lie(self, target: Tensor) -> bool:
        if len(self._parts) > 1 or self._orders[0] is not None or self._factor is not None:
            return False
        (part,) = self._parts
        return part.is_contiguous() and (part.dtype, part.device) == (target.dtype, target.device)


def write(target: Tensor, source: Tensor, factor: Tensor | None) -> None:
    """Fill the target with the source in its type, rows times a factor [in]."""
    if factor is not None:
        torch.mul(source, factor, out=target)
    elif source is not target:
        target.copy_(source)


def _taken(part: Tensor, order: Tensor | None, rows: slice, place: Tensor) -> Tensor:
    """Rows of a part; reordered ones of the wanted type are in their place already."""
    if order is None:
        return part[rows]
    if (part.dtype, part.device) == (place.dtype, place.device):
        return torch.index_select(part, 0, order[rows], out=place)
    return part.index_select(0, order[rows])
