"""Versions as safetensors files on storage that every node of a run mounts (`transport: disk`).

A file holds a version's tensors as they travel, and in its metadata the version, the manifest's
digest and the digest of each bucket. Any reader of safetensors can open it. It appears under its
name only when it is whole. The learner removes versions older than the one before; a version that
waits for its evaluation is kept by a pin, an empty file beside it.
"""

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.buckets import ITEMSIZE_BYTES, BucketPlan, TensorSpec, bucket_digests
from areal_ray.core.storage import refused, writing
from areal_ray.errors import PublishError

VERSIONS_FOLDER = "weights"
"""In the run folder."""

_DTYPES: Final[Mapping[str, str]] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
"""torch's name of a dtype -> that of the format."""

_LONGEST_HEADER_BYTES = 100_000_000
"""As the format's own reader allows."""
_KEPT_BEFORE = 1
"""Versions older than the newest that are kept: a late joiner may be reading the committed one."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """Where a version's bytes lie; what travels in place of them."""

    path: str
    version: int


def write_version(
    folder: Path, plan: BucketPlan, version: int, flat: NDArray[np.uint8], digests: Sequence[str]
) -> WeightFile:
    """Write a version out of its flat run [total_bytes], then remove those that are too old.

    Raises:
        StorageError: The folder is not there, or its storage refused the file; both are named.
    """
    path = _path(folder, version)
    if not folder.is_dir():
        raise refused(
            path,
            f"{folder} does not exist on {socket.gethostname()}; weights.transport disk needs a "
            "folder that every node mounts",
        )
    header = _header(plan, version, digests)
    partial = path.with_name(path.name + ".partial")
    try:
        with writing(path):
            # Not forced onto the medium: these files outlive processes, not power failures.
            with partial.open("wb", buffering=0) as file:
                _write_all(file.fileno(), struct.pack("<Q", len(header)) + header)
                for tensor in _in_file_order(plan):
                    end = tensor.offset_bytes + tensor.num_bytes
                    _write_all(file.fileno(), flat[tensor.offset_bytes : end].data)
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    _remove_old(folder, version)
    return WeightFile(str(path), version)


def read_version(file: WeightFile, plan: BucketPlan, flat: NDArray[np.uint8]) -> list[str]:
    """Read a version into a flat run [total_bytes] whose padding is zero; its digests, checked.

    Raises:
        PublishError: The file is not there, is another version or plan, or is damaged.
    """
    try:
        with open(file.path, "rb", buffering=0) as opened:
            (length,) = struct.unpack("<Q", _read_exactly(opened.fileno(), bytearray(8)))
            if length > _LONGEST_HEADER_BYTES:
                raise ValueError("it is no safetensors file")
            header = json.loads(bytes(_read_exactly(opened.fileno(), bytearray(length))))
            told = header["__metadata__"]
            if told["version"] != str(file.version):
                raise ValueError(f"it holds version {told['version']}; must be {file.version}")
            if told["plan"] != plan.digest:
                raise ValueError("it was made by another plan; names, shapes and cut must be equal")
            for tensor in _in_file_order(plan):
                end = tensor.offset_bytes + tensor.num_bytes
                _read_exactly(opened.fileno(), flat[tensor.offset_bytes : end].data)
    except OSError as error:
        raise PublishError(
            f"{file.path}: cannot be read on {socket.gethostname()}: {error.strerror or error}. "
            "weights.transport disk needs cluster.fileroot on storage that every node mounts"
        ) from error
    except (ValueError, KeyError, TypeError, EOFError, struct.error) as error:
        raise PublishError(f"{file.path}: {error}. Publish again") from error
    digests = bucket_digests(plan, flat)
    written = told["digests"].split()
    for bucket, (found, expected) in enumerate(zip(digests, written, strict=True)):
        if found != expected:
            raise PublishError(
                f"{file.path}: bucket {bucket} of {len(digests)} differs from its digest; the "
                "file is damaged. Publish again"
            )
    return digests


def prepare_folder(folder: Path) -> None:
    """Make the folder, without the versions and pins of an earlier run.

    Raises:
        StorageError: The operating system refused it.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob("version-*"):
            left.unlink()


def pin(file: WeightFile) -> Path:
    """Keep a version's file until the pin, which is returned, is unlinked.

    Raises:
        StorageError: The operating system refused it.
    """
    path = Path(file.path)
    pinned = path.with_name(f"{path.stem}.pin-{uuid4().hex[:8]}")
    with writing(pinned):
        pinned.touch()
    return pinned


def _path(folder: Path, version: int) -> Path:
    return folder / f"version-{version:06d}.safetensors"


def _remove_old(folder: Path, newest: int) -> None:
    pinned = {name.stem for name in folder.glob("version-*.pin-*")}
    for path in folder.glob("version-*.safetensors"):
        version = int(path.stem.removeprefix("version-"))
        if version < newest - _KEPT_BEFORE and path.stem not in pinned:
            with suppress(OSError):  # what cannot be removed now is asked for again next time
                path.unlink()


def _in_file_order(plan: BucketPlan) -> list[TensorSpec]:
    """The widest elements first, so that each tensor lies where its dtype can be viewed."""
    return sorted(plan.tensors, key=lambda tensor: -ITEMSIZE_BYTES[tensor.dtype])


def _header(plan: BucketPlan, version: int, digests: Sequence[str]) -> bytes:
    """See the safetensors format: JSON, padded with spaces to a multiple of eight bytes."""
    told: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "version": str(version),
            "plan": plan.digest,
            "digests": " ".join(digests),
        }
    }
    offset = 0
    for tensor in _in_file_order(plan):
        told[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    text = json.dumps(told, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _write_all(fd: int, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while len(rest):
        rest = rest[os.write(fd, rest) :]


def _read_exactly(fd: int, into: bytearray | memoryview) -> bytearray | memoryview:
    rest = memoryview(into)
    while len(rest):
        count = os.readv(fd, [rest])
        if count == 0:
            raise EOFError("it ends too early")
        rest = rest[count:]
    return into
