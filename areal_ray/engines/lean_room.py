"""Where the tensors of `LeanWeights` are put, or held to what they were made from.

Both run at the speed of memory, so a few threads share them, each with a slice at a time that its
core's cache holds.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self, TypeVarTuple

import torch
from torch import Tensor

from areal_ray.engines.joined_rows import JoinedRows, write
from areal_ray.engines.live_weights import is_same
from areal_ray.engines.packed_linear import LinearWeight, PackedLinear

_Given = TypeVarTuple("_Given")

_MOST_THREADS = 4
"""More share the same memory."""

_SPAN_BYTES = 8 * 1024**2
"""What one thread takes at a time; less than one is done at once."""

_SLICE_BYTES = 2 * 1024**2

_UNDER_WAY = 4 * _MOST_THREADS
"""Spans at most, since each keeps what it is made from."""


class Room:
    """Memory for the tensors of one version: of a version no longer in use, or fresh.

    Whole once the `with` around it has ended; until then what was given is read.
    """

    def __init__(
        self,
        spare: Sequence[Tensor],
        spare_packed: Sequence[PackedLinear],
        dtype: torch.dtype,
        device: torch.device,
        origin: object | None = None,
    ) -> None:
        """`origin`: Stands for what is put; see `PackedLinear.write`."""
        self._origin = origin
        self._spare = list(reversed(spare))
        self._spare_packed = list(reversed(spare_packed))
        self._dtype = dtype
        self._device = device
        self._pool = ThreadPoolExecutor(
            min(_num_cores(), _MOST_THREADS), "weights", torch.set_num_threads, (1,)
        )
        self._under_way: deque[Future[None]] = deque()
        self._own = threading.local()
        """A slice's memory for each thread: fresh pages would cost more than what is done there."""
        self.blocks: list[Tensor] = []
        """What was taken, in order."""
        self.packed: list[PackedLinear] = []
        """What was packed, in order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        if error is None:
            self._wait()

    def take(self, *shape: int) -> Tensor:
        """A tensor to be written; of the same shapes in the same order for every version."""
        if self._spare:
            block = self._spare.pop()
        else:
            block = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.blocks.append(block)
        return block

    def copy(self, source: Tensor) -> Tensor:
        """The source in the engine's type and place."""
        target = self.take(*source.shape)
        self.put(target, source)
        return target

    def put(self, target: Tensor, source: Tensor, factor: Tensor | None = None) -> None:
        """Fill what was taken, or a view of it, with the source, rows times a factor [in]."""
        self._spread(self._fill, target, source, factor)

    def pack(self, source: Tensor | JoinedRows) -> PackedLinear:
        """The source [out, in] in the engine's type, packed."""
        rows = source if isinstance(source, JoinedRows) else JoinedRows([source])
        num_rows = rows.shape[0]
        if not self._spare_packed:
            made = rows.read(slice(0, num_rows), self._fresh)
            self.packed.append(PackedLinear(made, self._origin))
            return self.packed[-1]
        packed = self._spare_packed.pop()
        self.packed.append(packed)
        is_large = rows.shape.numel() * self._dtype.itemsize > _SPAN_BYTES
        for first in range(0, num_rows, packed.slice_rows):
            given = packed, rows, slice(first, min(first + packed.slice_rows, num_rows))
            if is_large:
                self._submit(self._fill_packed, *given)
            else:
                self._fill_packed(*given)
        return packed

    def _spread(
        self,
        fill: Callable[[Tensor, Tensor, Tensor | None], None],
        target: Tensor,
        source: Tensor,
        factor: Tensor | None,
    ) -> None:
        num_bytes = target.numel() * target.itemsize
        if num_bytes <= _SPAN_BYTES or target.device.type != "cpu":
            fill(target, source, factor)
            return
        rows = max(1, _SPAN_BYTES * len(target) // num_bytes)
        for part, given in _slices(target, source, rows):
            self._submit(fill, part, given, factor)

    def _submit(self, function: Callable[[*_Given], None], *given: *_Given) -> None:
        if len(self._under_way) >= _UNDER_WAY:
            self._under_way.popleft().result()
        self._under_way.append(self._pool.submit(partial(_inferring, function, *given)))

    def _wait(self) -> None:
        while self._under_way:
            self._under_way.popleft().result()

    def _fill(self, target: Tensor, source: Tensor, factor: Tensor | None) -> None:
        write(target, source, factor)

    def _fill_packed(self, packed: PackedLinear, source: JoinedRows, rows: slice) -> None:
        packed.write(rows.start, source.read(rows, self._scratch), self._origin)

    def _cast(self, source: Tensor) -> Tensor:
        """The source in the engine's type, in this thread's scratch memory if it is in another."""
        if source.dtype == self._dtype and source.is_contiguous():
            return source.to(self._device)
        return self._scratch(source.shape).copy_(source)

    def _fresh(self, shape: torch.Size) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _scratch(self, shape: torch.Size) -> Tensor:
        flat: Tensor | None = getattr(self._own, "flat", None)
        if flat is None or flat.numel() < shape.numel():
            flat = self._own.flat = self._fresh(torch.Size((shape.numel(),)))
        return flat[: shape.numel()].view(shape)


class ProvingRoom(Room):
    """Live weights, which what is put must be bit for bit: they are read, not written."""

    def __init__(
        self,
        live: Sequence[Tensor],
        live_packed: Sequence[PackedLinear],
        dtype: torch.dtype,
        device: torch.device,
        origin: object | None = None,
    ) -> None:
        """`live` and `live_packed`: As another room's `blocks` and `packed`."""
        super().__init__(live, live_packed, dtype, device, origin)
        self.differing: set[int] = set()
        """Addresses of the weights that hold anything else."""

    def _fill(self, target: Tensor, source: Tensor, factor: Tensor | None) -> None:
        num_bytes = target.numel() * target.itemsize
        rows = max(1, _SLICE_BYTES * len(target) // max(num_bytes, 1))
        if num_bytes == 0 or target.device.type != "cpu":
            rows = max(1, len(target))
        for live, given in _slices(target, source, rows):
            if factor is None:
                made = self._cast(given)
            else:
                made = self._scratch(live.shape)
                write(made, given, factor)
            if not is_same(live, made):
                self.differing.add(address(target))

    def _fill_packed(self, packed: PackedLinear, source: JoinedRows, rows: slice) -> None:
        origin = self._origin
        if origin is not None and packed.is_of(rows.start, rows.stop - rows.start, origin):
            return
        if not packed.holds(rows.start, source.read(rows, self._scratch)):
            self.differing.add(address(packed))


def _slices(target: Tensor, source: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(target), rows):
        yield target[start : start + rows], source[start : start + rows]


def address(weight: LinearWeight) -> int:
    """Of the memory that a weight is, or is a view of."""
    if isinstance(weight, PackedLinear):
        return weight.address
    return weight.untyped_storage().data_ptr()


def _inferring(function: Callable[[*_Given], None], *given: *_Given) -> None:
    with torch.inference_mode():  # a thread has its own
        function(*given)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
