"""Tensors that lie in parts over the ranks: rank 0 reads them, or gives each rank its part.

Each rank holds one run of elements of every flattened tensor, or none. Data goes through host
memory in a group of its own, so that reading never mixes with the passes. Rank 0 alone knows what
it reads and when: the others `serve`, slice by slice, until it releases them.
Waits for: the other ranks; bounded by the group's time-out, ended at once by a rank's death.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_ray.engines.process_group import RankGroup

_RELEASE = -1


@dataclass(frozen=True, slots=True)
class Extent:
    """The run of a flattened tensor that one rank holds."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class PartedTensor:
    """One tensor as rank 0 sees it; see `sharding.ShardedTensor`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]


class PartGroup:
    """The ranks' own connections for parts of tensors."""

    def __init__(self, ranks: RankGroup, timeout_s: float) -> None:
        """Collective; alone it needs no connection."""
        self.ranks = ranks
        self._group: Any = None
        if ranks.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def extents(self, own: Mapping[str, Extent]) -> dict[str, list[Extent]]:
        """What every rank holds of each tensor, by rank. Collective; all give the same names."""
        if self.ranks.size == 1:
            return {name: [extent] for name, extent in own.items()}
        every: list[Any] = [None] * self.ranks.size
        self._call(lambda: dist.all_gather_object(every, dict(own), group=self._group))
        return {name: [held[name] for held in every] for name in own}

    def collect(self, extents: Sequence[Extent], own: Tensor) -> Tensor:
        """The whole flattened tensor on rank 0, [0] elsewhere. Collective.

        Args:
            extents: By rank; together they are the whole.
            own: [n] this rank's part.
        """
        if self.ranks.rank:
            self._send(own, 0)
            return own.new_empty(0)
        whole = torch.empty(sum(e.count for e in extents), dtype=own.dtype)
        return self._fill(whole, 0, extents, own)

    def deal(self, extents: Sequence[Extent], whole: Tensor, own: Tensor) -> None:
        """Fill every rank's part, `own` [n], from the flattened `whole` on rank 0. Collective."""
        if self.ranks.rank:
            self._receive(own, 0)
            return
        for rank, extent in enumerate(extents):
            part = whole[extent.start : extent.start + extent.count]
            if rank == 0:
                own.copy_(part)
            else:
                self._send(part.to(own.dtype), rank)

    def read(self, index: int, bounds: Extent, extents: Sequence[Extent], own: Tensor) -> Tensor:
        """Rank 0: a slice of tensor number `index` from the ranks that `answer`."""
        self._order(index, bounds)
        out = torch.empty(bounds.count, dtype=own.dtype)
        return self._fill(out, bounds.start, extents, own)

    def release(self) -> None:
        """Rank 0: nothing more is wanted."""
        self._order(_RELEASE, Extent(0, 0))

    def answer(self, part_of: Callable[[int], tuple[Extent, Tensor]]) -> None:
        """Other ranks: send rank 0 what it reads until it releases.

        Args:
            part_of: Number of a tensor -> what this rank holds of it, and where it lies.
        """
        while self.ranks.rank:
            order = torch.zeros(3, dtype=torch.int64)
            self._call(partial(dist.broadcast, order, 0, self._group))
            index, start, count = (int(n) for n in order)
            if index == _RELEASE:
                return
            held, own = part_of(index)
            low, high = _overlap(held, Extent(start, count))
            self._send(own[low - held.start : high - held.start], 0)

    def _order(self, index: int, bounds: Extent) -> None:
        if self.ranks.size > 1:
            order = torch.tensor([index, bounds.start, bounds.count])
            self._call(lambda: dist.broadcast(order, 0, self._group))

    def _fill(self, out: Tensor, start: int, extents: Sequence[Extent], own: Tensor) -> Tensor:
        for rank, extent in enumerate(extents):
            low, high = _overlap(extent, Extent(start, len(out)))
            target = out[low - start : high - start]
            if rank == 0:
                target.copy_(own[low - extent.start : high - extent.start])
            else:
                self._receive(target, rank)
        return out

    def _send(self, part: Tensor, rank: int) -> None:
        if part.numel():
            self._call(lambda: dist.send(part.contiguous().cpu(), rank, self._group))

    def _receive(self, out: Tensor, rank: int) -> None:
        if not out.numel():
            return
        landing = out if out.device.type == "cpu" else torch.empty_like(out, device="cpu")
        self._call(lambda: dist.recv(landing, rank, self._group))
        if landing is not out:
            out.copy_(landing)

    def _call(self, call: Callable[[], object]) -> None:
        self.ranks.guarded("exchange of weights", call)


def _overlap(one: Extent, other: Extent) -> tuple[int, int]:
    low = max(one.start, other.start)
    return low, max(low, min(one.start + one.count, other.start + other.count))
