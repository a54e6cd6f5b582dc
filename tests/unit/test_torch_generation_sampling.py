"""Sampling: which token a uniform number draws, and which log-prob is recorded."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_ray.engines.sampling import SamplingRows, sample, stream, uniforms


def draw(probabilities, uniform, *, temperature=1.0, top_p=1.0, top_k=0):
    """Tokens and log-probs of one distribution at many uniform numbers."""
    n = len(uniform)
    rows = SamplingRows.of(
        np.full(n, temperature, np.float32),
        np.full(n, top_p, np.float32),
        np.full(n, top_k, np.int64),
        torch.device("cpu"),
    )
    logits = torch.log(torch.tensor(probabilities)).expand(n, -1)
    tokens, logprobs = sample(logits, rows, torch.tensor(uniform, dtype=torch.float32))
    return tokens.tolist(), logprobs.tolist()


def test_a_uniform_number_draws_by_the_inverse_cumulative_distribution():
    tokens, logprobs = draw([0.5, 0.3, 0.2], [0.0, 0.49, 0.51, 0.79, 0.81, 0.999])
    assert tokens == [0, 0, 1, 1, 2, 2]
    assert logprobs == pytest.approx([math.log(p) for p in (0.5, 0.5, 0.3, 0.3, 0.2, 0.2)])


def test_top_p_chooses_but_does_not_renormalise_the_recorded_logprob():
    tokens, logprobs = draw([0.5, 0.3, 0.2], [0.62, 0.63, 0.999], top_p=0.75)
    assert tokens == [0, 1, 1]  # the border is at .5 / .8 = .625
    assert logprobs == pytest.approx([math.log(0.5), math.log(0.3), math.log(0.3)])


def test_top_p_smaller_than_the_best_token_keeps_just_that_one():
    assert draw([0.2, 0.5, 0.3], [0.0, 0.999], top_p=0.1)[0] == [1, 1]


def test_top_k_keeps_the_k_most_likely():
    assert draw([0.2, 0.5, 0.3], [0.0, 0.62, 0.63, 0.999], top_k=2)[0] == [1, 1, 2, 2]


def test_top_k_and_top_p_together_keep_what_both_allow():
    assert draw([0.4, 0.3, 0.2, 0.1], [0.999], top_k=3, top_p=0.6)[0] == [1]
    assert draw([0.4, 0.3, 0.2, 0.1], [0.999], top_k=1, top_p=0.95)[0] == [0]


def test_temperature_is_applied_before_the_recorded_logprob():
    _, logprobs = draw([0.8, 0.2], [0.0], temperature=0.5)
    assert logprobs == pytest.approx([math.log(0.64 / 0.68)])


def test_temperature_zero_is_greedy_and_records_at_temperature_one():
    tokens, logprobs = draw([0.3, 0.6, 0.1], [0.99], temperature=0.0)
    assert tokens == [1]
    assert logprobs == pytest.approx([math.log(0.6)])


def test_rows_of_one_batch_keep_their_own_settings():
    rows = SamplingRows.of(
        np.array([1.0, 0.0, 1.0, 0.5], np.float32),
        np.array([1.0, 1.0, 0.5, 1.0], np.float32),
        np.array([0, 0, 0, 1], np.int64),
        torch.device("cpu"),
    )
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(4, 1)
    tokens, logprobs = sample(logits, rows, torch.full((4,), 0.9))
    assert tokens.tolist() == [2, 0, 0, 0]
    expected = [0.2, 0.5, 0.5, 0.25 / 0.38]
    assert logprobs.tolist() == pytest.approx([math.log(p) for p in expected], abs=1e-6)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 7.0]), min_size=2, max_size=30),
    largest=st.booleans(),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5]),
)
@settings(deadline=None, max_examples=100)
def test_no_uniform_number_draws_a_token_of_probability_zero(weights, largest, top_p, top_k):
    if sum(weights) == 0.0:
        weights = [*weights, 1.0]
    probabilities = [w / sum(weights) for w in weights]
    uniform = 1.0 - 2.0**-23 if largest else 0.0
    tokens, logprobs = draw(probabilities, [uniform], top_p=top_p, top_k=top_k)
    assert probabilities[tokens[0]] > 0.0
    assert math.isfinite(logprobs[0])


def test_uniform_numbers_depend_on_seed_and_position_alone_and_look_uniform():
    seeds = np.array([stream(seed) for seed in range(200)], dtype=np.uint64)
    table = np.stack([uniforms(seeds, np.full(200, i, np.int64)) for i in range(500)])
    np.testing.assert_array_equal(uniforms(seeds[7:8], np.array([3])), table[3, 7:8])
    assert table.min() >= 0.0
    assert table.max() < 1.0
    n = table.size  # mean 1/2 and variance 1/12, within five standard errors
    assert abs(table.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(table.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    for neighbour in (table[1:] * table[:-1], table[:, 1:] * table[:, :-1]):
        assert abs(neighbour.mean() - 0.25) < 5 * math.sqrt(7 / 144 / neighbour.size)


def test_negative_and_huge_seeds_are_allowed_and_differ():
    assert len({int(stream(seed)) for seed in (-1, 0, 1, 2**64 + 5, 2**63)}) == 5
