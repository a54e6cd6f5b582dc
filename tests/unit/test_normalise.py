"""Normalisation against hand-worked cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.algorithms.normalise import normalise
from areal_ray.algorithms.objective_parts import NormConfig


def group_advantages(rewards, *, divide_by_std=True):
    """Of one group; None = could not be scored."""
    values = np.array([np.nan if r is None else r for r in rewards], np.float64)
    config = NormConfig(mean="group", std="group" if divide_by_std else "none")
    return normalise(values, ~np.isnan(values), np.zeros(len(values), int), config)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0], [0.5, -0.5]),
        ([1.0, 1.0, 0.0], [1 / 3, 1 / 3, -2 / 3]),
        ([1.0], [0.0]),
    ],
)
def test_groups_of_any_size_are_centred_on_their_own_mean(rewards, expected):
    np.testing.assert_allclose(group_advantages(rewards, divide_by_std=False), expected, atol=1e-12)


def test_an_unscored_sibling_is_left_out_and_gets_nothing():
    expected = [-1.019049, -0.339683, 1.358732, 0.0]
    np.testing.assert_allclose(group_advantages([2, 4, 9, None]), expected, atol=1e-6)
    np.testing.assert_allclose(group_advantages([2, 4, 9, float("nan")]), expected, atol=1e-6)


def test_one_success_among_failures_teaches_every_sibling():
    np.testing.assert_allclose(
        group_advantages([1, 0, 0, 0]), [3**0.5, *[-(3**-0.5)] * 3], rtol=1e-12
    )


@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3], [1.0] * 8, [7.3], [None, 2.0], []])
def test_rewards_as_good_as_equal_give_exactly_zero(rewards):
    assert group_advantages(rewards).tolist() == [0.0] * len(rewards)


def test_nothing_scored_gives_zero_and_no_warning(recwarn):
    assert group_advantages([None, None]).tolist() == [0.0, 0.0]
    assert len(recwarn) == 0


def test_an_infinite_reward_is_refused():
    with pytest.raises(ValueError, match="infinite"):
        group_advantages([1.0, float("inf")])


@given(
    st.lists(st.integers(-50, 50), min_size=2, max_size=16).filter(lambda r: len(set(r)) > 1),
    st.floats(0.1, 100),
    st.integers(-1000, 1000),
)
def test_scale_and_offset_of_the_reward_do_not_matter(rewards, scale, offset):
    plain = group_advantages(rewards)
    moved = group_advantages([scale * r + offset for r in rewards])
    np.testing.assert_allclose(moved, plain, atol=1e-8)
    np.testing.assert_allclose([plain.mean(), plain.std()], [0.0, 1.0], atol=1e-9)


UNEQUAL = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
GROUPS = np.array([0, 0, 1, 1, 1, 2])


def _normalised(values, groups=None, mask=None, min_spread=1e-6, **scopes):
    values = np.asarray(values, np.float64)
    mask = np.ones(len(values), bool) if mask is None else np.asarray(mask, bool)
    groups = np.zeros(len(values), int) if groups is None else np.asarray(groups)
    return normalise(values, mask, groups, NormConfig(**scopes), min_spread=min_spread)


def test_groups_of_unequal_size_are_kept_apart():
    third = 1 / 3
    found = _normalised(UNEQUAL, GROUPS, mean="group")
    np.testing.assert_allclose(found, [0.5, -0.5, third, third, -2 * third, 0.0], atol=1e-12)
    found = _normalised(UNEQUAL, GROUPS, mean="leave_one_out")
    np.testing.assert_allclose(found, [1.0, -1.0, 0.5, 0.5, -1.0, 0.0], atol=1e-12)


def test_groups_need_not_lie_together():
    order = np.array([5, 2, 0, 3, 1, 4])
    for scopes in ({"mean": "group", "std": "group"}, {"mean": "leave_one_out", "std": "batch"}):
        together = _normalised(UNEQUAL, GROUPS, **scopes)
        apart = _normalised(UNEQUAL[order], GROUPS[order], **scopes)
        np.testing.assert_allclose(apart, together[order], atol=1e-12)


@pytest.mark.parametrize(("others", "expected"), [(0.95, -0.95), (0.6, -0.6)])
def test_an_outlier_is_not_divided_by_the_spread_of_equal_siblings(others, expected):
    rewards = [0.0, *[others] * 7]
    found = _normalised(rewards, mean="leave_one_out")
    np.testing.assert_allclose(found, [expected, *[others / 7] * 7], atol=1e-12)
    # Divided by the whole step's deviation it is bounded by sqrt(n) * n / (n - 1).
    found = _normalised(rewards, mean="leave_one_out", std="batch")
    assert found[0] == pytest.approx(-8 / 7 * 7**0.5)


def test_masked_values_are_never_read():
    found = _normalised([2, 4, 9, np.nan], mask=[1, 1, 1, 0], mean="group", std="group")
    np.testing.assert_allclose(found, [-1.019049, -0.339683, 1.358732, 0.0], atol=1e-6)
    found = _normalised([2, 4, 9, np.inf], mask=[1, 1, 1, 0], mean="batch", std="batch")
    np.testing.assert_allclose(found, [-1.019049, -0.339683, 1.358732, 0.0], atol=1e-6)


@pytest.mark.parametrize("scopes", [{"mean": "group"}, {"mean": "batch", "std": "batch"}])
def test_a_row_left_out_changes_nobody_s_advantage(scopes):
    found = [
        _normalised([1.0, 0.0, excluded], mask=[1, 1, 0], **scopes)[0] for excluded in (1.0, 100.0)
    ]
    assert found[0] == found[1] != 0.0


def test_the_unbiased_deviation_divides_by_one_less():
    found = _normalised([2, 4, 9], mean="group", std="group", unbiased=True)
    np.testing.assert_allclose(found, np.array([-3, -1, 4]) / 13**0.5)
    found = _normalised([2, 4, 9], mean="batch", std="batch", unbiased=True)
    np.testing.assert_allclose(found, np.array([-3, -1, 4]) / 13**0.5)
    assert _normalised([7.0], mean="none", std="group", unbiased=True).tolist() == [7.0]


def test_the_group_s_mean_with_the_step_s_deviation():
    """LitePPO: the deviation is that of the rewards themselves."""
    rewards, groups = [0.0, 2.0, 10.0, 10.0], [0, 0, 1, 1]
    found = _normalised(rewards, groups, mean="group", std="batch")
    np.testing.assert_allclose(found, np.array([-1.0, 1.0, 0.0, 0.0]) / np.std(rewards))


def test_values_that_are_equal_are_centred_on_exactly_zero_and_never_divided():
    equal = [0.1 + 0.2, 0.3, 0.3]
    for mean in ("group", "leave_one_out", "batch"):
        for std in ("none", "batch"):
            assert _normalised(equal, mean=mean, std=std).tolist() == [0.0] * 3
    assert _normalised(equal, std="group").tolist() == equal
    assert _normalised(equal, std="batch").tolist() == equal
    assert _normalised([]).tolist() == []


@pytest.mark.parametrize("reward", [0.1, 12345678.9, -1e15 / 3])
@pytest.mark.parametrize("count", [3, 7, 1000])
def test_the_rounding_of_a_mean_is_no_spread(reward, count):
    equal = [reward] * count
    for mean in ("group", "batch"):
        found = _normalised(equal, mean=mean, std="batch", min_spread=0.0)
        assert found.tolist() == [0.0] * count
    assert _normalised(equal, std="batch", min_spread=0.0).tolist() == equal
    apart = _normalised([reward, reward * (1 + 1e-9)], mean="batch", std="batch", min_spread=0.0)
    np.testing.assert_allclose(np.abs(apart), 1.0)


def test_no_scope_leaves_values_as_they_are():
    assert _normalised([3.0, np.nan], mask=[1, 0]).tolist() == [3.0, 0.0]


@given(
    st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=4),
    st.sampled_from(["group", "leave_one_out", "batch", "none"]),
    st.booleans(),
)
def test_ranks_together_give_what_one_would(shares, mean, unbiased):
    config = NormConfig(mean=mean, std="batch", unbiased=unbiased)
    groups = [np.full(len(share), i) for i, share in enumerate(shares)]
    values = [np.array(share, np.float64) for share in shares]

    def run(position, calls):
        """This rank's result, with the sums of all ranks at each call."""

        def sum_over_ranks(numbers):
            calls.append(numbers)
            return totals[len(calls) - 1]

        mask = np.ones(len(values[position]), bool)
        return normalise(
            values[position], mask, groups[position], config, sum_over_ranks=sum_over_ranks
        )

    whole = np.concatenate(values)
    mean_value = whole.mean() if len(whole) else 0.0
    squares = float(np.square(whole - mean_value).sum())
    totals = [[float(len(whole)), float(whole.sum())], [squares]]
    expected = _normalised(whole, np.concatenate(groups), mean=mean, std="batch", unbiased=unbiased)
    found, sent = [], []
    for position in range(len(values)):
        calls = []
        found.append(run(position, calls))
        sent.append(calls)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-9)
    assert {len(calls) for calls in sent} == {2}  # a rank with nothing takes part all the same
    for number, total in enumerate(totals):
        np.testing.assert_allclose(np.sum([s[number] for s in sent], axis=0), total, atol=1e-9)
