"""The critic's loss by hand and by finite differences."""

import math

import pytest
import torch

from areal_ray.algorithms.values import clipped_value_loss
from tests.support.columns import column, every, finite_differences, gradient, ones


def _loss(values, old, returns, **more):
    return clipped_value_loss(
        column(*values), column(*old), column(*returns), every(len(values)), ones(len(values)),
        **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "old", "target", "expected", "is_clipped"),
    [
        (0.3, 0.0, 1.0, 0.5 * 0.49, 0),  # within the clip
        (0.9, 0.0, 1.0, 0.5 * 0.25, 1),  # nearer than the clip lets it count: 0.5 is held
        (0.9, 0.0, -1.0, 0.5 * 1.9**2, 0),  # further away: the error itself is larger
        (-2.0, 0.0, -3.0, 0.5 * 2.5**2, 1),
    ],
)
def test_the_larger_of_two_errors_counts(value, old, target, expected, is_clipped):
    loss, sums = _loss([value], [old], [target])
    assert loss.item() == pytest.approx(expected)
    assert sums["value_clipped"].item() == is_clipped


def test_without_a_clip_it_is_half_the_squared_error():
    loss, sums = _loss([0.9, 2.0], [0.0, 0.0], [1.0, 0.0], eps_clip=None)
    assert loss.item() == pytest.approx(0.5 * (0.01 + 4.0))
    assert sums["value_clipped"].item() == 0


@pytest.mark.parametrize("eps_clip", [0.5, None])
def test_its_gradient_agrees_with_finite_differences(eps_clip):
    old, returns = column(0.0, 0.0, 0.0, 0.0), column(1.0, 1.0, -1.0, 0.2)
    weights = column(0.5, 0.25, 0.125, 1.0)

    def value(values):
        return clipped_value_loss(values, old, returns, every(4), weights, eps_clip=eps_clip)[0]

    at = column(0.3, 0.9, 0.9, -0.4)
    slope = gradient(value, at)
    torch.testing.assert_close(slope, finite_differences(value, at))
    assert slope[0].item() == pytest.approx(-0.35)
    assert (slope[1].item() == 0.0) is (eps_clip is not None)


def test_masked_values_have_no_say():
    hidden, mask = column(1.0, math.nan), torch.tensor([True, False])

    def value(values):
        return clipped_value_loss(values, hidden, hidden * 2, mask, hidden)[0]

    assert value(column(1.5, math.inf)).item() == pytest.approx(0.125)
    assert gradient(value, column(1.5, math.inf)).tolist() == [-0.5, 0.0]
    sums = clipped_value_loss(hidden, hidden, hidden, mask, hidden)[1]
    assert sums["value_tokens"].item() == 1
    assert all(math.isfinite(x) for x in sums.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_values_stay_finite(dtype):
    values = torch.tensor([1e4, -1e4, 0.0], dtype=dtype, requires_grad=True)
    target = -values.detach()
    loss, _ = clipped_value_loss(values, target, target, every(3), torch.ones_like(target))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(values.grad).all()
