"""Off-policy correction, against numbers worked by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.algorithms.correction import (
    behaviour_weights,
    binary_kl,
    loglinear_proximal,
    m2po_kept,
    mismatch_sums,
)
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import RejectionSamplingConfig
from tests.support.columns import column, every, every_correction

IDS = torch.tensor([0, 0, 1, 1, 1])


def _corrected(ratios, config, ids=None, mask=None, behaviour=-2.0):
    drift = torch.log(column(*ratios))
    old = torch.full_like(drift, behaviour)
    ids = torch.zeros(len(drift), dtype=torch.int64) if ids is None else ids
    mask = every(len(drift)) if mask is None else mask
    return behaviour_weights(old + drift, old, mask, config, ids)


def _near(values):
    return pytest.approx(values, abs=1e-9)


def test_without_bounds_the_weight_is_the_ratio():
    found = _corrected([0.25, 1.0, 8.0], None)
    assert found.weights.tolist() == _near([0.25, 1.0, 8.0])
    assert found.kept.all()
    assert not found.outside.any()


def test_truncated_importance_sampling_clamps():
    config = ObjectiveConfig(kind="reinforce").rejection_sampling
    found = _corrected([0.25, 1.0, 8.0], config)
    assert found.weights.tolist() == _near([0.25, 1.0, 2.0])
    assert found.kept.all()
    assert found.outside.tolist() == [False, False, True]
    assert found.raw.tolist() == _near([0.25, 1.0, 8.0])


def test_icepop_leaves_out_both_sides():
    config = ObjectiveConfig(kind="icepop").rejection_sampling
    found = _corrected([0.49, 0.51, 1.0, 4.99, 5.01], config)
    assert found.weights.tolist() == _near([0.0, 0.51, 1.0, 4.99, 0.0])
    assert found.kept.tolist() == [False, True, True, True, False]


def test_kpop_takes_the_larger_of_two_bernoulli_kls():
    p, q = 0.9, 0.01
    forward = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    backward = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    assert (forward, backward) == (pytest.approx(3.8206, abs=1e-4), pytest.approx(2.2246, abs=1e-4))
    for first, second in ((p, q), (q, p)):
        found = binary_kl(column(math.log(first)), column(math.log(second)))
        assert found.item() == pytest.approx(forward)
    config = ObjectiveConfig(kind="kpop").rejection_sampling
    proximal, behaviour = torch.log(column(0.9, 0.5, 1e-4)), torch.log(column(0.01, 0.1, 0.9))
    found = behaviour_weights(
        proximal, behaviour, every(3), config, torch.zeros(3, dtype=torch.int64)
    )
    # The second has ratio 5 and KL 0.51 and stays; the third has moved to nearly nothing.
    assert found.kept.tolist() == [False, True, False]
    assert found.weights.tolist() == _near([0.0, 5.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bernoulli_kls_of_certain_and_impossible_tokens_are_finite(dtype):
    certain, impossible = torch.zeros(1, dtype=dtype), torch.full((1,), -1e4, dtype=dtype)
    assert binary_kl(certain, certain).item() == 0.0
    assert binary_kl(impossible, impossible).item() == 0.0
    # 1e-8 against 1 - 1e-8
    assert binary_kl(certain, impossible).item() == pytest.approx(math.log(1e8), rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("kl_k1", [math.log(3.0), -math.log(3.0)]),
        ("kl_k2", [math.log(3.0) ** 2 / 2] * 2),
        ("kl_k3", [1 / 3 - 1 + math.log(3.0), 3 - 1 - math.log(3.0)]),
    ],
)
def test_a_kl_filter_compares_its_estimate_with_the_bound(metric, values):
    for place, value in enumerate(values):
        for slack, is_kept in ((1e-6, True), (-1e-6, False)):
            if value + slack <= 0.0:
                continue  # k1 below its bound whatever that is
            config = RejectionSamplingConfig(metric=metric, upper=value + slack)
            found = _corrected([3.0, 1 / 3], config)
            assert found.kept[place].item() is is_kept
            assert found.weights[place].item() == _near([3.0, 1 / 3][place] * is_kept)


def test_k1_may_have_a_lower_bound():
    config = RejectionSamplingConfig(metric="kl_k1", upper=2.0, lower=-0.5)
    assert _corrected([0.5, 0.7, 8.0], config).kept.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("aggregation", "metrics"),
    [("sum", [2.0, 24.0]), ("mean", [2**0.5, 24 ** (1 / 3)]), ("max", [4.0, 8.0])],
)
def test_a_sequence_stands_or_falls_together(aggregation, metrics):
    ratios = [4.0, 0.5, 3.0, 1.0, 8.0]
    for bound, kept in ((max(metrics) + 0.01, [True, True]), (min(metrics) + 0.01, [True, False])):
        config = RejectionSamplingConfig(level="sequence", aggregation=aggregation, upper=bound)
        found = _corrected(ratios, config, IDS)
        assert found.kept.tolist() == [kept[i] for i in IDS]
        own = ratios if aggregation == "max" else [metrics[i] for i in IDS]
        assert found.weights.tolist() == _near([w * kept[i] for w, i in zip(own, IDS, strict=True)])


def test_a_sequence_s_weight_can_be_clamped():
    config = RejectionSamplingConfig(
        level="sequence", aggregation="sum", action="clamp", upper=5.0, lower=0.5
    )
    found = _corrected([4.0, 0.5, 3.0, 1.0, 8.0], config, IDS)
    assert found.weights.tolist() == _near([2.0, 2.0, 5.0, 5.0, 5.0])
    assert found.outside.tolist() == [False, False, True, True, True]


def test_a_sequence_s_kl_is_the_arithmetic_mean():
    ks = [r - 1 - math.log(r) for r in (1 / 4, 2.0)]
    mean = sum(ks) / 2
    for slack, is_kept in ((1e-6, True), (-1e-6, False)):
        config = RejectionSamplingConfig(metric="kl_k3", level="sequence", upper=mean + slack)
        found = _corrected([4.0, 0.5], config, torch.tensor([0, 0]))
        assert found.kept.tolist() == [is_kept] * 2
        assert found.weights.tolist() == _near([4.0 * is_kept, 0.5 * is_kept])


@pytest.mark.parametrize("number", range(len(every_correction())))
def test_masked_tokens_are_in_no_metric_and_hold_anything(number):
    config = every_correction()[number]
    mask = torch.tensor([True, False, True, True, False])
    proximal = column(-1.0, math.nan, -1.2, -0.8, math.inf)
    behaviour = column(-1.5, 3.0, -1.0, -1.0, -math.inf)
    found = behaviour_weights(proximal, behaviour, mask, config, IDS)
    alone = behaviour_weights(
        proximal[mask], behaviour[mask], every(3), config, torch.tensor([0, 1, 1])
    )
    for name in ("weights", "kept", "raw", "outside"):
        whole, part = getattr(found, name), getattr(alone, name)
        torch.testing.assert_close(whole[mask], part)
        assert not whole[~mask].any()


@pytest.mark.parametrize("number", range(len(every_correction())))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_finite_log_prob_makes_a_weight_that_is_not(number, dtype):
    extremes = torch.tensor([0.0, -1e4, -1.0, -88.0, -20.0], dtype=dtype)
    for proximal in extremes:
        found = behaviour_weights(
            proximal.expand(5), extremes, every(5), every_correction()[number], IDS
        )
        assert torch.isfinite(found.weights).all()
        assert torch.isfinite(found.raw).all()


def test_m2po_s_rule_by_hand():
    """Squares .01, .01, .04, .09: means .01, .01, .02, .0375 in that order."""
    proximal = column(0.2, -0.1, 0.3, 0.1)
    zeros = torch.zeros(4, dtype=torch.float64)

    def kept(threshold):
        return m2po_kept(proximal, zeros, every(4), threshold).tolist()

    assert kept(0.04) == [True, True, True, True]
    assert kept(0.03) == [True, True, False, True]
    assert kept(0.015) == [False, True, False, True]
    assert kept(0.005) == [False] * 4


@given(st.lists(st.floats(-3, 3), max_size=30), st.floats(0.01, 2.0))
def test_m2po_keeps_as_many_as_it_may(gaps, threshold):
    proximal = column(*gaps)
    squares = proximal.square()
    kept = m2po_kept(proximal, torch.zeros_like(proximal), every(len(gaps)), threshold)
    if kept.any():
        assert squares[kept].mean().item() < threshold
    if not kept.all():
        # With the nearest of those dropped (and its equals) the mean would be too large.
        nearest = squares[~kept].min()
        assert not kept.any() or squares[kept].max() < nearest
        assert squares[squares <= nearest].mean().item() >= threshold * (1 - 1e-12)


def test_m2po_does_not_see_masked_tokens_nor_order():
    proximal = column(0.2, 5.0, 0.3, 0.1, 0.3)
    mask = torch.tensor([True, False, True, True, True])
    zeros = torch.zeros(5, dtype=torch.float64)
    # .01, .04, .09, .09: of the two equal ones both go.
    assert m2po_kept(proximal, zeros, mask, 0.05).tolist() == [True, False, False, True, False]


def test_loglinear_lies_between_behaviour_and_policy_by_version():
    behaviour, policy = column(-1.0, -1.0, -1.0), column(-3.0, -3.0, -3.0)
    versions = torch.tensor([10, 9, 7])
    # One of two minibatches taken: the policy counts as 10.5.
    found = loglinear_proximal(behaviour, policy, versions, 10, 0.5)
    assert found.tolist() == _near([-1.0, -1.0 - 2.0 * 1 / 1.5, -1.0 - 2.0 * 3 / 3.5])
    assert loglinear_proximal(behaviour, policy, versions, 10, 0.0).tolist() == policy.tolist()


def test_loglinear_carries_no_gradient():
    policy = column(-2.0).requires_grad_(True)
    assert not loglinear_proximal(column(-1.0), policy, torch.tensor([3]), 4, 0.5).requires_grad


def test_mismatch_tells_the_engine_s_part_from_staleness():
    proximal, behaviour = column(-1.0, -1.0, -2.0), column(-1.1, -1.0, -1.0)
    sums = mismatch_sums(proximal, behaviour, torch.tensor([0, 0, 3]))
    assert sums["fresh_tokens"].item() == 2
    assert sums["aged_tokens"].item() == 1
    assert sums["fresh_kl"].item() == _near(math.exp(0.1) - 1.1)
    assert sums["aged_kl"].item() == _near(math.exp(-1.0))
    assert sums["fresh_ratio"].item() == _near(math.exp(0.1) + 1.0)
    assert sums["max_fresh_ratio"].item() == _near(math.exp(0.1))
    assert sums["max_aged_ratio"].item() == _near(math.exp(-1.0))
    nothing = column()
    empty = mismatch_sums(nothing, nothing, torch.tensor([], dtype=torch.int64))
    assert all(value.item() == 0.0 for value in empty.values())


def test_the_largest_of_a_sequence_is_that_of_tokens_that_train():
    config = RejectionSamplingConfig(level="sequence", aggregation="max", lower=0.5)
    mask = torch.tensor([True, True, False])
    found = _corrected([0.25, 0.4, 1.0], config, torch.tensor([0, 0, 0]), mask)
    assert found.outside.tolist() == [True, True, False]
    assert not found.kept.any()
