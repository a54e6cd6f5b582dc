"""Weights as bytes: every byte travels once, and a changed byte is seen."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.core.buckets import (
    ALIGNMENT_BYTES,
    ITEMSIZE_BYTES,
    BucketPlan,
    bucket_digests,
    digest,
    plan_buckets,
    seal,
    verify,
)

_shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
_models = st.lists(st.tuples(_shapes, st.sampled_from(sorted(ITEMSIZE_BYTES))), max_size=9)
_bucket_bytes = st.integers(1, 12).map(lambda count: count * ALIGNMENT_BYTES)


def _plan(model: list[tuple[tuple[int, ...], str]], bucket_bytes: int) -> BucketPlan:
    named = ((f"layer.{index}", shape, dtype) for index, (shape, dtype) in enumerate(model))
    return plan_buckets(named, bucket_bytes)


def _sealed(plan: BucketPlan, version: int, seed: int = 0) -> np.ndarray:
    payload = np.zeros(plan.payload_bytes, np.uint8)
    draws = np.random.default_rng(seed)
    payload[: plan.total_bytes] = draws.integers(0, 256, plan.total_bytes, np.uint8)
    seal(plan, payload, version, bucket_digests(plan, payload[: plan.total_bytes]))
    return payload


@given(_models, _bucket_bytes)
def test_every_byte_of_every_tensor_travels_exactly_once(model, bucket_bytes) -> None:
    plan = _plan(model, bucket_bytes)
    carried = {tensor.name: np.zeros(tensor.num_bytes, int) for tensor in plan.tensors}
    for bucket in range(plan.num_buckets):
        start, end = plan.bounds(bucket)
        wire = np.zeros(end - start, int)
        for piece in plan.pieces(bucket):
            wire[piece.bucket_start_byte :][: piece.num_bytes] += 1
            carried[piece.name][piece.tensor_start_byte :][: piece.num_bytes] += 1
        assert wire.max(initial=0) <= 1
    assert all((counts == 1).all() for counts in carried.values())


@given(_models, _bucket_bytes, st.integers(0, 2**32 - 1))
def test_tensors_put_together_from_buckets_equal_those_sent(model, bucket_bytes, seed) -> None:
    plan = _plan(model, bucket_bytes)
    draws = np.random.default_rng(seed)
    sent = {t.name: draws.integers(0, 256, t.num_bytes, np.uint8) for t in plan.tensors}
    received = np.zeros(plan.total_bytes, np.uint8)
    for bucket in range(plan.num_buckets):
        start, end = plan.bounds(bucket)
        wire = np.zeros(end - start, np.uint8)
        for piece in plan.pieces(bucket):
            part = sent[piece.name][piece.tensor_start_byte :][: piece.num_bytes]
            wire[piece.bucket_start_byte :][: piece.num_bytes] = part
        received[start:end] = wire
    for tensor in plan.tensors:
        got = received[tensor.offset_bytes :][: tensor.num_bytes]
        assert np.array_equal(got, sent[tensor.name])


@given(_models, _bucket_bytes)
def test_each_tensor_begins_where_its_dtype_can_be_viewed_and_overlaps_no_other(
    model, bucket_bytes
) -> None:
    plan = _plan(model, bucket_bytes)
    end = 0
    for tensor in plan.tensors:
        assert tensor.offset_bytes >= end
        assert tensor.offset_bytes % ITEMSIZE_BYTES[tensor.dtype] == 0
        end = tensor.offset_bytes + tensor.num_bytes
    assert plan.total_bytes == end
    assert all(plan.bounds(b)[0] % ALIGNMENT_BYTES == 0 for b in range(plan.num_buckets))


@given(_models, _bucket_bytes, st.integers(0, 2**40))
def test_a_sealed_payload_proves_its_version_and_its_bytes(model, bucket_bytes, version) -> None:
    plan = _plan(model, bucket_bytes)
    payload = _sealed(plan, version)
    assert verify(plan, payload, version) == bucket_digests(plan, payload[: plan.total_bytes])
    with pytest.raises(ValueError, match=f"holds version {version}; must be {version + 1}"):
        verify(plan, payload, version + 1)


@given(st.data())
def test_a_flipped_bit_anywhere_in_a_payload_is_seen(draw) -> None:
    plan = plan_buckets([("a", (5, 3), "float32"), ("b", (7,), "bfloat16")], 32)
    payload = _sealed(plan, 3)
    payload[draw.draw(st.integers(0, plan.payload_bytes - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match=r"version|plan|differs"):
        verify(plan, payload, 3)


def test_a_payload_of_another_plan_or_length_is_refused() -> None:
    plan = plan_buckets([("a", (4,), "float32")], 16)
    renamed = plan_buckets([("b", (4,), "float32")], 16)
    payload = _sealed(plan, 1)
    with pytest.raises(ValueError, match="made by another plan"):
        verify(renamed, payload, 1)
    with pytest.raises(ValueError, match=r"shape \(47,\); must be \(48,\)"):
        verify(plan, payload[:-1], 1)


def test_the_layout_of_a_small_model_is_the_one_worked_by_hand() -> None:
    plan = plan_buckets([("a", (3,), "float32"), ("b", (), "int64"), ("c", (2, 2), "bool")], 16)
    assert [(t.offset_bytes, t.num_bytes) for t in plan.tensors] == [(0, 12), (16, 8), (32, 4)]
    assert (plan.total_bytes, plan.num_buckets) == (36, 3)
    assert [plan.bounds(bucket) for bucket in range(3)] == [(0, 16), (16, 32), (32, 36)]


def test_a_model_without_elements_needs_no_bucket() -> None:
    plan = plan_buckets([("empty", (0, 8), "float32")], 16)
    assert plan.num_buckets == 0
    assert verify(plan, _sealed(plan, 1), 1) == []


def test_plans_have_equal_digests_only_if_names_shapes_dtypes_and_cut_are_equal() -> None:
    def made(name="w", shape=(4, 2), dtype="float32", bucket_bytes=16) -> str:
        return plan_buckets([(name, shape, dtype)], bucket_bytes).digest

    assert made() == made()
    others = [made(name="v"), made(shape=(2, 4)), made(dtype="int32"), made(bucket_bytes=32)]
    assert len({made(), *others}) == 5


def test_a_wrong_plan_is_refused_with_the_tensor_and_the_reason() -> None:
    with pytest.raises(ValueError, match="tensor w is named twice"):
        plan_buckets([("w", (1,), "float32"), ("w", (1,), "float32")], 16)
    with pytest.raises(ValueError, match="tensor w has dtype complex64"):
        plan_buckets([("w", (1,), "complex64")], 16)
    for bucket_bytes in (0, -16, 24):
        with pytest.raises(ValueError, match=f"bucket_bytes: {bucket_bytes}; must be a multiple"):
            plan_buckets([], bucket_bytes)


def test_the_differences_to_the_expected_tensors_are_named() -> None:
    plan = plan_buckets([("a", (2, 3), "float32"), ("b", (1,), "float32")], 16)
    assert plan.mismatch({"a": (2, 3), "b": (1,)}) == ""
    assert plan.mismatch({"a": (3, 2), "c": ()}) == (
        "1 tensor is expected but not sent: c; 1 tensor is sent but not expected: b; "
        "1 tensor is of another shape: a is sent as (2, 3), expected (3, 2)"
    )


def test_digest_is_xxh3_of_128_bits() -> None:
    # The test vectors of the reference implementation: nothing, and "abc".
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest(b"abc") == "06b05ab6733a618578af5f94892f3950"
    assert digest(np.frombuffer(b"abc", np.uint8)) == digest(b"abc")


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_flipped_bit_a_swap_and_a_zeroed_span_change_the_digest(content, draw) -> None:
    before = digest(content)
    flipped = bytearray(content)
    flipped[draw.draw(st.integers(0, len(content) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert digest(bytes(flipped)) != before
    cut = draw.draw(st.integers(0, len(content)))
    for other in (content[cut:] + content[:cut], bytes(cut) + content[cut:]):
        assert (digest(other) == before) == (other == content)
