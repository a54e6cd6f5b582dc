"""Tensors as the bytes that travel: packed into buckets by a learner, viewed again by a replica."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.core.buckets import BucketPlan, RunningDigest
from areal_ray.core.weight_delta import POSITION_BYTES, WHOLE
from areal_ray.engines.arriving import ArrivingTensors

if TYPE_CHECKING:
    from areal_ray.engines.sharding import ShardedTensor


Weights = Mapping[str, "torch.Tensor | ShardedTensor"]
"""Tensors by name, tied ones once. Asking for one may be what gathers it."""


def describe(weights: Weights, dtype: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype that travels) of each tensor; `dtype` replaces floating-point ones."""
    for name, tensor in weights.items():
        cast = dtype and tensor.dtype.is_floating_point
        yield name, tuple(tensor.shape), dtype if cast else str(tensor.dtype).removeprefix("torch.")


class InOrder:
    """Weights read from front to back in the plan's order: each asked for once, then let go.

    So of a sharded learner's weights no more is gathered at a time than one piece of one bucket, or
    one tensor where the mapping gives whole ones.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._name: str | None = None
        self._source: torch.Tensor | ShardedTensor | None = None

    def part(self, name: str, first: int, count: int) -> torch.Tensor:
        """[count] elements of a tensor, flattened, from the first on."""
        if name != self._name or self._source is None:
            self._source = None  # before the next is gathered
            source = self._weights[name]
            if isinstance(source, torch.Tensor):
                source = source.detach().reshape(-1)
            self._name, self._source = name, source
        if isinstance(self._source, torch.Tensor):
            return self._source[first : first + count]
        return self._source.read(first, first + count)


def fill_bucket(
    plan: BucketPlan, bucket: int, weights: InOrder, out: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Copy (and cast) what a bucket carries into `out`, uint8 [bucket length].

    Yields:
        Each part of it once it is written: all of it, in order.
    """
    done = 0
    for piece in plan.pieces(bucket):
        dtype = getattr(torch, piece.dtype)
        start = piece.bucket_start_byte
        target = out[start:][: piece.num_bytes].view(dtype)
        first = piece.tensor_start_byte // dtype.itemsize
        for end in _copied(target, weights.part(piece.name, first, target.numel())):
            yield out[done : start + end]
            done = start + end
    yield out[done:]


def _copied(target: torch.Tensor, source: torch.Tensor) -> Iterator[int]:
    """How many bytes are, part by part; it lets go of the source as it ends."""
    step = RunningDigest.PART_BYTES // target.itemsize
    for first in range(0, target.numel(), step):
        part = target[first : first + step]
        part.copy_(source[first : first + step])
        yield (first + part.numel()) * target.itemsize


def apply_changes(target: torch.Tensor, count: int, encoded: torch.Tensor, unit: int) -> None:
    """Bring a bucket [bytes] from the version before to the one it was encoded from.

    See `core.weight_delta.encode`; both tensors are uint8, on the same device.
    """
    if count == WHOLE:
        target.copy_(encoded)
        return
    if count == 0:
        return
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[unit]
    cut = count * POSITION_BYTES
    # Cloned, since a view needs its elements to begin at a multiple of their width.
    positions = encoded[:cut].clone().view(torch.int32).long()
    target.view(dtype)[positions] = encoded[cut:].clone().view(dtype)


def tensor_views(plan: BucketPlan, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each tensor as a view of a flat uint8 run [total_bytes]."""
    views = {}
    for spec in plan.tensors:
        span = flat[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        views[spec.name] = span.view(getattr(torch, spec.dtype)).view(spec.shape)
    return views


def arriving_views(plan: BucketPlan, flat: torch.Tensor) -> ArrivingTensors:
    """The same of a run that is filled from front to back."""
    ends = {spec.name: spec.offset_bytes + spec.num_bytes for spec in plan.tensors}
    return ArrivingTensors(tensor_views(plan, flat), ends)


def as_tensor(content: NDArray[np.uint8]) -> torch.Tensor:
    """The same memory as a tensor."""
    return torch.from_numpy(content)


def flat_buffer(num_bytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Zeroed bytes [num_bytes], so that padding is the same on every side."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def write_bytes(flat: torch.Tensor, content: NDArray[np.uint8]) -> None:
    """Copy host bytes, possibly read-only ones, into as many bytes on any device."""
    if flat.device.type == "cpu":
        np.copyto(flat.numpy(), content)
    else:
        flat.copy_(torch.from_numpy(content.copy()))
