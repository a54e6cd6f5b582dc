"""Versions on disk: whole or not there, read back to the bit, and refused with a name."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from areal_ray.core.buckets import BucketPlan, bucket_digests, plan_buckets
from areal_ray.errors import PublishError, StorageError
from areal_ray.runtime.weight_files import (
    WeightFile,
    pin,
    prepare_folder,
    read_version,
    write_version,
)

# A bool of one byte comes before wider ones, so that file order is not the plan's.
TENSORS = [
    ("flag", (3,), "bool"),
    ("embed", (5, 8), "bfloat16"),
    ("nothing", (0, 4), "float32"),
    ("scale", (), "float32"),
    ("head", (8, 5), "float32"),
]


@pytest.fixture
def plan() -> BucketPlan:
    return plan_buckets(TENSORS, 64)


def _flat(plan: BucketPlan, seed: int) -> np.ndarray:
    flat = np.zeros(plan.total_bytes, np.uint8)
    draws = np.random.default_rng(seed)
    for tensor in plan.tensors:
        span = slice(tensor.offset_bytes, tensor.offset_bytes + tensor.num_bytes)
        flat[span] = draws.integers(0, 2, tensor.num_bytes, np.uint8)
    return flat


def _write(folder: Path, plan: BucketPlan, version: int) -> WeightFile:
    flat = _flat(plan, version)
    return write_version(folder, plan, version, flat, bucket_digests(plan, flat))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_version_is_read_back_to_the_bit(tmp_path: Path, plan: BucketPlan) -> None:
    file = _write(tmp_path, plan, 7)
    into = np.zeros(plan.total_bytes, np.uint8)
    assert read_version(file, plan, into) == bucket_digests(plan, _flat(plan, 7))
    assert np.array_equal(into, _flat(plan, 7))
    assert _names(tmp_path) == ["version-000007.safetensors"]


def test_any_reader_of_safetensors_finds_the_tensors(tmp_path: Path, plan: BucketPlan) -> None:
    file = _write(tmp_path, plan, 3)
    flat = torch.from_numpy(_flat(plan, 3))
    with safe_open(file.path, "pt") as opened:
        assert set(opened.keys()) == {name for name, _, _ in TENSORS}
        assert opened.metadata()["version"] == "3"
        for tensor in plan.tensors:
            read = opened.get_tensor(tensor.name)
            span = flat[tensor.offset_bytes :][: tensor.num_bytes]
            expected = span.view(getattr(torch, tensor.dtype)).view(tensor.shape)
            assert read.dtype == expected.dtype
            assert torch.equal(read, expected)


def test_the_version_before_stays_for_late_joiners_and_older_ones_go(
    tmp_path: Path, plan: BucketPlan
) -> None:
    files = [_write(tmp_path, plan, version) for version in (1, 2)]
    pinned = pin(files[0])
    files += [_write(tmp_path, plan, version) for version in (3, 4)]
    assert [Path(file.path).exists() for file in files] == [True, False, True, True]
    pinned.unlink()
    _write(tmp_path, plan, 5)
    assert _names(tmp_path) == ["version-000004.safetensors", "version-000005.safetensors"]


def test_a_version_sent_again_replaces_its_file(tmp_path: Path, plan: BucketPlan) -> None:
    _write(tmp_path, plan, 1)
    flat = _flat(plan, 99)
    file = write_version(tmp_path, plan, 1, flat, bucket_digests(plan, flat))
    into = np.zeros(plan.total_bytes, np.uint8)
    read_version(file, plan, into)
    assert np.array_equal(into, flat)


def test_a_folder_that_is_not_mounted_is_named_on_both_sides(
    tmp_path: Path, plan: BucketPlan
) -> None:
    absent = tmp_path / "not-mounted"
    with pytest.raises(StorageError, match=r"not-mounted does not exist on .*every node mounts"):
        _write(absent, plan, 1)
    assert not absent.exists()
    file = WeightFile(str(absent / "version-000001.safetensors"), 1)
    with pytest.raises(PublishError, match=r"not-mounted.*cannot be read on .*every node mounts"):
        read_version(file, plan, np.zeros(plan.total_bytes, np.uint8))


def test_a_disk_that_fills_up_is_named_and_nothing_is_left(
    tmp_path: Path, plan: BucketPlan
) -> None:
    # The kernel's own full device, reached through the name that the file would be written under.
    (tmp_path / "version-000001.safetensors.partial").symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"version-000001.*No space left on device"):
        _write(tmp_path, plan, 1)
    assert _names(tmp_path) == []


def test_another_version_or_plan_is_refused(tmp_path: Path, plan: BucketPlan) -> None:
    file = _write(tmp_path, plan, 1)
    into = np.zeros(plan.total_bytes, np.uint8)
    with pytest.raises(PublishError, match="holds version 1; must be 2"):
        read_version(WeightFile(file.path, 2), plan, into)
    other = plan_buckets(TENSORS, 32)
    with pytest.raises(PublishError, match="another plan"):
        read_version(file, other, into)


def test_a_flipped_bit_or_a_cut_end_is_seen(tmp_path: Path, plan: BucketPlan) -> None:
    file = _write(tmp_path, plan, 1)
    path = Path(file.path)
    whole = path.read_bytes()
    into = np.zeros(plan.total_bytes, np.uint8)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(PublishError, match=r"bucket \d of \d differs"):
        read_version(file, plan, into)
    path.write_bytes(whole[:-1])
    with pytest.raises(PublishError, match="ends too early"):
        read_version(file, plan, into)
    for damaged in (b"", b"\xff" * 40, struct.pack("<Q", 4) + b"null", _without_metadata(whole)):
        path.write_bytes(damaged)
        with pytest.raises(PublishError, match=r"version-000001.safetensors: .*Publish again"):
            read_version(file, plan, into)


def _without_metadata(whole: bytes) -> bytes:
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    del header["__metadata__"]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + whole[8 + length :]


def test_a_new_run_begins_with_an_empty_folder(tmp_path: Path, plan: BucketPlan) -> None:
    folder = tmp_path / "weights"
    prepare_folder(folder)
    pin(_write(folder, plan, 1))
    (folder / "notes.txt").touch()
    prepare_folder(folder)
    assert _names(folder) == ["notes.txt"]
    if os.geteuid() != 0:
        folder.chmod(0o500)
        with pytest.raises(StorageError, match="Permission denied"):
            _write(folder, plan, 1)
