"""Weights as bytes: where each tensor lies, in which bucket it travels, and proof of arrival.

All tensors are laid out in one flat run of bytes, each at an offset its dtype can be viewed at.
Buckets are equal slices of that run, whatever tensors they cut, so a tensor larger than a bucket
needs no special case and no bucket but the last is short. Bytes only: no torch, no I/O.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash
from numpy.typing import NDArray

from areal_ray.core.weight_names import difference

ALIGNMENT_BYTES = 16
"""Every tensor begins at a multiple of it: the widest element (complex128) can be viewed there."""

DIGEST_BYTES = 16
"""XXH3 of 128 bits: no bit was lost, flipped, zeroed or put elsewhere on the way, or it is seen but
for a chance of 2^-128. It is no proof against who damages on purpose; whoever can write into a
publish owns the run already. Measured at 26 GB/s from memory, where SHA-256 runs at 1.8."""

ITEMSIZE_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of one element, by torch's name of the dtype."""

_HEADER_BYTES = 16
"""A sealed payload ends with its version (int64), the manifest's first 8 bytes, and digests."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the manifest."""

    name: str
    """As in the Hugging Face checkpoint."""
    shape: tuple[int, ...]
    dtype: str
    """As it travels; a key of ITEMSIZE_BYTES."""
    offset_bytes: int
    """From the start of the flat run."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one tensor that one bucket carries."""

    name: str
    dtype: str
    tensor_start_byte: int
    bucket_start_byte: int
    num_bytes: int


@dataclass(frozen=True)
class BucketPlan:
    """The manifest of one model and how it is cut; equal on both sides of a publish."""

    tensors: tuple[TensorSpec, ...]
    bucket_bytes: int
    total_bytes: int
    """Length of the flat run, padding between tensors included."""

    @property
    def num_buckets(self) -> int:
        """0 where no tensor has an element."""
        return -(-self.total_bytes // self.bucket_bytes)

    @property
    def payload_bytes(self) -> int:
        """Length of a sealed payload: the flat run, then what proves it."""
        return self.total_bytes + _HEADER_BYTES + DIGEST_BYTES * self.num_buckets

    @cached_property
    def digest(self) -> str:
        """Hex digest of the manifest and the cut: equal plans, equal digests."""
        rows = [(t.name, t.shape, t.dtype, t.offset_bytes) for t in self.tensors]
        return digest(repr((rows, self.bucket_bytes, self.total_bytes)).encode())

    def bounds(self, bucket: int) -> tuple[int, int]:
        """First byte and end (exclusive) of a bucket in the flat run."""
        start = bucket * self.bucket_bytes
        return start, min(start + self.bucket_bytes, self.total_bytes)

    def pieces(self, bucket: int) -> Iterator[Piece]:
        """What of each tensor lies in a bucket, in order."""
        start, end = self.bounds(bucket)
        first = max(bisect_right(self.tensors, start, key=lambda t: t.offset_bytes) - 1, 0)
        for tensor in self.tensors[first:]:
            if tensor.offset_bytes >= end:
                return
            low = max(tensor.offset_bytes, start)
            high = min(tensor.offset_bytes + tensor.num_bytes, end)
            if low < high:
                yield Piece(
                    tensor.name, tensor.dtype, low - tensor.offset_bytes, low - start, high - low
                )

    def mismatch(self, expected: Mapping[str, tuple[int, ...]]) -> str:
        """What is missing, extra or of another shape than expected; empty if nothing is."""
        return difference({tensor.name: tensor.shape for tensor in self.tensors}, expected)


def plan_buckets(
    tensors: Iterable[tuple[str, tuple[int, ...], str]], bucket_bytes: int
) -> BucketPlan:
    """Lay out (name, shape, dtype) in the order given and cut the run into buckets.

    Raises:
        ValueError: A name occurs twice, a dtype cannot travel, or a bucket would cut an element.
    """
    if bucket_bytes < 1 or bucket_bytes % ALIGNMENT_BYTES:
        raise ValueError(f"bucket_bytes: {bucket_bytes}; must be a multiple of {ALIGNMENT_BYTES}")
    specs: list[TensorSpec] = []
    seen: set[str] = set()
    offset = end = 0
    for name, shape, dtype in tensors:
        if name in seen:
            raise ValueError(f"weights: tensor {name} is named twice; names must be unique")
        if dtype not in ITEMSIZE_BYTES:
            known = ", ".join(ITEMSIZE_BYTES)
            raise ValueError(f"weights: tensor {name} has dtype {dtype}; must be one of {known}")
        seen.add(name)
        num_bytes = ITEMSIZE_BYTES[dtype]
        for extent in shape:
            num_bytes *= int(extent)
        specs.append(TensorSpec(name, tuple(int(n) for n in shape), dtype, offset, num_bytes))
        end = offset + num_bytes
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return BucketPlan(tuple(specs), bucket_bytes, end)


def digest(content: bytes | NDArray[np.uint8]) -> str:
    """Hex digest of contiguous bytes; equal digests are taken as equal bytes."""
    return xxhash.xxh3_128_hexdigest(content if isinstance(content, bytes) else content.data)


class RunningDigest:
    """The digest of contiguous bytes that come in parts, each hashed while a cache holds it."""

    PART_BYTES = 2 * 1024**2
    """As many are worth one step."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, part: NDArray[np.uint8]) -> None:
        """The next part."""
        self._state.update(part.data)

    def __str__(self) -> str:
        """As `digest` of all so far."""
        return self._state.hexdigest()


def bucket_digests(plan: BucketPlan, flat: NDArray[np.uint8]) -> list[str]:
    """Digest of each bucket of a flat run [total_bytes]."""
    bounds = (plan.bounds(bucket) for bucket in range(plan.num_buckets))
    return [digest(flat[start:end]) for start, end in bounds]


def seal(
    plan: BucketPlan, payload: NDArray[np.uint8], version: int, digests: Sequence[str]
) -> None:
    """Write version, manifest and digests behind the flat run of a payload [payload_bytes]."""
    trailer = version.to_bytes(8, "little") + bytes.fromhex(plan.digest)[:8]
    trailer += b"".join(bytes.fromhex(text) for text in digests)
    payload[plan.total_bytes :] = np.frombuffer(trailer, np.uint8)


def verify(plan: BucketPlan, payload: NDArray[np.uint8], version: int) -> list[str]:
    """Digests of a sealed payload, each checked against the bytes it stands for.

    Raises:
        ValueError: The payload is of another length, manifest or version, or a bucket differs.
    """
    if payload.shape != (plan.payload_bytes,):
        raise ValueError(f"payload has shape {payload.shape}; must be ({plan.payload_bytes},)")
    trailer = payload[plan.total_bytes :].tobytes()
    if trailer[8:_HEADER_BYTES] != bytes.fromhex(plan.digest)[:8]:
        raise ValueError("payload was made by another plan; names, shapes and cut must be equal")
    sealed = int.from_bytes(trailer[:8], "little")
    if sealed != version:
        raise ValueError(f"payload holds version {sealed}; must be {version}")
    digests = bucket_digests(plan, payload[: plan.total_bytes])
    for bucket, text in enumerate(digests):
        start = _HEADER_BYTES + bucket * DIGEST_BYTES
        if trailer[start : start + DIGEST_BYTES].hex() != text:
            raise ValueError(f"bucket {bucket} of {plan.num_buckets} differs from its digest")
    return digests
