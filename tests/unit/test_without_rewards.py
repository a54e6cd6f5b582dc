"""Groups that nobody scores, as in a run of kind distill."""

from dataclasses import replace

import numpy as np
import pytest

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.core.summaries import Failure, GroupSummary, unscored
from areal_ray.core.trajectory import Group, Outcome
from areal_ray.core.verdict import Comparison, judge
from areal_ray.core.versions import AdmissionConfig
from areal_ray.engines.train_rows import collect_lines
from areal_ray.telemetry.names import METRICS
from tests.support.tiny_groups import random_group

ENDS = (Outcome.OK, Outcome.TRUNCATED, Outcome.AGENT_ERROR, Outcome.UNSCORED)


def group():
    """Four siblings without a reward, one of each end."""
    made = random_group(np.random.default_rng(0), rewards=[None] * 4)
    ended = [replace(t, outcome=e) for t, e in zip(made.trajectories, ENDS, strict=True)]
    return Group(made.group_id, made.task_id, tuple(ended))


@pytest.mark.parametrize(
    ("objective", "trained"),
    [
        (ObjectiveConfig(kind="opd"), ["group-0/0", "group-0/1"]),
        (ObjectiveConfig(kind="opd", mask_truncated=True), ["group-0/0"]),
        (ObjectiveConfig(kind="opd", gae={"discount": 1.0}, distillation={"rl_weight": 0.5}), []),
        (ObjectiveConfig(kind="grpo"), []),
    ],
)
def test_what_ended_well_trains_where_a_teacher_alone_judges_it(objective, trained):
    share = collect_lines([group()], objective, version=0, oldest_version=None)
    assert [line.trajectory.episode_id for line in share.lines] == trained
    assert share.counts.left_out == 4 - len(trained)


ANY = Comparison(1e-6, leaves_out_truncated=True)


def made(num_usable):
    return GroupSummary(
        group_id="g", task_id="t", num_usable=num_usable,
        versions=(0, 1), num_tokens=50, num_sampled_tokens=20, num_turns=4, payload_bytes=100,
        outcomes={"ok": num_usable, "agent_error": 1},
        failures=(Failure("agent_error", "the tool broke"),),
    )  # fmt: skip


def test_one_episode_that_ended_well_makes_a_group_usable():
    admission = AdmissionConfig(groups_per_step=1, n_samples=4)
    for count in (1, 4):
        verdict = judge(made(count), unscored(made(count)), admission, ANY)
        assert not verdict.is_failure
        assert not verdict.is_drop
    verdict = judge(made(0), unscored(made(0)), admission, ANY)
    assert verdict.is_failure
    assert verdict.reason == "agent_error: the tool broke"


def test_such_a_group_tells_its_tokens_and_episodes_but_no_reward():
    told = {name: value for name, value, _ in unscored(made(2)).metrics}
    assert told["rollout/sampled_tokens"] == 20
    assert told["rollout/prompt_tokens"] == 30
    assert told["agent/episodes"] == 2
    assert told["agent/sampled_tokens"] == 10
    assert not [name for name in told if name.startswith("reward/")]
    assert all(name in METRICS for name in told)
