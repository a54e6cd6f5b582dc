"""The alarm for a rollout engine that disagrees with the learner."""

from areal_ray.telemetry.alarm import FRESH_TOKENS, MISMATCH, PROBE, MismatchAlarm, ProbeAlarm


def test_a_mismatch_above_the_threshold_is_told_once_until_it_was_below_again():
    alarm = MismatchAlarm(0.01)
    values = [0.001, 0.02, 0.03, 0.009, 0.05]
    told = [alarm.check(step, {MISMATCH: value}) for step, value in enumerate(values, 1)]
    assert [line is not None for line in told] == [False, True, False, False, True]
    assert told[1] is not None
    assert told[1].startswith(f"step 2: {MISMATCH} is 0.02, above telemetry.mismatch_alarm_nats")


def test_a_step_that_does_not_know_the_mismatch_changes_nothing():
    alarm = MismatchAlarm(0.01)
    assert alarm.check(1, {MISMATCH: 1.0}) is not None
    assert alarm.check(2, {}) is None
    assert alarm.check(3, {MISMATCH: 1.0}) is None


def test_without_a_threshold_nothing_is_told():
    assert MismatchAlarm(None).check(1, {MISMATCH: 9.0}) is None


def test_a_run_without_fresh_tokens_is_told_once_that_the_alarm_is_blind():
    alarm = MismatchAlarm(0.01)
    told = [alarm.check(1, {MISMATCH: 0.001, FRESH_TOKENS: 50.0})]
    told += [alarm.check(step, {FRESH_TOKENS: 0.0}) for step in range(2, 60)]
    lines = [line for line in told if line is not None]
    assert len(lines) == 1
    assert lines[0].startswith(f"step 21: note: {MISMATCH}, which tells")
    assert "in 20 steps so far" in lines[0]
    silent = MismatchAlarm(None)
    assert not any(silent.check(step, {FRESH_TOKENS: 0.0}) for step in range(60))


def test_steps_that_measure_nothing_of_the_kind_do_not_count_as_blind():
    alarm = MismatchAlarm(0.01)
    assert not any(alarm.check(step, {}) for step in range(60))


def test_a_probe_above_the_threshold_is_told_once_until_it_was_below_again():
    alarm = ProbeAlarm(0.1)
    means = [0.01, 0.3, 0.4, 0.05, 0.2]
    told = [alarm.check(step, [(PROBE, 0.0), (PROBE, n)]) for step, n in enumerate(means, 1)]
    assert [line is not None for line in told] == [False, True, False, False, True]
    assert told[1] is not None
    assert told[1].startswith(f"step 2: {PROBE} is 0.3, above telemetry.probe_alarm_nats = 0.1")
    assert ProbeAlarm(None).check(1, [(PROBE, 9.0)]) is None
    assert alarm.check(6, []) is None
