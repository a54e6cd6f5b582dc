"""The policy losses other than the clip, against numbers worked by hand."""

import math

import pytest
import torch

from areal_ray.algorithms.losses import ppo_clip_loss
from areal_ray.algorithms.surrogates import (
    cispo_loss,
    gspo_loss,
    reinforce_loss,
    sapo_loss,
    sequence_means,
    topr_loss,
)
from tests.support.columns import column, every, gradient, ones


def _ids(*values):
    return torch.tensor(values, dtype=torch.int64)


ALL = {
    "ppo_clip": lambda *flat: ppo_clip_loss(*flat),
    "reinforce": lambda *flat: reinforce_loss(*flat),
    "gspo": lambda *flat: gspo_loss(*flat, sequence_ids=_ids(0, 0), clip_range=(0.8, 1.2)),
    "sapo": lambda *flat: sapo_loss(*flat),
    "cispo": lambda *flat: cispo_loss(*flat, clip_range=(0.0, 5.0)),
    "topr": lambda *flat: topr_loss(*flat, sequence_ids=_ids(0, 0)),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("hidden", [120.0, math.nan, math.inf, -math.inf])
def test_a_masked_token_changes_nothing_whatever_it_holds(name, hidden):
    def value(logprobs, old, advantages, mask, weights):
        return ALL[name](logprobs, old, advantages, mask, weights)[0]

    mask = torch.tensor([True, False])
    columns = (column(0.0, 0.0), column(-1.0, hidden), mask, column(1.0, hidden))
    slope = gradient(lambda x: value(x, *columns), column(0.1, hidden))
    clean = (column(0.0, 0.0), column(-1.0, 0.0), mask, column(1.0, 0.0))
    expected = gradient(lambda x: value(x, *clean), column(0.1, 0.0))
    assert slope.tolist() == expected.tolist()
    assert slope[0].item() != 0.0
    loss, sums = ALL[name](column(0.1, hidden), *columns)
    assert loss.item() == value(column(0.1, 0.0), *clean).item()
    assert sums["tokens"].item() == 1
    assert all(math.isfinite(x) for x in sums.values())


@pytest.mark.parametrize("name", ALL)
def test_a_batch_with_an_empty_mask_has_no_gradient(name):
    hidden, mask = column(math.nan, math.inf), torch.tensor([False, False])

    def value(logprobs):
        return ALL[name](logprobs, hidden, hidden, mask, hidden)[0]

    assert value(hidden).item() == 0.0
    assert gradient(value, hidden).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("gap", [1e4, -1e4, 88.0, -88.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 1e3])
def test_huge_ratios_stay_finite(dtype, name, gap, advantage):
    logprobs, old = torch.tensor([[0.0, gap], [-gap, 0.0]]).to(dtype)
    logprobs.requires_grad_(True)
    flat = (old, torch.full_like(old, advantage), every(2), torch.ones_like(old))
    loss, _ = ALL[name](logprobs, *flat)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()


def test_reinforce_is_advantage_times_log_prob():
    loss, sums = reinforce_loss(
        column(-1.0, -2.0), column(-1.5, -2.0), column(3.0, -1.0), every(2), column(0.5, 0.25)
    )
    assert loss.item() == pytest.approx(0.5 * 3.0 - 0.25 * 2.0)
    assert sums["ratio"].item() == pytest.approx(math.exp(0.5) + 1.0)


def test_gspo_takes_the_geometric_mean_of_a_sequence():
    """Ratios 4 and 1 have the geometric mean 2; the other sequence's is 0.5."""
    logprobs = torch.log(column(4.0, 1.0, 0.5))
    advantages = column(1.0, 3.0, -4.0)  # means 2 and -4
    flat = (torch.zeros(3, dtype=torch.float64), advantages, every(3), column(0.5, 0.5, 1.0))
    loss, sums = gspo_loss(logprobs, *flat, sequence_ids=_ids(0, 0, 1), clip_range=(0.1, 3.0))
    assert loss.item() == pytest.approx(-2.0 * 2.0 + 0.5 * 4.0)
    assert sums["clipped"].item() == 0
    loss, sums = gspo_loss(logprobs, *flat, sequence_ids=_ids(0, 0, 1), clip_range=(0.8, 1.5))
    assert loss.item() == pytest.approx(-1.5 * 2.0 + 0.8 * 4.0)
    assert sums["clipped"].item() == 3
    assert sums["max_ratio"].item() == pytest.approx(2.0)


def test_gspo_clips_a_sequence_whole():
    """One token far out of range takes its siblings' gradient along, as GRPO's would not."""
    at = torch.log(column(9.0, 1.0))
    zeros = torch.zeros(2, dtype=torch.float64)
    slope = gradient(
        lambda x: gspo_loss(
            x, zeros, ones(2), every(2), ones(2), sequence_ids=_ids(0, 0), clip_range=(0.8, 1.2)
        )[0],
        at,
    )
    assert slope.tolist() == [0.0, 0.0]
    slope = gradient(lambda x: ppo_clip_loss(x, zeros, ones(2), every(2), ones(2))[0], at)
    assert slope.tolist() == pytest.approx([0.0, -1.0])


def test_a_sequence_mean_knows_no_masked_entry():
    mask = torch.tensor([True, True, False, False])
    values = column(2.0, 2.0, 50.0, 50.0).masked_fill(~mask, 0.0)
    assert sequence_means(values, _ids(0, 0, 0, 0), mask)[0].item() == 2.0


def test_gspo_s_advantage_is_the_mean_over_tokens_that_train():
    mask = torch.tensor([True, True, False, False])
    zeros = torch.zeros(4, dtype=torch.float64)
    advantages = column(2.0, 2.0, 50.0, 50.0)
    loss, _ = gspo_loss(
        zeros, zeros, advantages, mask, ones(4), sequence_ids=_ids(0, 0, 0, 0),
        clip_range=(0.8, 1.2),
    )  # fmt: skip
    assert loss.item() == pytest.approx(-2.0 * 2)


def test_sapo_s_gate_and_its_two_temperatures():
    def loss(ratio, advantage, temperatures):
        return sapo_loss(
            column(math.log(ratio)), column(0.0), column(advantage), every(1), ones(1),
            temperatures=temperatures,
        )[0].item()  # fmt: skip

    def sigmoid(x):
        return 1.0 / (1.0 + math.exp(-x))

    assert loss(1.0, 3.0, (1.0, 2.0)) == pytest.approx(-4.0 * 0.5 * 3.0)
    assert loss(1.5, 1.0, (2.0, 9.0)) == pytest.approx(-2.0 * sigmoid(1.0))
    assert loss(1.5, -1.0, (9.0, 2.0)) == pytest.approx(2.0 * sigmoid(1.0))


def test_cispo_never_loses_a_token_s_gradient():
    at = torch.log(column(0.5, 9.0, 9.0))
    advantages = column(1.0, 2.0, -1.0)
    flat = (torch.zeros(3, dtype=torch.float64), advantages, every(3), ones(3))
    slope = gradient(lambda x: cispo_loss(x, *flat, clip_range=(0.0, 5.0))[0], at)
    assert slope.tolist() == pytest.approx([-0.5, -5.0 * 2.0, 5.0])
    loss, sums = cispo_loss(at, *flat, clip_range=(0.0, 5.0))
    assert loss.item() == pytest.approx(-0.5 * math.log(0.5) - 5.0 * math.log(9.0))
    assert sums["clipped"].item() == 2


def test_topr_fades_bad_sequences_alone_and_by_their_whole_ratio():
    # Ratios: bad 0.5 * 0.5 = 0.25; good 0.25; bad 4, which stays 1.
    at = torch.log(column(0.5, 0.5, 0.5, 0.5, 4.0))
    advantages = column(-1.0, -1.0, 2.0, 2.0, -3.0)
    flat = (torch.zeros(5, dtype=torch.float64), advantages, every(5), ones(5))
    ids = _ids(0, 0, 1, 1, 2)
    slope = gradient(lambda x: topr_loss(x, *flat, sequence_ids=ids)[0], at)
    assert slope.tolist() == pytest.approx([0.25, 0.25, -2.0, -2.0, 3.0])
    assert topr_loss(at, *flat, sequence_ids=ids)[1]["clipped"].item() == 2


def test_gspo_judges_a_sequence_by_one_advantage():
    """Advantages 3 and -1 are 1 for both tokens, so the clip holds both: 1.2, not 1.5."""
    at = torch.log(column(1.5, 1.5))
    loss, _ = gspo_loss(
        at, torch.zeros_like(at), column(3.0, -1.0), every(2), ones(2),
        sequence_ids=_ids(0, 0), clip_range=(0.8, 1.2),
    )  # fmt: skip
    assert loss.item() == pytest.approx(-1.2 * 2)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 2.0, -2.4), (1.5, -2.0, 3.0), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6)],
)
def test_gspo_clips_the_side_that_would_gain_alone(ratio, advantage, expected):
    loss, _ = gspo_loss(
        column(math.log(ratio)), column(0.0), column(advantage), every(1), ones(1),
        sequence_ids=_ids(0), clip_range=(0.8, 1.2),
    )  # fmt: skip
    assert loss.item() == pytest.approx(expected)
