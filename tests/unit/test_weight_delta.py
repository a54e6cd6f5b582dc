"""What changed between two versions brings the one to the other, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from areal_ray.core.buckets import digest, plan_buckets
from areal_ray.core.weight_delta import (
    WHOLE,
    encode,
    encoded_bytes,
    header_bytes,
    open_header,
    seal_header,
    unit_bytes,
)
from areal_ray.engines.tensor_bytes import apply_changes
from areal_ray.runtime.weights_config import WeightsConfig


@given(
    st.sampled_from([1, 2, 4, 8]), st.integers(1, 200), st.floats(0.0, 1.0), st.integers(0, 2**32)
)
def test_changes_put_over_the_old_bucket_give_the_new_one(unit, num_units, share, seed) -> None:
    draws = np.random.default_rng(seed)
    old = draws.integers(0, 256, num_units * unit, np.uint8)
    new = old.copy()
    for index in np.flatnonzero(draws.random(num_units) < share):
        new[index * unit + draws.integers(unit)] ^= 1 << draws.integers(8)
    num_changed = int((old.view(f"u{unit}") != new.view(f"u{unit}")).sum())
    count, encoded = encode(old, new, unit)
    assert count in (WHOLE, num_changed)
    assert len(encoded) <= len(new)
    plan = plan_buckets([("w", (num_units,), f"int{8 * unit}")], 16 * num_units)
    assert encoded_bytes(plan, [count]) == [len(encoded)]
    target = torch.from_numpy(old.copy())
    apply_changes(target, count, torch.from_numpy(encoded), unit)
    assert np.array_equal(target.numpy(), new)


def test_a_sign_a_nan_and_nothing_at_all_are_told_apart() -> None:
    old = np.array([0.0, np.nan, 1.0, 2.0], np.float32)
    new = np.array([-0.0, np.nan, 1.0, 2.0], np.float32)
    assert encode(old.view(np.uint8), old.view(np.uint8), 4)[0] == 0
    count, encoded = encode(old.view(np.uint8), new.view(np.uint8), 4)
    assert (count, encoded[:4].view(np.uint32).tolist()) == (1, [0])
    assert encoded[4:].view(np.float32)[0] == 0.0
    assert np.signbit(encoded[4:].view(np.float32)[0])


def test_without_the_version_before_or_where_most_has_changed_a_bucket_is_whole() -> None:
    new = np.arange(32, dtype=np.uint8)
    assert encode(None, new, 4) == (WHOLE, new)
    assert encode(new + 1, new, 4)[0] == WHOLE


def test_what_is_compared_is_as_wide_as_the_narrowest_element() -> None:
    tensors = [("a", (3,), "float32"), ("b", (3,), "bfloat16")]
    assert unit_bytes(plan_buckets(tensors, 16)) == 2
    assert unit_bytes(plan_buckets([*tensors, ("none", (0,), "int8")], 16)) == 2
    assert unit_bytes(plan_buckets([], 16)) == 1


def test_a_header_tells_what_was_sealed_and_any_flipped_bit_of_it_is_seen() -> None:
    plan = plan_buckets([("a", (12,), "float32")], 16)
    header = seal_header(7, [0, WHOLE, 3], np.arange(5, dtype=np.uint8))
    assert len(header) == header_bytes(plan)
    base, counts, proof = open_header(header)
    assert (base, counts) == (7, [0, WHOLE, 3])
    assert proof == digest(np.arange(5, dtype=np.uint8))
    for bit in range(8 * len(header)):
        damaged = header.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="differ from their digest"):
            open_header(damaged)


def test_a_transport_that_sends_all_refuses_the_key() -> None:
    with pytest.raises(ValidationError, match="full_every: is 5 with transport object_store"):
        WeightsConfig(transport="object_store", full_every=5)
