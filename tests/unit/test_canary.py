"""What a replica's proof says, and which votes carry a version."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from areal_ray.core.canary import Probe, compare, is_carried, probe_tokens
from areal_ray.runtime.canary_vote import check_of
from areal_ray.runtime.weights_config import WeightsConfig

LEARNERS = Probe(np.array([3, 1, 4]), np.array([-1.0, -2.0], np.float32), ("float32",))


def logprobs(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_the_probe_is_the_same_everywhere_and_within_the_vocabulary():
    ids = probe_tokens(50, 16)
    assert ids.tolist() == probe_tokens(50, 16).tolist()
    assert (ids.min() >= 0, ids.max() < 50, len(set(ids.tolist())) > 8) == (True, True, True)
    assert ids[:4].tolist() == [44, 14, 13, 23]  # of another machine and another day


def test_rounding_is_no_difference_and_another_model_is():
    close = compare(LEARNERS, logprobs(-1.001, -2.0), "float32", None)
    assert close.difference == ""
    assert close.largest_nats == pytest.approx(0.001, rel=1e-3)
    assert close.mean_nats == pytest.approx(0.0005, rel=1e-3)
    far = compare(LEARNERS, logprobs(-1.0, -2.5), "float32", None)
    assert "token 2 of the probe is -2.5 here and -2 at the learner" in far.difference
    assert "may differ by 0.01" in far.difference


@pytest.mark.parametrize("dtype", ["bfloat16", ""])
def test_an_engine_with_fewer_bits_or_unknown_ones_may_differ_by_more(dtype):
    assert not compare(LEARNERS, logprobs(-1.0, -2.5), dtype, None).difference
    assert compare(LEARNERS, logprobs(-1.0, -3.5), dtype, None).difference
    assert compare(LEARNERS, logprobs(-1.0, -2.5), dtype, 0.1).difference
    assert not compare(LEARNERS, logprobs(-1.0, -2.5), "float32", 0.6).difference


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_log_probs_that_are_not_finite_here_alone_are_a_difference(broken):
    proof = compare(LEARNERS, logprobs(-1.0, broken), "bfloat16", None)
    assert "token 2" in proof.difference
    assert proof.largest_nats == math.inf


def test_weights_that_diverged_are_not_the_engines_fault():
    diverged = Probe(LEARNERS.token_ids, logprobs(math.nan, math.nan), ("float32",))
    assert compare(diverged, logprobs(math.nan, -1.0), "float32", None).difference == ""


def test_an_answer_of_another_length_is_a_difference():
    assert "(3,) log-probs" in compare(LEARNERS, logprobs(-1, -2, -3), "float32", None).difference


@pytest.mark.parametrize(
    ("num_equal", "num_different", "carried"),
    [(1, 0, True), (0, 1, False), (1, 1, True), (1, 2, False), (2, 1, True), (2, 2, True),
     (2, 3, False), (0, 0, False), (5, 5, True), (4, 5, False)],
)  # fmt: skip
def test_a_version_is_carried_by_most_the_learner_included(num_equal, num_different, carried):
    assert is_carried(num_equal, num_different) is carried


def test_what_is_cast_on_its_way_may_differ_by_more():
    plain = check_of(WeightsConfig(), LEARNERS)
    assert plain.probe is LEARNERS
    cast = check_of(WeightsConfig(dtype="bfloat16"), LEARNERS)
    assert cast.probe is not None
    assert not compare(cast.probe, logprobs(-1.0, -2.5), "float32", None).difference
    without = check_of(WeightsConfig(canary={"probe_tokens": 0, "tensors": False}), LEARNERS)
    assert (without.probe, without.tensors) == (None, False)


@pytest.mark.parametrize("fields", [{"probe_tokens": 0, "logprob_tolerance": 0.1},
                                    {"probe_tokens": 1}, {"logprob_tolerance": 0.0}])  # fmt: skip
def test_settings_that_nothing_would_read_are_refused(fields):
    with pytest.raises(ValidationError):
        WeightsConfig(canary=fields)
