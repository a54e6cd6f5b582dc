"""Policy losses against closed forms and finite differences, in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.algorithms.losses import (
    decoupled_ppo_loss,
    mean_weights,
    policy_loss,
    ppo_clip_loss,
)
from areal_ray.algorithms.objective import ObjectiveConfig, RejectionSamplingConfig


def _column(*values):
    return torch.tensor(values, dtype=torch.float64)


def _all(count):
    return torch.ones(count, dtype=torch.bool)


def _ones(count):
    return torch.ones(count, dtype=torch.float64)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(-2.0, 8.0, 6.0), (1.0, 1.5, -1.2), (-1.0, 0.5, 0.8), (2.0, 8.0, -2.4), (1.0, 0.5, -0.5)],
)
def test_clip_and_dual_clip_hold_the_right_side(advantage, ratio, expected):
    loss, _ = ppo_clip_loss(
        _column(math.log(ratio)), _column(0.0), _column(advantage), _all(1), _ones(1), c_clip=3.0
    )
    assert loss.item() == pytest.approx(expected)


def test_without_dual_clip_a_bad_token_made_likely_is_not_bounded():
    loss, _ = ppo_clip_loss(_column(math.log(8.0)), _column(0.0), _column(-2.0), _all(1), _ones(1))
    assert loss.item() == pytest.approx(16.0)


def test_the_upper_clip_may_differ_from_the_lower():
    loss, sums = ppo_clip_loss(
        _column(math.log(1.25), math.log(0.7)),
        _column(0.0, 0.0),
        _column(1.0, -1.0),
        _all(2),
        _ones(2),
        clip_range=(0.8, 1.28),
    )
    assert loss.item() == pytest.approx(-1.25 + 0.8)
    assert sums["clipped"].item() == 1


@pytest.mark.parametrize("kind", ["grpo", "ppo", "decoupled_ppo"])
def test_the_gradient_at_the_sampling_policy_is_reinforce(kind):
    logprobs = torch.full((3,), -1.0, dtype=torch.float64, requires_grad=True)
    advantages, mask = _column(2.0, -1.0, 0.5), torch.tensor([True, True, False])
    old = logprobs.detach().clone()
    weights = mean_weights(_column(2, 2, 2), 2, per_sequence=False)
    loss, _ = policy_loss(ObjectiveConfig(kind=kind), logprobs, old, old, advantages, mask, weights)
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -advantages * mask / 2)


_LOG_RATIOS = st.lists(st.floats(-1.5, 1.5), min_size=4, max_size=4)


@given(_LOG_RATIOS, _LOG_RATIOS, st.sampled_from(["mask", "clamp"]), st.booleans())
def test_gradients_agree_with_finite_differences(policy, drift, action, dual):
    objective = ObjectiveConfig(
        kind="decoupled_ppo",
        eps_clip_higher=0.28,
        c_clip=3.0 if dual else None,
        rejection_sampling=RejectionSamplingConfig(action=action, upper=2.0, lower=0.5),
    )
    proximal = _column(-1.0, -2.0, -0.5, -3.0)
    start = proximal + _column(*policy)
    behaviour = proximal - _column(*drift)
    advantages, mask = _column(1.0, -2.0, 0.3, 1.0), torch.tensor([True, True, True, False])

    def value(logprobs):
        return policy_loss(
            objective, logprobs, proximal, behaviour, advantages, mask, _ones(4) / 3
        )[0]

    logprobs = start.clone().requires_grad_(True)
    value(logprobs).backward()
    step = 1e-6
    for token in range(4):
        ratio = math.exp(float(start[token] - proximal[token]))
        if min(abs(ratio - edge) for edge in (0.8, 1.28, 3.0)) < 1e-4:
            continue  # a kink has no derivative
        nudge = torch.zeros(4, dtype=torch.float64)
        nudge[token] = step
        slope = (value(start + nudge) - value(start - nudge)) / (2 * step)
        assert logprobs.grad[token].item() == pytest.approx(slope.item(), abs=1e-6)


def test_what_is_masked_never_reaches_loss_or_gradient():
    logprobs = torch.tensor([-1.0, 120.0, math.nan, -math.inf], dtype=torch.float64)
    logprobs.requires_grad_(True)
    old = _column(-1.1, 0.0, math.nan, math.inf)
    advantages, mask = _column(1.0, 5.0, math.nan, math.inf), _column(1, 0, 0, 0).bool()
    loss, sums = decoupled_ppo_loss(
        logprobs, old, old, advantages, mask, _column(1, math.nan, 1, 1)
    )
    loss.backward()
    alone, _ = decoupled_ppo_loss(
        _column(-1.0), _column(-1.1), _column(-1.1), _column(1.0), _all(1), _ones(1)
    )
    assert loss.item() == alone.item() == pytest.approx(-math.exp(0.1))
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1), 0.0, 0.0, 0.0])
    assert all(math.isfinite(value) for value in sums.values())
    assert sums["tokens"].item() == 1


@pytest.mark.parametrize("kind", ["grpo", "decoupled_ppo"])
@pytest.mark.parametrize("count", [0, 3])
def test_an_all_masked_batch_contributes_zero(kind, count):
    logprobs = torch.full((count,), math.nan, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(count, dtype=torch.float64)
    loss, sums = policy_loss(
        ObjectiveConfig(kind=kind), logprobs, None, nothing, nothing, nothing.bool(), nothing
    )
    loss.backward()
    assert loss.item() == 0.0
    assert logprobs.grad.tolist() == [0.0] * count
    assert not any(math.isnan(value) for value in sums.values())


def test_an_overflowing_ratio_stays_finite():
    logprobs = _column(500.0).requires_grad_(True)
    loss, _ = ppo_clip_loss(logprobs, _column(0.0), _column(-1.0), _all(1), _ones(1))
    loss.backward()
    assert math.isfinite(loss.item())
    assert math.isfinite(logprobs.grad.item())


# Token losses A = [2] and B = [1, 1, 7] as ratios under advantage -1.
_LOGPROBS = [math.log(2.0), 0.0, 0.0, math.log(7.0)]


def _aggregate(parts, per_sequence):
    lengths, count = _column(1, 3, 3, 3), 2 if per_sequence else 4
    weights = mean_weights(lengths, count, per_sequence=per_sequence)
    total = 0.0
    for part in parts:
        at = torch.tensor(part)
        total += ppo_clip_loss(
            _column(*_LOGPROBS)[at], torch.zeros(len(part), dtype=torch.float64),
            -_ones(len(part)), _all(len(part)), weights[at],
        )[0].item()  # fmt: skip
    return total


@pytest.mark.parametrize(
    "parts", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 2], [3], [1]], [[3, 2, 1, 0], []]]
)
def test_the_mean_is_global_however_the_batch_is_cut(parts):
    parts = [part for part in parts if part]
    assert _aggregate(parts, per_sequence=False) == pytest.approx(2.75)
    assert _aggregate(parts, per_sequence=True) == pytest.approx(2.5)


def _weighted(weights, **bounds):
    proximal = torch.log(_column(*weights))
    return decoupled_ppo_loss(
        proximal, proximal, torch.zeros_like(proximal), -_ones(4), _all(4), _ones(4) / 4, **bounds
    )


def test_behaviour_weights_are_reported_before_and_after_their_bounds():
    loss, sums = _weighted([0.5, 1.2, 9.0, 0.9], max_behaviour_weight=2.0, clamp_weight=True)
    assert sums["raw_weight"].item() / 4 == pytest.approx(2.9)
    assert sums["max_raw_weight"].item() == pytest.approx(9.0)
    assert sums["outside"].item() / 4 == 0.25
    assert sums["used_weight"].item() / 4 == loss.item() == pytest.approx(1.15)
    loss, sums = _weighted(
        [0.5, 1.2, 9.0, 0.9], min_behaviour_weight=0.5 - 1e-9, max_behaviour_weight=5.0
    )
    assert sums["raw_weight"].item() / 4 == pytest.approx(2.9)
    assert sums["used_weight"].item() / 4 == loss.item() == pytest.approx(0.65)


def test_the_behaviour_weight_carries_no_gradient():
    logprobs = _column(-1.0).requires_grad_(True)
    loss, _ = policy_loss(
        ObjectiveConfig(kind="decoupled_ppo"),
        logprobs, None, _column(-1.5), _column(2.0), _all(1), _ones(1),
    )  # fmt: skip
    loss.backward()
    assert logprobs.grad.item() == pytest.approx(-2.0 * math.exp(0.5))


def test_kl_is_the_k3_estimate_and_stays_finite():
    def kl(gap):
        sums = ppo_clip_loss(_column(gap), _column(0.0), _column(1.0), _all(1), _ones(1))[1]
        return sums["policy_kl"].item()

    assert kl(-0.5) == pytest.approx(0.10653, abs=1e-5)
    assert kl(0.5) == pytest.approx(0.14872, abs=1e-5)
    assert math.isfinite(kl(500.0))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prox_logp_method": "loglinear"}, "not offered yet"),
        ({"prox_logp_method": "guess"}, "must be 'recompute'"),
        ({"rejection_sampling": RejectionSamplingConfig()}, "needs kind 'decoupled_ppo'"),
        ({"c_clip": 1.0}, "greater than 1"),
        ({"eps_clip": 0.0}, "greater than 0"),
    ],
)
def test_an_objective_that_makes_no_sense_is_refused_with_the_reason(fields, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**fields)


def test_the_weight_bound_of_decoupled_ppo_is_there_without_asking():
    bounds = ObjectiveConfig(kind="decoupled_ppo").weight_bounds
    assert (bounds.upper, bounds.action) == (5.0, "mask")
