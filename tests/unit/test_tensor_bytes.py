"""Tensors packed into buckets: each asked for once and in order, cast, whatever its strides."""

import gc
import weakref
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch

from areal_ray.core.buckets import BucketPlan, plan_buckets
from areal_ray.engines.tensor_bytes import (
    InOrder,
    describe,
    fill_bucket,
    flat_buffer,
    tensor_views,
)

SHAPES = {"embed": (7, 9), "nothing": (0, 3), "bias": (5,), "scale": (), "head": (9, 7)}


class Gathered(Mapping[str, torch.Tensor]):
    """A mapping that makes a tensor when it is asked for it, and sees which are still held."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.most_alive = 0
        self._made: list[weakref.ref[np.ndarray]] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        gc.collect()
        self.most_alive = max(self.most_alive, 1 + sum(one() is not None for one in self._made))
        self.asked.append(name)
        memory = _tensor(name).numpy().copy()  # lives as long as any view of the tensor
        self._made.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    def __iter__(self) -> Iterator[str]:
        return iter(SHAPES)

    def __len__(self) -> int:
        return len(SHAPES)


class Sharded:
    """A tensor that is read in pieces, as one whose parts lie on other ranks."""

    def __init__(self, name: str) -> None:
        self._whole = _tensor(name).reshape(-1)
        self.shape = SHAPES[name]
        self.dtype = torch.float32
        self.read_spans: list[tuple[int, int]] = []

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements of the flattened whole."""
        self.read_spans.append((start, stop))
        return self._whole[start:stop].clone()


def _tensor(name: str) -> torch.Tensor:
    torch.manual_seed(len(name))
    return torch.randn(SHAPES[name])


def _packed(plan: BucketPlan, weights: Mapping[str, torch.Tensor | Sharded]) -> torch.Tensor:
    flat, source = flat_buffer(plan.total_bytes), InOrder(weights)
    for bucket in range(plan.num_buckets):
        part = flat[slice(*plan.bounds(bucket))]
        given = list(fill_bucket(plan, bucket, source, part))
        assert torch.equal(torch.cat(given), part)
        assert given[0].data_ptr() == part.data_ptr()
    return flat


def _assert_holds(plan: BucketPlan, flat: torch.Tensor) -> None:
    for name, view in tensor_views(plan, flat).items():
        assert torch.equal(view, _tensor(name)), name


@pytest.mark.parametrize("bucket_bytes", [16, 64, 4096])
def test_each_tensor_is_gathered_once_in_order_and_let_go_before_the_next(bucket_bytes) -> None:
    weights = Gathered()
    shapes = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    plan = plan_buckets(describe(shapes, ""), bucket_bytes)
    _assert_holds(plan, _packed(plan, weights))
    assert weights.asked == ["embed", "bias", "scale", "head"]  # one without elements has no bytes
    assert weights.most_alive == 1


def test_a_sharded_tensor_is_read_no_more_than_a_bucket_at_a_time() -> None:
    weights = {name: Sharded(name) for name in SHAPES}
    plan = plan_buckets(describe(weights, ""), 64)
    _assert_holds(plan, _packed(plan, weights))
    spans = weights["embed"].read_spans
    assert spans == [(0, 16), (16, 32), (32, 48), (48, 63)]


def test_floating_point_tensors_are_cast_as_they_are_packed() -> None:
    weights = {"w": torch.tensor([1.0, 3.14159, -2e-9]), "count": torch.tensor([7, 8])}
    plan = plan_buckets(describe(weights, "bfloat16"), 16)
    views = tensor_views(plan, _packed(plan, weights))
    assert torch.equal(views["w"], weights["w"].to(torch.bfloat16))
    assert torch.equal(views["count"], weights["count"])


def test_a_transposed_view_travels_as_what_it_shows() -> None:
    weights = {"w": torch.arange(12.0).reshape(3, 4).T}
    plan = plan_buckets(describe(weights, ""), 16)
    assert torch.equal(tensor_views(plan, _packed(plan, weights))["w"], weights["w"])
