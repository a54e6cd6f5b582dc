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
    """What of a flattened tensor one rank holds: runs of elements at equal distances."""

    start: int
    count: int
    """Of one run."""
    runs: int = 1
    stride: int = 0
    """From the start of a run to that of the next."""
    is_copy: bool = False
    """Another rank holds the same and is read in its place."""

    @property
    def size(self) -> int:
        """Elements of all runs; on this rank they lie end to end."""
        return self.count * self.runs

    def before(self, place: int) -> int:
        """How many of its elements lie before a place in the whole."""
        past = place - self.start
        if self.runs == 1:
            return min(max(past, 0), self.count)
        full = min(max(past // self.stride, 0), self.runs)
        return full * self.count + (
            min(max(past - full * self.stride, 0), self.count) if full < self.runs else 0
        )

    def places(self, low: int, high: int) -> "slice | Tensor":
        """Where its own elements low to high lie in the whole."""
        if self.runs == 1:
            return slice(self.start + low, self.start + high)
        own = torch.arange(low, high)
        return self.start + own // self.count * self.stride + own % self.count


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
            if not extents[self.ranks.rank].is_copy:
                self._send(own, 0)
            return own.new_empty(0)
        size = sum(e.size for e in extents if not e.is_copy)
        return self._fill(torch.empty(size, dtype=own.dtype), 0, extents, own)

    def deal(self, extents: Sequence[Extent], whole: Tensor, own: Tensor) -> None:
        """Fill every rank's part, `own` [n], from the flattened `whole` on rank 0. Collective."""
        if self.ranks.rank:
            self._receive(own, 0)
            return
        for rank, extent in enumerate(extents):
            part = whole[extent.places(0, extent.size)]
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
            if not held.is_copy:
                self._send(own[held.before(start) : held.before(start + count)], 0)

    def _order(self, index: int, bounds: Extent) -> None:
        if self.ranks.size > 1:
            order = torch.tensor([index, bounds.start, bounds.count])
            self._call(lambda: dist.broadcast(order, 0, self._group))

    def _fill(self, out: Tensor, start: int, extents: Sequence[Extent], own: Tensor) -> Tensor:
        for rank, extent in enumerate(extents):
            if extent.is_copy:
                continue
            low, high = extent.before(start), extent.before(start + len(out))
            part = own[low:high] if rank == 0 else torch.empty(high - low, dtype=out.dtype)
            if rank:
                self._receive(part, rank)
            at = extent.places(low, high)
            if isinstance(at, slice):
                out[at.start - start : at.stop - start].copy_(part)
            else:
                out[at - start] = part.to(out.device)
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
