"""Where the tensors of `LeanWeights` are put, or held to what they were made from.

Both run at the speed of memory, so a few threads share them, each with a slice at a time that its
core's cache holds.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from areal_ray.engines.live_weights import is_same

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

    def __init__(self, spare: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._spare = list(reversed(spare))
        self._dtype = dtype
        self._device = device
        self._pool = ThreadPoolExecutor(
            min(_num_cores(), _MOST_THREADS), "weights", torch.set_num_threads, (1,)
        )
        self._under_way: deque[Future[None]] = deque()
        self.blocks: list[Tensor] = []
        """What was taken, in order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown()
        while self._under_way and error is None:
            self._under_way.popleft().result()

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
        num_bytes = target.numel() * target.itemsize
        if num_bytes <= _SPAN_BYTES or target.device.type != "cpu":
            self._fill(target, source, factor)
            return
        rows = max(1, _SPAN_BYTES * len(target) // num_bytes)
        for part, given in _slices(target, source, rows):
            if len(self._under_way) >= _UNDER_WAY:
                self._under_way.popleft().result()
            self._under_way.append(self._pool.submit(_inferring, self._fill, part, given, factor))

    def _fill(self, target: Tensor, source: Tensor, factor: Tensor | None) -> None:
        if factor is None:
            target.copy_(source)
        else:
            torch.mul(source, factor, out=target)


class ProvingRoom(Room):
    """Live tensors, which what is put must be bit for bit: they are read, not written."""

    def __init__(self, live: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """`live`: As another room's `blocks`."""
        super().__init__(live, dtype, device)
        self.differing: set[int] = set()
        """Addresses of the blocks that hold anything else."""
        self._own = threading.local()
        """A slice's memory for each thread: fresh pages would cost more than what is done there."""

    def _fill(self, target: Tensor, source: Tensor, factor: Tensor | None) -> None:
        num_bytes = target.numel() * target.itemsize
        rows = max(1, _SLICE_BYTES * len(target) // max(num_bytes, 1))
        if num_bytes == 0 or target.device.type != "cpu":
            rows = max(1, len(target))
        for live, given in _slices(target, source, rows):
            if factor is None and given.is_contiguous() and given.dtype == live.dtype:
                made = given.to(live.device)
            else:
                made = self._scratch(live)
                super()._fill(made, given, factor)
            if not is_same(live, made):
                self.differing.add(address(target))

    def _scratch(self, like: Tensor) -> Tensor:
        flat: Tensor | None = getattr(self._own, "flat", None)
        if flat is None or flat.numel() < like.numel() or flat.dtype != like.dtype:
            flat = self._own.flat = like.new_empty(like.numel())
        return flat[: like.numel()].view(like.shape)


def _slices(target: Tensor, source: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(target), rows):
        yield target[start : start + rows], source[start : start + rows]


def address(tensor: Tensor) -> int:
    """Of the block that a tensor is, or is a view of."""
    return tensor.untyped_storage().data_ptr()


def _inferring(
    function: Callable[[Tensor, Tensor, Tensor | None], None],
    target: Tensor,
    source: Tensor,
    factor: Tensor | None,
) -> None:
    with torch.inference_mode():  # a thread has its own
        function(target, source, factor)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
