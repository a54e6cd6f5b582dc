"""Weights that make sums over micro-batches and ranks the global value."""

import numpy as np
import pytest

from areal_ray.algorithms.aggregation import GlobalCounts, token_weights

# Token losses A = [2] and B = [1, 1, 7]; A and B are two branches of one episode in the last case.
LOSSES = np.array([2.0, 1.0, 1.0, 7.0])
LENGTHS = np.array([1, 3, 3, 3])
TWO = GlobalCounts(tokens=4, sequences=2, rollouts=2)
CASES = {
    "token_mean": 2.75,
    "sequence_mean": 2.5,
    "sequence_sum": 5.5,
    "fixed_length": 1.375,
    "rollout_mean": 2.5,
}


@pytest.mark.parametrize(("kind", "expected"), CASES.items())
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 2], [3], [1], []]])
def test_the_value_is_global_however_the_batch_is_cut(kind, expected, parts):
    total = 0.0
    for part in parts:
        lengths = LENGTHS[np.array(part, int)]
        weights = token_weights(kind, lengths, lengths, TWO, fixed_length=4)
        total += float(weights @ LOSSES[np.array(part, int)])
    assert total == pytest.approx(expected, abs=1e-12)


def test_branches_of_one_episode_weigh_as_one():
    """Episode 1 has branches of 1 and 3 tokens, episode 2 one of 2 tokens."""
    sequences, rollouts = np.array([1, 3, 3, 3, 2, 2]), np.array([4, 4, 4, 4, 2, 2])
    losses = np.array([2.0, 1.0, 1.0, 8.0, 5.0, 7.0])
    counts = GlobalCounts(tokens=6, sequences=3, rollouts=2)
    weights = token_weights("rollout_mean", sequences, rollouts, counts)
    assert float(weights @ losses) == pytest.approx((12 / 4 + 12 / 2) / 2)
    weights = token_weights("sequence_mean", sequences, rollouts, counts)
    assert float(weights @ losses) == pytest.approx((2 + 10 / 3 + 6) / 3)


def test_ranks_with_more_tokens_weigh_more():
    counts = GlobalCounts(tokens=8, sequences=2, rollouts=2)
    two, six = np.full(2, 2), np.full(6, 6)
    first = token_weights("token_mean", two, two, counts).sum() * 1.0
    second = token_weights("token_mean", six, six, counts).sum() * 3.0
    assert first + second == pytest.approx(2.5)


def test_what_is_left_out_is_in_no_denominator():
    """B was truncated and does not train, so it is not counted either."""
    one = np.array([1])
    weights = token_weights("token_mean", one, one, GlobalCounts(1, 1, 1))
    assert float(weights @ LOSSES[:1]) == 2.0


@pytest.mark.parametrize("kind", CASES)
def test_no_tokens_have_no_weights_and_no_division_by_zero(kind, recwarn):
    nothing = np.zeros(0, int)
    assert len(token_weights(kind, nothing, nothing, GlobalCounts(0, 0, 0), fixed_length=4)) == 0
    assert len(recwarn) == 0


def test_counts_that_miss_the_tokens_are_refused():
    one = np.array([1])
    with pytest.raises(ValueError, match="must count them all"):
        token_weights("token_mean", one, one, GlobalCounts(0, 1, 1))
    with pytest.raises(ValueError, match="fixed_length: is None"):
        token_weights("fixed_length", one, one, TWO)
