"""Length penalty, bias, scale and bounds of rewards."""

import numpy as np
import pytest

from areal_ray.algorithms.objective_parts import RewardShapingConfig
from areal_ray.algorithms.shaping import overlong_penalty, shape_rewards


def test_the_penalty_grows_linearly_over_the_last_tokens_and_no_further():
    lengths = [0, 80, 85, 90, 100, 120]
    found = overlong_penalty(lengths, tokens=20, limit=100, factor=0.5)
    np.testing.assert_allclose(found, [0.0, 0.0, -0.125, -0.25, -0.5, -0.5])


def test_the_order_is_penalty_bias_scale_clip():
    config = RewardShapingConfig(
        overlong_tokens=20, overlong_limit_tokens=100, bias=-0.5, scaling=10.0, clip=6.0
    )
    found = shape_rewards([1.0, 1.0, 0.0, 2.0], [50, 90, 100, 1], config)
    # (1 - .5) * 10; (1 - .5 - .5) * 10; (0 - 1 - .5) * 10 = -15, cut; 15, cut
    np.testing.assert_allclose(found, [5.0, 0.0, -6.0, 6.0])


def test_shaping_that_is_off_changes_nothing_and_asks_for_nothing():
    found = shape_rewards([0.25, None, -3.0], [1, 2, 3], RewardShapingConfig())
    np.testing.assert_array_equal(found, [0.25, np.nan, -3.0])


def test_what_has_no_reward_gets_none_by_shaping():
    config = RewardShapingConfig(overlong_tokens=2, overlong_limit_tokens=4, bias=1.0, clip=0.5)
    found = shape_rewards([None, float("nan"), 1.0], [4, 4, 4], config)
    assert np.isnan(found).tolist() == [True, True, False]


def test_a_penalty_without_its_limit_is_refused():
    with pytest.raises(ValueError, match="overlong_limit_tokens: is null"):
        shape_rewards([1.0], [1], RewardShapingConfig(overlong_tokens=2))
