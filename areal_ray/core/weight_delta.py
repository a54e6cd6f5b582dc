"""What of a bucket differs from the version before, bit by bit: all that a delta publish sends.

Compared are units as wide as the narrowest element of the plan, whatever they mean, so a NaN or a
negative zero is a change like any other. A bucket in which too much has changed travels whole.

Two messages: a header of fixed length, then all encoded buckets as one body. Both are proven before
anything is put over the version before: a count that a fault altered would have the other side wait
for bytes that never come, a position would have it write elsewhere.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.buckets import DIGEST_BYTES, ITEMSIZE_BYTES, BucketPlan, digest

WHOLE = -1
"""In place of a count of changed units: the bucket's bytes follow as they are."""

POSITION_BYTES = 4


def unit_bytes(plan: BucketPlan) -> int:
    """Width of what is compared; offsets and lengths of all tensors are multiples of it."""
    widths = (ITEMSIZE_BYTES[tensor.dtype] for tensor in plan.tensors if tensor.num_bytes)
    return min(widths, default=1)


def encode(
    old: NDArray[np.uint8] | None, new: NDArray[np.uint8], unit: int
) -> tuple[int, NDArray[np.uint8]]:
    """A bucket as its changes.

    Args:
        old: Its bytes in the version before; None = the other side has none.
        new: As many bytes.
        unit: From `unit_bytes`.

    Returns:
        Number of changed units, and their positions (uint32 [n]) and values ([n]) as bytes; or
        WHOLE and the bucket itself.
    """
    if old is None:
        return WHOLE, new
    dtype = np.dtype(f"u{unit}")
    values = new.view(dtype)
    positions = np.flatnonzero(old.view(dtype) != values)
    if len(positions) * (POSITION_BYTES + unit) >= len(new):
        return WHOLE, new
    where = positions.astype(np.uint32).view(np.uint8)
    return len(positions), np.concatenate([where, values[positions].view(np.uint8)])


def encoded_bytes(plan: BucketPlan, counts: Sequence[int]) -> list[int]:
    """Length of each bucket's encoding, by its count."""
    per_unit = POSITION_BYTES + unit_bytes(plan)
    lengths = []
    for bucket, count in enumerate(counts):
        start, end = plan.bounds(bucket)
        lengths.append(end - start if count == WHOLE else count * per_unit)
    return lengths


def header_bytes(plan: BucketPlan) -> int:
    """Length of the header."""
    return 2 * DIGEST_BYTES + 8 * (1 + plan.num_buckets)


def seal_header(base: int, counts: Sequence[int], body: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[header_bytes]: the version that is changed, the count of each bucket, and what proves it."""
    told = bytes.fromhex(digest(body)) + np.array([base, *counts], np.int64).tobytes()
    return np.frombuffer(bytes.fromhex(digest(told)) + told, np.uint8).copy()


def open_header(header: NDArray[np.uint8]) -> tuple[int, list[int], str]:
    """The version that is changed, the count of each bucket, the digest of the body.

    Raises:
        ValueError: It is damaged.
    """
    told = header[DIGEST_BYTES:].tobytes()
    if header[:DIGEST_BYTES].tobytes().hex() != digest(told):
        raise ValueError("the counts of what changed differ from their digest")
    base, *counts = np.frombuffer(told, np.int64, offset=DIGEST_BYTES).tolist()
    return base, counts, told[:DIGEST_BYTES].hex()
