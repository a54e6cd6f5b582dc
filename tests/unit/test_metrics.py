"""Names are declared once; a step's values become one row of honest numbers."""

import ast
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.core.group_metrics import group_metrics
from areal_ray.core.trajectory import Group, Outcome, StopReason, Trajectory
from areal_ray.telemetry.metrics import (
    Metric,
    MetricRegistry,
    MetricSpec,
    MetricWindow,
    Reduction,
    metrics_page,
    reduce_metrics,
)
from areal_ray.telemetry.names import METRICS

ROOT = Path(__file__).parents[2]


def window() -> MetricWindow:
    return MetricWindow(METRICS)


def test_the_page_of_names_is_the_table_in_the_code():
    assert (ROOT / "docs/metrics.md").read_text(encoding="utf-8") == metrics_page(METRICS)


def test_every_name_in_the_source_is_declared():
    areas = {spec.area for spec in METRICS}
    shape = re.compile(rf"({'|'.join(sorted(areas))})/[a-z_]*[a-z]")
    used = {
        node.value
        for path in (ROOT / "areal_ray").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if shape.fullmatch(node.value)
    }
    assert len(used) > 30
    assert {name for name in used if name not in METRICS} == set()


def test_logging_an_undeclared_name_is_an_error_that_names_the_nearest():
    with pytest.raises(KeyError, match=r"learner/los is not declared. Did you mean learner/loss\?"):
        window().add("learner/los", 1.0)


def test_a_name_must_end_with_its_unit():
    with pytest.raises(ValueError, match="must end with its unit, _s"):
        MetricSpec("reward/score_time", "s", Reduction.MEAN, "Time.")
    with pytest.raises(ValueError, match="unit 'seconds' is unknown"):
        MetricSpec("reward/score_seconds", "seconds", Reduction.MEAN, "Time.")
    with pytest.raises(ValueError, match="must read area/what_unit"):
        MetricSpec("reward", "", Reduction.MEAN, "No area.")


def test_a_name_has_one_meaning():
    spec = MetricSpec("a/b", "", Reduction.MEAN, "First.")
    registry = MetricRegistry([spec])
    registry.declare(spec)
    with pytest.raises(ValueError, match="already declared"):
        registry.declare(MetricSpec("a/b", "", Reduction.SUM, "Second."))
    assert len(registry) == 1


def test_two_ranks_with_two_microbatches_log_the_global_mean_and_the_sum_of_tokens():
    # (mean loss, tokens) of each rank's micro-batches; the global mean is 24 / 12 = 2.
    ranks = [[(1.0, 2), (4.0, 4)], [(3.0, 1), (0.6, 5)]]
    step = window()
    for microbatches in ranks:
        for loss, tokens in microbatches:
            step.extend([Metric("learner/loss", loss, weight=tokens)])
            step.add("learner/trained_tokens", tokens)
    row = step.take()
    assert row["learner/loss"] == pytest.approx((2 + 16 + 3 + 3) / 12)
    assert row["learner/trained_tokens"] == 12


def test_reward_and_kl_are_metrics_of_their_own():
    step = window()
    for raw, kl in [(1.0, 0.3), (0.0, 0.1)]:
        step.add("reward/mean", raw)
        step.add("learner/policy_kl_nats", kl)
        step.add("reward/min", raw)
        step.add("reward/max", raw)
    row = step.take()
    assert row["reward/mean"] == 0.5
    assert row["learner/policy_kl_nats"] == pytest.approx(0.2)
    assert (row["reward/min"], row["reward/max"]) == (0.0, 1.0)


def test_importance_weights_before_and_after_the_cap_have_different_names():
    raw = [0.5, 1.2, 9.0, 0.9]
    step = window()
    for weight in raw:
        step.add("learner/behaviour_weight_mean", weight)
        step.add("learner/behaviour_weight_max", weight)
        step.add("learner/used_behaviour_weight_mean", min(weight, 2.0))
    row = step.take()
    assert row["learner/behaviour_weight_mean"] == pytest.approx(2.9)
    assert row["learner/behaviour_weight_max"] == 9.0
    assert row["learner/used_behaviour_weight_mean"] == pytest.approx(1.15)
    assert "before cap" in METRICS["learner/behaviour_weight_mean"].meaning
    assert "capped" in METRICS["learner/used_behaviour_weight_mean"].meaning


def test_a_step_without_a_usable_group_has_counts_of_zero_and_no_nan():
    step = window()
    step.add("learner/loss", 0.3)
    step.add("learner/trained_tokens", 64)
    step.take()
    step.add("learner/skipped_steps", 1)
    step.add("learner/loss", math.nan, weight=0)  # a mean over no tokens
    row = step.take()
    assert row["learner/skipped_steps"] == 1
    assert row["learner/trained_tokens"] == 0
    assert row["learner/updates"] == 0
    assert "learner/loss" not in row
    assert not any(math.isnan(value) for value in row.values())


def test_a_sum_seen_once_is_in_every_later_row():
    step = window()
    assert "queue/dropped_groups" not in step.take()
    step.add("queue/dropped_groups", 3)
    assert step.take()["queue/dropped_groups"] == 3
    assert step.take()["queue/dropped_groups"] == 0


def test_nothing_of_one_step_is_left_in_the_next():
    step = window()
    step.update({"reward/mean": 1.0, "reward/max": 1.0, "queue/depth_groups": 7})
    step.take()
    step.update({"reward/mean": 0.0, "reward/max": 0.0})
    row = step.take()
    assert (row["reward/mean"], row["reward/max"]) == (0.0, 0.0)
    assert "queue/depth_groups" not in row


@pytest.mark.parametrize("order", [[1.0, math.nan], [math.nan, 1.0]])
def test_a_nan_in_a_maximum_is_not_hidden_by_its_place(order):
    step = window()
    for value in order:
        step.add("learner/ratio_max", value)
    assert math.isnan(step.take()["learner/ratio_max"])


def test_numpy_numbers_are_taken():
    step = window()
    step.add("reward/mean", np.float32(0.5))
    step.add("learner/trained_tokens", np.int64(3))
    assert step.take()["reward/mean"] == 0.5


values = st.floats(-1e6, 1e6)
weights = st.floats(0.1, 100.0)


@given(st.lists(st.tuples(values, weights), min_size=1, max_size=20), st.integers(1, 19))
def test_a_mean_does_not_depend_on_where_it_was_reduced_first(pairs, cut):
    metrics = [Metric("reward/mean", value, weight) for value, weight in pairs]
    once, twice = window(), window()
    once.extend(metrics)
    for part in (metrics[:cut], metrics[cut:]):
        twice.extend(reduce_metrics(part, METRICS))
    expected = sum(v * w for v, w in pairs) / sum(w for _, w in pairs)
    assert once.take()["reward/mean"] == pytest.approx(expected, abs=1e-6)
    assert twice.take()["reward/mean"] == pytest.approx(expected, abs=1e-6)


def episode(name: str, prompt: int, reply: int, stop: StopReason) -> Trajectory:
    sampled = np.arange(prompt + reply) >= prompt
    return Trajectory(
        token_ids=np.arange(prompt + reply, dtype=np.int32),
        loss_mask=sampled,
        behaviour_logprobs=np.where(sampled, -1.0, 0.0).astype(np.float32),
        versions=np.where(sampled, 2, -1).astype(np.int32),
        turn_ids=np.where(sampled, 0, -1).astype(np.int16),
        task_id="t",
        group_id="g",
        episode_id=name,
        stop_reason=stop,
        reward=1.0,
    )


def group_row(*episodes: Trajectory) -> dict[str, float]:
    step = window()
    for name, value, weight in group_metrics(Group("g", "t", episodes)):
        step.add(name, value, weight=weight)
    return step.take()


def test_token_counts_hold_neither_padding_nor_each_others_tokens():
    stop = StopReason.STOP
    row = group_row(episode("a", 3, 2, stop), episode("b", 5, 4, stop))
    assert row["rollout/sampled_tokens"] == 6
    assert row["rollout/prompt_tokens"] == 8
    assert row["agent/episodes"] == 2


def test_an_episode_out_of_turns_or_window_is_cut_short_and_did_not_end_by_itself():
    cut = Outcome.TRUNCATED
    row = group_row(
        replace(episode("a", 2, 2, StopReason.STOP), outcome=cut),  # agent.max_turns
        replace(episode("b", 2, 2, StopReason.ABORT), outcome=cut),  # nothing fits the window
        episode("c", 2, 2, StopReason.STOP),
        episode("d", 2, 2, StopReason.ABORT),
    )
    assert row["agent/truncated_episodes"] == 2
    assert row["agent/truncated_fraction"] == 0.5
    assert row["agent/stopped_fraction"] == 0.25
    assert row["agent/aborted_fraction"] == 0.25


def test_truncated_aborted_and_stopped_episodes_are_counted_apart():
    reasons = [StopReason.STOP, StopReason.LENGTH, StopReason.ABORT, StopReason.STOP]
    row = group_row(*(episode(str(i), 2, 2, reason) for i, reason in enumerate(reasons)))
    assert row["agent/truncated_fraction"] == 0.25
    assert row["agent/aborted_fraction"] == 0.25
    assert row["agent/stopped_fraction"] == 0.5
