"""Losses of pairs: numbers by hand, gradients by finite differences."""

import math

import pytest
import torch

from areal_ray.algorithms.preference import bradley_terry_loss, dpo_loss, sequence_log_ratios
from tests.support.columns import column, finite_differences, gradient, ones


def _log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def test_log_ratios_of_answers_are_sums_or_averages():
    logprobs, reference = column(-1.0, -2.0, -3.0), column(-1.5, -1.0, -3.5)
    ids = torch.tensor([1, 1, 0])
    found = sequence_log_ratios(logprobs, reference, ids, 3)
    assert found.tolist() == pytest.approx([0.5, -0.5, 0.0])
    found = sequence_log_ratios(logprobs, reference, ids, 3, length_normalised=True)
    assert found.tolist() == pytest.approx([0.5, -0.25, 0.0])


def test_long_answers_are_summed_in_float64():
    count = 100_000
    logprobs = torch.full((count,), -0.1, dtype=torch.float32)
    found = sequence_log_ratios(
        logprobs, torch.zeros(count), torch.zeros(count, dtype=torch.int64), 1
    )
    assert found.item() == pytest.approx(-float(logprobs[0].double().abs()) * count, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "smoothing", "expected"),
    [
        ("sigmoid", 0.0, -_log_sigmoid(0.2 * 3)),
        ("sigmoid", 0.1, -0.9 * _log_sigmoid(0.6) - 0.1 * _log_sigmoid(-0.6)),
        ("ipo", 0.0, (3 - 2.5) ** 2),
        ("hinge", 0.0, 0.4),
    ],
)
def test_each_loss_at_a_margin_of_three(kind, smoothing, expected):
    loss, sums = dpo_loss(
        column(1.0), column(-2.0), ones(1), beta=0.2, kind=kind, label_smoothing=smoothing
    )
    assert loss.item() == pytest.approx(expected)
    assert sums["reward_margin"].item() == pytest.approx(0.6)
    assert sums["chosen_reward"].item() == pytest.approx(0.2)
    assert sums["rejected_reward"].item() == pytest.approx(-0.4)
    assert sums["pair_accuracy"].item() == 1


def test_hinge_is_satisfied_by_a_wide_margin():
    assert dpo_loss(column(6.0), column(0.0), ones(1), beta=0.2, kind="hinge")[0].item() == 0.0


@pytest.mark.parametrize(
    ("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0), ("hinge", 0.0)]
)
def test_gradients_agree_with_finite_differences(kind, smoothing):
    weights = column(0.5, 0.3, 0.2)

    def value(both):
        return dpo_loss(
            both[:3], both[3:], weights, beta=0.3, kind=kind, label_smoothing=smoothing
        )[0]

    at = column(1.0, -2.0, 8.0, 0.5, 3.0, -9.0)
    slope = gradient(value, at)
    torch.testing.assert_close(slope, finite_differences(value, at))
    assert slope.abs().max() > 0.01
    torch.testing.assert_close(slope[:3], -slope[3:])


def test_a_reward_model_learns_from_the_difference_alone():
    loss, sums = bradley_terry_loss(column(2.0, 1.0), column(1.0, 1.0), column(0.5, 0.5))
    assert loss.item() == pytest.approx(-0.5 * _log_sigmoid(1.0) + 0.5 * math.log(2))
    assert (sums["pairs"].item(), sums["pair_accuracy"].item()) == (2, 1.5)

    def value(both):
        return bradley_terry_loss(both[:2], both[2:], column(0.5, 0.5))[0]

    at = column(2.0, 1.0, 1.0, 1.0)
    slope = gradient(value, at)
    torch.testing.assert_close(slope, finite_differences(value, at))
    assert slope[0].item() == pytest.approx(-0.5 / (1 + math.e))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_huge_margins_stay_finite(dtype, kind):
    chosen = torch.tensor([1e4, -1e4, 0.0], dtype=dtype, requires_grad=True)
    rejected = -chosen.detach()
    loss, _ = dpo_loss(chosen, rejected, torch.ones_like(rejected), beta=1.0, kind=kind)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(chosen.grad).all()
    scores = chosen.detach().requires_grad_(True)
    loss, _ = bradley_terry_loss(scores, rejected, torch.ones_like(rejected))
    loss.backward()
    assert torch.isfinite(scores.grad).all()


def test_pairs_cut_into_micro_batches_add_up():
    chosen, rejected, weights = column(1.0, -2.0, 0.3), column(0.0, 1.0, 0.1), column(*[1 / 3] * 3)
    whole = dpo_loss(chosen, rejected, weights, beta=0.5)[0]
    parts = [
        dpo_loss(chosen[i : i + 1], rejected[i : i + 1], weights[i : i + 1], beta=0.5)[0]
        for i in (2, 0, 1)
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-12)


def test_no_pairs_have_no_loss():
    nothing = column()
    loss, sums = dpo_loss(nothing, nothing, nothing, beta=0.1)
    assert loss.item() == 0.0
    assert all(value.item() == 0.0 for value in sums.values())


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.5), ("ipo", 0.1), ("sigmoid", -0.1)])
def test_smoothing_that_makes_no_sense_is_refused(kind, smoothing):
    with pytest.raises(ValueError, match="label_smoothing: is"):
        dpo_loss(column(1.0), column(0.0), ones(1), beta=0.1, kind=kind, label_smoothing=smoothing)
