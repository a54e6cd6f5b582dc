"""drop_equal_rewards: a group is left out if and only if the objective sees no difference in it."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.assembly import comparison_of
from areal_ray.core.summaries import GroupSummary
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Group, Outcome, encode_group
from areal_ray.core.verdict import EQUAL_REWARDS, TRUNCATED, FailureGuard, Verdict, judge
from areal_ray.core.versions import AdmissionConfig
from areal_ray.engines.advantage_columns import score_step
from areal_ray.engines.train_rows import collect_lines
from areal_ray.errors import TooManyFailures
from areal_ray.rewards.reward import RewardConfig
from areal_ray.runtime.reward_actor import RewardActor
from tests.support.tiny_groups import random_group

ADMISSION = AdmissionConfig(groups_per_step=1, n_samples=4, drop_equal_rewards=True)
MADE = GroupSummary(
    group_id="g", task_id="t", num_usable=4, versions=(0,), num_tokens=50, num_sampled_tokens=20,
    num_turns=4, payload_bytes=100,
)  # fmt: skip


def group_of(*rewards: float, cut: tuple[int, ...] = ()) -> Group:
    made = random_group(np.random.default_rng(0), rewards=list(rewards))
    lines = [
        replace(t, outcome=Outcome.TRUNCATED) if place in cut else t
        for place, t in enumerate(made.trajectories)
    ]
    return Group(made.group_id, made.task_id, tuple(lines))


def filtered(group: Group, objective: ObjectiveConfig) -> Verdict:
    actor = RewardActor("reward-0", RewardConfig(score="none:needed"))
    scored, _ = asyncio.run(actor.score_group(encode_group(group), Task("t", ())))
    return judge(MADE, scored, ADMISSION, comparison_of(objective))


def teaches_nothing(group: Group, objective: ObjectiveConfig) -> bool:
    share = collect_lines([group], objective, version=0, oldest_version=None)
    (scores,) = score_step([share], objective, lambda numbers: numbers)
    return scores.equal_groups == 1


ONE_IS_CUT = group_of(1.0, 1.0, 0.0, 1.0, cut=(2,))


@pytest.mark.parametrize(
    ("group", "fields", "is_dropped"),
    [
        (group_of(1.0, 1.0, 1.0, 1.0), {}, True),
        (group_of(1.0, 0.0, 1.0, 1.0), {}, False),
        (ONE_IS_CUT, {}, False),
        (ONE_IS_CUT, {"mask_truncated": True}, True),
        (group_of(1.0, 0.0, 1.0, 0.0, cut=(2, 3)), {"mask_truncated": True}, False),
        (group_of(1.0, 0.0, 1.0, 0.0, cut=(0, 1, 2, 3)), {"mask_truncated": True}, True),
        (group_of(0.5, 0.5, 0.5, 0.5 + 1e-9), {}, True),
        (group_of(0.5, 0.5, 0.5, 0.5 + 1e-9), {"min_reward_spread": 0.0}, False),
        (group_of(0.2, 0.3, 0.2, 0.3), {"min_reward_spread": 0.2}, True),
        (group_of(0.2, 0.3, 0.2, 0.3), {"reward_shaping": {"scaling": 1e-6}}, True),
        (group_of(2.0, 3.0, 2.0, 3.0), {"reward_shaping": {"clip": 1.0}}, True),
    ],
)
def test_it_agrees_with_what_the_objective_trains_on(group, fields, is_dropped):
    objective = ObjectiveConfig(**fields)
    assert filtered(group, objective).is_drop is is_dropped
    assert teaches_nothing(group, objective) is is_dropped


def test_a_length_penalty_makes_no_group_useful():
    shaping = {"overlong_tokens": 8, "overlong_limit_tokens": 12}
    objective = ObjectiveConfig(reward_shaping=shaping)
    group = group_of(1.0, 1.0, 1.0, 1.0)
    assert not teaches_nothing(group, objective)
    assert filtered(group, objective).reason == EQUAL_REWARDS


def test_where_limits_leave_no_two_siblings_that_is_told_with_the_way_out():
    verdict = filtered(
        group_of(1.0, 0.0, 1.0, 0.0, cut=(0, 1, 2)), ObjectiveConfig(mask_truncated=True)
    )
    assert verdict.reason == TRUNCATED
    guard = FailureGuard(AdmissionConfig(groups_per_step=1, max_refill_rounds=1))
    with pytest.raises(TooManyFailures, match=r"\(truncated\).*raise rollout.sampling.max_new_tok"):
        guard.refilled(verdict.reason)
