"""KL estimates: values, gradients, and what both are on average over a whole vocabulary."""

import math

import numpy as np
import pytest
import torch

from areal_ray.algorithms.kl import kl_estimate
from tests.support.columns import column, finite_differences, gradient

CASES = [
    (-0.5, {"k1": -0.5, "k2": 0.125, "k3": 0.14872}, -0.64872),
    (0.5, {"k1": 0.5, "k2": 0.125, "k3": 0.10653}, 0.39347),
    (2.0, {"k1": 2.0, "k2": 2.0, "k3": 1.13534}, 0.86466),
    (-2.0, {"k1": -2.0, "k2": 2.0, "k3": 4.38906}, -6.38906),
]


@pytest.mark.parametrize(("gap", "values", "k3_slope"), CASES)
def test_values_and_gradients_at_known_gaps(gap, values, k3_slope):
    base = column(-1.3)
    for kind, expected in values.items():
        assert kl_estimate(base + gap, base, kind).item() == pytest.approx(expected, abs=1e-5)
        as_array = kl_estimate((base + gap).numpy(), base.numpy(), kind)
        assert as_array.item() == pytest.approx(expected, abs=1e-5)
        slope = {"k1": 1.0, "k2": gap, "k3": k3_slope}[kind]
        found = gradient(lambda x, kind=kind: kl_estimate(x, base, kind).sum(), base + gap)
        assert found.item() == pytest.approx(slope, abs=1e-5)
        numeric = finite_differences(
            lambda x, kind=kind: kl_estimate(x, base, kind).sum(), base + gap
        )
        assert numeric.item() == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gap", [-20.0, 20.0, -1e4, 1e4])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_far_gaps_are_cut_and_still_pull_back(dtype, gap, kind):
    logprobs = torch.tensor([gap], dtype=dtype, requires_grad=True)
    value = kl_estimate(logprobs, torch.zeros(1, dtype=dtype), kind)
    value.sum().backward()
    at = math.copysign(10.0, gap)
    expected = {"k1": at, "k2": 50.0, "k3": math.exp(-at) - 1 + at}[kind]
    slope = {"k1": 1.0, "k2": at, "k3": 1 - math.exp(-at)}[kind]
    near = {"rel": 1e-2 if dtype is torch.bfloat16 else 1e-5}
    assert value.item() == pytest.approx(expected, **near)
    assert logprobs.grad.item() == pytest.approx(slope, **near)


LOGITS = column(0.4, -0.3, 1.0, -2.0)
REFERENCE = torch.log_softmax(column(0.1, 1.2, -0.5, 0.3), 0)


def _log_policy(logits):
    return torch.log_softmax(logits, 0)


def _kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


FORWARD = _kl(_log_policy(LOGITS), REFERENCE).item()
SLOPE_OF_FORWARD = gradient(lambda x: _kl(_log_policy(x), REFERENCE), LOGITS)
SLOPE_OF_BACKWARD = gradient(lambda x: _kl(REFERENCE, _log_policy(x)), LOGITS)


@pytest.mark.parametrize(("kind", "is_unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_which_value_is_the_exact_kl_on_average(kind, is_unbiased):
    policy = _log_policy(LOGITS)
    mean = (policy.exp() * kl_estimate(policy, REFERENCE, kind)).sum().item()
    assert (mean == pytest.approx(FORWARD, abs=1e-12)) is is_unbiased
    assert abs(mean - FORWARD) < 0.5 * FORWARD


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", torch.zeros_like(LOGITS)), ("k2", SLOPE_OF_FORWARD), ("k3", SLOPE_OF_BACKWARD)],
)
def test_the_mean_gradient_of_each_as_a_loss(kind, expected):
    weights = _log_policy(LOGITS).exp()
    mean = gradient(
        lambda x: (weights * kl_estimate(_log_policy(x), REFERENCE, kind)).sum(), LOGITS
    )
    torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("k1", SLOPE_OF_FORWARD), ("k3", SLOPE_OF_FORWARD - SLOPE_OF_BACKWARD)],
)
def test_the_mean_gradient_of_each_as_a_reward(kind, expected):
    policy = _log_policy(LOGITS)
    rewards = -kl_estimate(policy, REFERENCE, kind)
    mean = gradient(lambda x: (-policy.exp() * rewards * _log_policy(x)).sum(), LOGITS)
    torch.testing.assert_close(mean, expected)


def test_token_rewards_are_the_score_less_the_penalty():
    estimates = kl_estimate(np.array([-1.0, -1.0]), np.array([-1.5, -1.5]), "k1")
    np.testing.assert_allclose(np.array([0.0, 1.0]) - 0.1 * estimates, [-0.05, 0.95])
