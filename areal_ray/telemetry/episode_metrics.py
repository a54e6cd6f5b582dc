"""What the siblings of a group tell about an episode: counts, rewards, how they ended.

Called where the group is in memory (the actor that scored it); only the few numbers travel.
"""

import numpy as np

from areal_ray.core.trajectory import Group, Outcome, StopReason, Trajectory
from areal_ray.telemetry.metrics import Metric, reduce_metrics
from areal_ray.telemetry.names import METRICS

_ENDINGS = {
    StopReason.LENGTH: "agent/truncated_fraction",
    StopReason.ABORT: "agent/aborted_fraction",
    StopReason.STOP: "agent/stopped_fraction",
}


def group_metrics(group: Group) -> list[Metric]:
    """Metrics of one finished group, each name once; means carry the number of episodes."""
    metrics = [metric for t in group.trajectories for metric in _trajectory_metrics(t)]
    episodes = [t for t in group.trajectories if t.branch_id == 0]
    for outcome in Outcome:
        ended = sum(t.outcome is outcome for t in episodes)
        name = "reward/unscored_episodes" if outcome is Outcome.UNSCORED else None
        metrics.append(Metric(name or f"agent/{outcome}_episodes", ended))
    metrics += _reward_metrics([t.reward for t in episodes if t.reward is not None])
    return reduce_metrics(metrics, METRICS)


def _trajectory_metrics(trajectory: Trajectory) -> list[Metric]:
    sampled = trajectory.num_sampled_tokens
    metrics = [
        Metric("rollout/sampled_tokens", sampled),
        Metric("rollout/prompt_tokens", len(trajectory.token_ids) - sampled),
    ]
    if trajectory.branch_id != 0:
        return [*metrics, Metric("agent/branch_episodes", 1)]
    seconds = trajectory.seconds
    metrics += [
        Metric("agent/episodes", 1),
        Metric("agent/turns", len(np.unique(trajectory.turn_ids[trajectory.loss_mask]))),
        Metric("agent/episode_tokens", len(trajectory.token_ids)),
        Metric("agent/sampled_tokens", sampled),
        Metric("agent/episode_s", sum(seconds.values())),
        Metric("agent/slowest_episode_s", sum(seconds.values())),
        Metric("time/agent_model_s", seconds.get("model", 0.0)),
        Metric("time/agent_tool_s", seconds.get("tool", 0.0)),
        Metric("time/agent_reward_s", seconds.get("reward", 0.0)),
    ]
    for reason, name in _ENDINGS.items():
        metrics.append(Metric(name, trajectory.stop_reason is reason))
    return metrics


def _reward_metrics(rewards: list[float]) -> list[Metric]:
    if not rewards:
        return []
    equal = len(rewards) > 1 and min(rewards) == max(rewards)
    return [
        Metric("reward/scored_episodes", len(rewards)),
        Metric("reward/mean", float(np.mean(rewards)), weight=len(rewards)),
        Metric("reward/group_std", float(np.std(rewards))),
        Metric("reward/min", min(rewards)),
        Metric("reward/max", max(rewards)),
        Metric("reward/equal_groups", equal),
    ]
