"""Supervised examples and the rule that decides whether a phase goes on."""

import numpy as np
import pytest

from areal_ray.engines.sft import SftEvaluation, SftExample, SftPhase, SftUntil


def _phase(**fields):
    return SftPhase(source="m:f", steps=10, batch_size=4, **fields)


def _seen(exact=0.0, spans=()):
    return SftEvaluation(8, 1.0, 0.5, exact, tuple(spans))


def test_spans_are_the_unbroken_runs_of_trained_tokens():
    mask = np.array([0, 1, 1, 0, 0, 1, 0, 1], bool)
    example = SftExample(np.arange(8, dtype=np.int32), mask)
    assert example.span_ids.tolist() == [-1, 0, 0, -1, -1, 1, -1, 2]


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="loss_mask has 3 entries, token_ids has 2"):
        SftExample(np.zeros(2, np.int32), np.zeros(3, bool))


def test_a_phase_without_a_gate_ends_after_its_steps():
    phase = _phase()
    assert not phase.is_finished(9, None)
    assert phase.is_finished(10, None)
    assert not phase.is_look_due(10)


def test_a_gated_phase_goes_on_until_the_span_is_reproduced_or_max_steps():
    phase = _phase(until=SftUntil(exact_match=0.4, span=1, every_steps=5), max_steps=30)
    assert not phase.is_finished(9, _seen(1.0, [1.0, 1.0]))
    assert not phase.is_finished(10, _seen(1.0, [1.0, 0.39]))
    assert not phase.is_finished(10, None)
    assert phase.is_finished(10, _seen(0.0, [0.0, 0.4]))
    assert phase.is_finished(30, _seen(0.0, [0.0, 0.0]))
    assert [step for step in range(31) if phase.is_look_due(step)] == [10, 15, 20, 25, 30]


def test_without_a_span_whole_examples_must_be_reproduced():
    phase = _phase(until=SftUntil(exact_match=0.5), max_steps=30)
    assert not phase.is_finished(10, _seen(0.4, [1.0]))
    assert phase.is_finished(10, _seen(0.5, [0.0]))


def test_a_span_that_no_example_has_is_never_reproduced():
    assert _seen(1.0, [1.0]).match_of(3) == 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"until": SftUntil(exact_match=0.4)}, "max_steps: is missing"),
        ({"max_steps": 20}, "without until"),
        ({"until": SftUntil(exact_match=0.4), "max_steps": 5}, "must be >= steps = 10"),
    ],
)
def test_a_gate_without_an_end_or_an_end_without_a_gate_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        _phase(**fields)
