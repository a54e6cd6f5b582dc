"""Sampling: which token a uniform number draws, and which log-prob is recorded."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from areal_ray.engines.logit_adjustments import adjusted_logits
from areal_ray.engines.row_table import RowTable
from areal_ray.engines.sampling import (
    PLAIN_SAMPLING,
    SamplingRows,
    likeliest,
    sample,
    stream,
    uniforms,
)
from areal_ray.engines.stop_strings import StopStrings
from tests.support.generation import request


def draw(probabilities, uniform, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, adjusted=None):
    """Tokens and log-probs of one distribution at many uniform numbers."""
    n = len(uniform)
    rows = SamplingRows.of(
        np.full(n, temperature, np.float32),
        np.full(n, top_p, np.float32),
        np.full(n, top_k, np.int64),
        np.full(n, min_p, np.float32),
        np.full(n, adjusted is not None),
        np.zeros(n, np.int64),
        torch.device("cpu"),
    )
    logits = torch.log(torch.tensor(probabilities)).expand(n, -1)
    others = None if adjusted is None else torch.tensor(adjusted).expand(n, -1)
    tokens, logprobs = sample(logits, rows, torch.tensor(uniform, dtype=torch.float32), others)
    return tokens.tolist(), logprobs.tolist()


def adjusted(logits, prompt=(), turn=(), **fields):
    """Logits with the penalties and biases of a sampling config."""
    rows = table(prompt, turn, **fields)
    return adjusted_logits(torch.tensor(logits)[None], torch.tensor([0]), rows, 0)[0].tolist()


def table(prompt, turn, **fields):
    """A row that knows a prompt and a turn."""
    rows = RowTable(4, 64, [], StopStrings(Path()))
    rows.append(request("r", prompt, **fields), 64, 0)
    for token in turn:
        rows.record(0, np.array([token]), np.zeros(1, np.float32), 0)
    return rows


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


def test_min_p_keeps_what_is_probable_beside_the_likeliest():
    grid = [0.0, 0.49, 0.51, 0.999]
    tokens, logprobs = draw([0.1, 0.4, 0.4, 0.1], grid, min_p=0.3)
    assert tokens == [1, 1, 2, 2]
    assert logprobs == pytest.approx([math.log(0.4)] * 4)
    assert set(draw([0.1, 0.4, 0.4, 0.1], [*grid, 0.85], min_p=0.2)[0]) == {0, 1, 2, 3}
    assert draw([0.2, 0.5, 0.3], [0.0, 0.999], min_p=1.0)[0] == [1, 1]


def test_min_p_with_top_k_and_top_p_keeps_what_all_allow():
    probabilities = [0.4, 0.3, 0.2, 0.1]
    assert draw(probabilities, [0.999], min_p=0.4, top_k=2)[0] == [1]
    assert draw(probabilities, [0.999], min_p=0.4, top_k=4)[0] == [2]
    assert draw(probabilities, [0.999], min_p=0.1, top_p=0.6)[0] == [1]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("min_p", [0.02, 0.2, 0.7])
def test_min_p_keeps_the_tokens_that_transformers_keeps(temperature, min_p):
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3)) * 2
    kept = MinPLogitsWarper(min_p)(None, logits / temperature)[0]
    grid = np.linspace(0.0, 1.0 - 2.0**-20, 20_000, dtype=np.float32).tolist()
    probabilities = torch.softmax(logits[0], -1).tolist()
    drawn, _ = draw(probabilities, grid, min_p=min_p, temperature=temperature)
    expected = torch.softmax(kept, -1)
    shares = np.bincount(drawn, minlength=30) / len(grid)
    assert set(drawn) == set(torch.isfinite(kept).nonzero()[:, 0].tolist())
    np.testing.assert_allclose(shares, expected.numpy(), atol=2e-4)


def test_penalties_and_biases_draw_from_other_logits_and_record_the_policys():
    grid = [0.01, 0.74, 0.76]
    tokens, logprobs = draw([0.5, 0.3, 0.2], grid, adjusted=[-50.0, math.log(3.0), 0.0])
    assert tokens == [1, 1, 2]
    assert logprobs == pytest.approx([math.log(0.3), math.log(0.3), math.log(0.2)])
    tokens, logprobs = draw([0.8, 0.2], [0.5], temperature=0.5, adjusted=[0.0, 9.0])
    assert tokens == [1]
    assert logprobs == pytest.approx([math.log(0.04 / 0.68)])
    assert draw([0.8, 0.2], [0.0], temperature=0.0, adjusted=[0.0, 9.0])[0] == [1]
    assert draw([0.5, 0.3, 0.2], [0.999], top_k=1, adjusted=[0.0, 1.0, 2.0])[0] == [2]


def test_a_bias_may_draw_what_the_policy_gives_less_than_a_float_holds():
    rows = SamplingRows.of(
        np.ones(2, np.float32),
        np.ones(2, np.float32),
        np.zeros(2, np.int64),
        np.zeros(2, np.float32),
        np.array([False, True]),
        np.zeros(2, np.int64),
        torch.device("cpu"),
    )
    logits = torch.tensor([[0.0, -150.0], [0.0, -150.0]])
    tokens, logprobs = sample(logits, rows, torch.tensor([0.9, 0.9]), torch.tensor([[0.0, 99.0]]))
    assert tokens.tolist() == [0, 1]
    assert logprobs.tolist() == [0.0, -150.0]


def test_presence_and_frequency_penalties_are_openais():
    changed = adjusted(
        [1.0, 2.0, 3.0], prompt=[0, 0], turn=[1, 1, 2], presence_penalty=0.5, frequency_penalty=0.25
    )
    assert changed == [1.0, 2.0 - 0.5 - 2 * 0.25, 3.0 - 0.5 - 0.25]


def test_bias_comes_first_then_repetition_then_presence():
    changed = adjusted(
        [1.0, 2.0],
        prompt=[1],
        turn=[1],
        logit_bias={"1": 2.0, "0": -1.0},
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    assert changed == [0.0, (2.0 + 2.0) / 2.0 - 1.0]


def test_penalties_kept_up_token_by_token_are_those_of_a_fresh_count_however_rows_move():
    random = np.random.default_rng(0)
    rows, ways = RowTable(8, 400, [], StopStrings(Path())), []
    for number in range(8):
        way = {
            "repetition_penalty": (1.0, 1.3)[number % 2],
            "presence_penalty": (0.0, 0.7, -0.4)[number % 3],
            "frequency_penalty": 0.2,
            "logit_bias": {"3": 1.5} if number % 4 == 0 else {},
        }
        ways.append(way)
    count = 0
    for step in range(300):
        while rows.num_rows < 8 and random.random() < 0.4:
            prompt = random.integers(0, 90, random.integers(1, 40))
            rows.append(request(f"{count}", prompt, **ways[count % 8]), 400, 0)
            count += 1
        n = rows.num_rows
        if not n:
            continue
        rows.record(0, random.integers(0, 90, n), np.zeros(n, np.float32), 0)
        if step % 3 == 0:  # others are left behind by several tokens
            which = np.sort(random.choice(n, random.integers(1, n + 1), replace=False))
        else:
            which = np.arange(n)
        logits = torch.randn(n, 100, generator=torch.Generator().manual_seed(step))
        found = adjusted_logits(logits, torch.from_numpy(which), rows, 0)
        for row, line in zip(which.tolist(), found.tolist(), strict=True):
            sent = rows.requests[row]
            expected = _by_the_book(logits[row], sent, rows.sampled(row))
            assert line == pytest.approx(expected.tolist(), abs=1e-5)
        if random.random() < 0.3:
            gone = np.sort(random.choice(n, random.integers(1, n + 1), replace=False))
            rows.remove(gone)
    assert count > 50


def _by_the_book(logits, sent, turn):
    """One row, as the APIs define it."""
    logits, sampling = logits.clone().double(), sent.sampling
    for key, value in sampling.logit_bias.items():
        logits[int(key)] += value
    for token in {*sent.prompt_ids.tolist(), *turn.tolist()}:
        by = sampling.repetition_penalty
        logits[token] = logits[token] * by if logits[token] < 0 else logits[token] / by
    for token in set(turn.tolist()):
        times = turn.tolist().count(token)
        logits[token] -= sampling.frequency_penalty * times + sampling.presence_penalty
    return logits


@pytest.mark.parametrize("penalty", [0.5, 1.3, 4.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(1))
    ids = [3, 7, 7, 0, 19]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits.clone())
    found = adjusted(logits[0].tolist(), ids[:2], ids[2:], repetition_penalty=penalty)
    assert found == pytest.approx(expected[0].tolist(), abs=1e-6)


def test_what_training_samples_with_takes_the_plain_path():
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    nobody, device = np.zeros(3, np.bool_), torch.device("cpu")
    off = np.zeros(3, np.int64)
    assert SamplingRows.of(ones, ones, off, zeros, nobody, off, device) is PLAIN_SAMPLING
    last = np.array([0, 0, 1])
    some = 0.1 * last.astype(np.float32)
    for changed in (
        SamplingRows.of(ones, ones, off, some, nobody, off, device),
        SamplingRows.of(ones, ones, off, zeros, last.astype(np.bool_), off, device),
        SamplingRows.of(ones, ones, last, zeros, nobody, off, device),
        SamplingRows.of(ones, ones, off, zeros, nobody, last, device),
    ):
        assert changed is not PLAIN_SAMPLING


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
        np.zeros(4, np.float32),
        np.zeros(4, np.bool_),
        np.zeros(4, np.int64),
        torch.device("cpu"),
    )
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(4, 1)
    tokens, logprobs = sample(logits, rows, torch.full((4,), 0.9))
    assert tokens.tolist() == [2, 0, 0, 0]
    expected = [0.2, 0.5, 0.5, 0.25 / 0.38]
    assert logprobs.tolist() == pytest.approx([math.log(p) for p in expected], abs=1e-6)


def told_rows(temperature, num_told, is_adjusted=False, top_k=0):
    """Rows of various temperatures, each of which asks for so many of the likeliest tokens."""
    n = len(temperature)
    ones, off = np.ones(n, np.float32), np.zeros(n, np.int64)
    adjusted = np.full(n, is_adjusted)
    return SamplingRows.of(
        np.array(temperature, np.float32), ones, off + top_k, ones - 1.0, adjusted,
        np.array(num_told), torch.device("cpu"),
    )  # fmt: skip


@pytest.mark.parametrize("is_adjusted", [False, True])
def test_the_likeliest_are_the_top_of_the_log_softmax_that_is_recorded(is_adjusted):
    temperature, num_told = [1.0, 0.7, 0.0, 1.3], [3, 5, 5, 0]
    rows = told_rows(temperature, num_told, is_adjusted, top_k=2)
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 40, generator=random) * 3
    others = torch.randn(4, 40, generator=random) * 3 if is_adjusted else None
    tokens, logprobs = sample(logits, rows, torch.rand(4, generator=random), others)
    ids, found = likeliest(logits, rows, tokens, logprobs)
    assert ids.shape == found.shape == (3, 5)  # who asks for fewer is given its part of them
    for row in range(3):
        whole = torch.log_softmax(logits[row].double() / (temperature[row] or 1.0), -1)
        expected = torch.topk(whole, 5)
        assert ids[row].tolist() == expected.indices.tolist()
        torch.testing.assert_close(found[row].double(), expected.values, rtol=0, atol=1e-5)
        told = dict(zip(ids[row].tolist(), found[row].tolist(), strict=True))
        own = float(logprobs[row])
        assert told.get(int(tokens[row]), own) == own  # to the last bit


def test_at_a_low_temperature_the_likeliest_keep_order_and_logprobs_that_no_probability_holds():
    rows = told_rows([0.01], [4])
    logits = torch.tensor([[1.0, 4.0, 3.0, 2.0, 0.0]])
    tokens, logprobs = sample(logits, rows, torch.tensor([0.5]))
    ids, found = likeliest(logits, rows, tokens, logprobs)
    assert ids.tolist() == [[1, 2, 3, 0]]
    assert found.tolist() == [pytest.approx([0.0, -100.0, -200.0, -300.0])]


def test_a_vocabulary_may_be_smaller_than_what_is_asked_for():
    rows = told_rows([1.0], [20])
    drawn = sample(torch.zeros(1, 3), rows, torch.tensor([0.5]))
    assert likeliest(torch.zeros(1, 3), rows, *drawn)[0].shape == (1, 3)


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 7.0]), min_size=2, max_size=30),
    largest=st.booleans(),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
@settings(deadline=None, max_examples=100)
def test_no_uniform_number_draws_a_token_of_probability_zero(weights, largest, top_p, top_k, min_p):
    if sum(weights) == 0.0:
        weights = [*weights, 1.0]
    probabilities = [w / sum(weights) for w in weights]
    uniform = 1.0 - 2.0**-23 if largest else 0.0
    tokens, logprobs = draw(probabilities, [uniform], top_p=top_p, top_k=top_k, min_p=min_p)
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
