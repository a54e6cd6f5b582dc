"""How a reward function's return value is read, and what a scored group reports."""

from dataclasses import replace

import numpy as np
import pytest

from areal_ray.core.group_metrics import group_metrics
from areal_ray.core.trajectory import Group, Outcome, StopReason, Trajectory
from areal_ray.errors import RecipeError
from areal_ray.rewards.reward import RewardConfig, check_reward, read_returned
from areal_ray.telemetry.names import METRICS


@pytest.mark.parametrize(
    ("returned", "reward"),
    [(1, 1.0), (0.5, 0.5), (True, 1.0), (np.float32(0.25), 0.25), ({"reward": 2}, 2.0)],
)
def test_a_number_is_the_reward_whatever_its_type(returned, reward):
    assert read_returned(returned).reward == reward


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "abstained"),
        ({"reward": None}, "abstained"),
        (float("nan"), "nan, not a finite number"),
        (float("inf"), "inf, not a finite number"),
        (10**400, "inf, not a finite number"),
        (-1e200, "-1e+200, not a finite number within +-1e+18"),
        ("1", "returned a str"),
        ([1.0], "returned a list"),
        ({"score": 1}, "no 'reward'; its keys: score"),
    ],
)
def test_what_is_no_finite_number_is_unscored_with_the_reason_and_never_zero(returned, reason):
    scored = read_returned(returned)
    assert scored.reward is None
    assert reason in scored.reason


def test_details_beside_the_reward_become_json_values():
    scored = read_returned({"reward": 1, "len": np.int64(3), "bad": float("nan"), "t": (1, "x")})
    assert scored.details == {"len": 3, "bad": "nan", "t": [1, "x"]}


def test_a_reward_that_could_not_be_called_is_refused_before_anything_starts():
    def no_trajectory(task): ...

    def fine(task, trajectory, scale=1.0): ...

    config = RewardConfig(score="m:f")
    with pytest.raises(RecipeError, match="cannot be called with"):
        check_reward(no_trajectory, config)
    with pytest.raises(RecipeError, match="must be a function"):
        check_reward(3, config)
    with pytest.raises(RecipeError, match="'weight'"):
        check_reward(fine, RewardConfig(score="m:f", args={"weight": 1}))
    check_reward(fine, RewardConfig(score="m:f", args={"scale": 2.0}))


def episode(name: str, reward: float | None, sampled: int, **fields: object) -> Trajectory:
    mask = np.arange(5 + sampled) >= 5
    return replace(
        Trajectory(
            token_ids=np.zeros(5 + sampled, np.int32),
            loss_mask=mask,
            behaviour_logprobs=np.zeros(5 + sampled, np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            turn_ids=np.where(mask, 0, -1).astype(np.int16),
            task_id="t",
            group_id="g",
            episode_id=name,
            reward=reward,
            seconds={"model": 1.0, "tool": 3.0},
        ),
        **fields,
    )


def test_a_groups_metrics_count_episodes_once_and_leave_the_unscored_out_of_the_reward():
    group = Group(
        "g",
        "t",
        (
            episode("a", 1.0, 2),
            episode("b", 0.0, 4, outcome=Outcome.TRUNCATED, stop_reason=StopReason.LENGTH),
            episode("b", 0.0, 3, branch_id=1, outcome=Outcome.TRUNCATED),
            episode("c", None, 1, outcome=Outcome.UNSCORED),
        ),
    )
    told = {name: (value, weight) for name, value, weight in group_metrics(group)}
    assert told["reward/mean"] == (0.5, 2.0)
    assert told["reward/scored_episodes"][0] == 2
    assert told["reward/unscored_episodes"][0] == 1
    assert told["agent/truncated_episodes"][0] == 1
    assert told["agent/branch_episodes"][0] == 1
    assert told["agent/sampled_tokens"] == (pytest.approx(10 / 3), 3.0)
    assert told["agent/episode_tokens"] == (pytest.approx(30 / 3), 3.0)
    assert told["time/agent_tool_s"] == (3.0, 3.0)


def test_every_metric_of_a_group_is_a_declared_one():
    made = group_metrics(Group("g", "t", (episode("a", 1.0, 2),)))
    assert [name for name, _, _ in made if name not in METRICS] == []
