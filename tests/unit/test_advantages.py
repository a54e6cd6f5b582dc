"""Group advantages against hand-worked cases."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.algorithms.advantages import group_advantages


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
