"""Advantage estimation against hand-worked episodes and the plain recursion."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.algorithms.gae import (
    token_gae,
    trajectory_lambdas,
    turn_gae,
)
from areal_ray.algorithms.objective_parts import GaeConfig


def _array(*values):
    return np.array(values, np.float64)


def test_returns_pass_over_what_a_tool_said():
    rewards = _array(0.0, 0.5, np.nan, np.nan, 0.0, 1.0)
    trained = np.array([1, 1, 0, 0, 1, 1], bool)
    values = np.where(trained, 0.0, np.nan)
    _, returns = token_gae(rewards, values, discount=1.0, gae_lambda=1.0, trained=trained)
    np.testing.assert_allclose(returns, [1.5, 1.5, 0.0, 0.0, 1.0, 1.0])


def test_a_step_over_a_tool_s_tokens_is_one_step():
    rewards, values = _array(0.0, 7.0, 1.0), _array(0.2, 7.0, 0.5)
    trained = np.array([True, False, True])
    advantages, _ = token_gae(rewards, values, discount=0.9, gae_lambda=0.8, trained=trained)
    np.testing.assert_allclose(advantages, [0.9 * 0.5 - 0.2 + 0.72 * 0.5, 0.0, 0.5])


def test_truncation_is_no_end():
    flat = {"discount": 1.0, "gae_lambda": 1.0}
    rewards, values = np.zeros(3), np.full(3, 0.4)
    advantages, returns = token_gae(rewards, values, bootstrap=0.4, **flat)
    np.testing.assert_allclose(advantages, [0.0] * 3, atol=1e-12)
    np.testing.assert_allclose(returns, [0.4] * 3)
    advantages, returns = token_gae(rewards, values, **flat)
    np.testing.assert_allclose(advantages, [-0.4] * 3)
    np.testing.assert_allclose(returns, [0.0] * 3, atol=1e-12)


def test_discount_and_lambda_by_hand():
    advantages, returns = token_gae(
        _array(0, 0, 1), _array(0.2, 0.5, 0.8), discount=0.99, gae_lambda=0.95
    )
    np.testing.assert_allclose(advantages, [0.74653, 0.4801, 0.2], atol=1e-5)
    np.testing.assert_allclose(returns, [0.94653, 0.9801, 1.0], atol=1e-5)


def test_lambda_zero_looks_one_step_ahead_and_lambda_one_to_the_end():
    rewards, values = _array(1, 2, 3), _array(0.5, 0.25, 0.125)
    advantages, _ = token_gae(rewards, values, discount=0.5, gae_lambda=0.0, bootstrap=4.0)
    np.testing.assert_allclose(advantages, [0.625, 1.8125, 4.875])
    _, returns = token_gae(rewards, values, discount=0.5, gae_lambda=1.0, bootstrap=4.0)
    np.testing.assert_allclose(returns, [1 + 1 + 0.75 + 0.5, 2 + 1.5 + 1, 3 + 2])


_NUMBERS = st.floats(-3, 3)


@given(
    st.lists(st.tuples(_NUMBERS, _NUMBERS), max_size=40),
    st.floats(0.1, 1),
    st.floats(0, 1),
    _NUMBERS,
)
def test_it_is_the_plain_recursion(steps, discount, gae_lambda, bootstrap):
    rewards, values = (_array(*(step[i] for step in steps)) for i in (0, 1))
    found, returns = token_gae(
        rewards, values, discount=discount, gae_lambda=gae_lambda, bootstrap=bootstrap
    )
    expected, ahead, following = [], 0.0, bootstrap
    for reward, value in reversed(steps):
        ahead = reward + discount * following - value + discount * gae_lambda * ahead
        following = value
        expected.insert(0, ahead)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    np.testing.assert_allclose(returns, found + values, atol=1e-12)


def test_a_turn_is_one_step_and_all_its_tokens_have_the_same():
    rewards = _array(0.1, 0.2, 0.0, 0.0, 1.0)
    values = _array(0.3, 9.0, 0.5, 9.0, 9.0)  # only the first of a turn is read
    advantages, returns = turn_gae(
        rewards, values, np.array([0, 0, 3, 3, 3]), discount=0.9, gae_lambda=0.8
    )
    last = 1.0 - 0.5
    first = 0.3 + 0.9 * 0.5 - 0.3 + 0.72 * last
    np.testing.assert_allclose(advantages, [first] * 2 + [last] * 3)
    np.testing.assert_allclose(returns, [first + 0.3] * 2 + [1.0] * 3)


def test_a_truncated_last_turn_is_bootstrapped():
    zeros = np.zeros(2)
    advantages, _ = turn_gae(
        zeros, zeros, np.array([0, 1]), discount=0.5, gae_lambda=1.0, bootstrap=4.0
    )
    np.testing.assert_allclose(advantages, [1.0, 2.0])


def test_without_any_token_there_is_nothing():
    nothing = np.zeros(0)
    for found in (
        token_gae(nothing, nothing, discount=0.9, gae_lambda=0.9, bootstrap=1.0),
        turn_gae(nothing, nothing, np.zeros(0, int), discount=0.9, gae_lambda=0.9),
    ):
        assert [len(column) for column in found] == [0, 0]


def test_lambdas_by_length():
    lengths = [1, 10, 20, 100, 1000]
    found = trajectory_lambdas(GaeConfig(lambda_method="length_adaptive"), lengths)
    np.testing.assert_allclose(found, [0.0, 0.0, 0.0, 0.8, 0.98], atol=1e-12)
    found = trajectory_lambdas(GaeConfig(lambda_method="relative_position", share=0.3), lengths)
    assert found[0] == 1.0
    np.testing.assert_allclose(found[1:] ** (np.array(lengths[1:]) - 1.0), 0.3)
    found = trajectory_lambdas(GaeConfig(gae_lambda=0.95), lengths)
    np.testing.assert_allclose(found, [0.95] * 5)
