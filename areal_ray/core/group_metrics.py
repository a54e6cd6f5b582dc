"""What one scored group adds to the metrics of the step that trains on it.

Values travel as (name, value, weight); names are declared in `areal_ray.telemetry.names`.
"""

import math

from areal_ray.core.trajectory import Group, Outcome, StopReason, Trajectory

MetricValue = tuple[str, float, float]


def group_metrics(group: Group) -> tuple[MetricValue, ...]:
    """Rewards, outcomes, lengths and times of a scored group. Means weigh by episodes."""
    episodes: dict[str, list[Trajectory]] = {}
    for trajectory in group.trajectories:
        episodes.setdefault(trajectory.episode_id, []).append(trajectory)
    if not episodes:
        return ()
    count = len(episodes)
    firsts = [branches[-1] for branches in episodes.values()]
    wall = [sum(t.seconds.values()) for t in firsts]
    outcomes = [t.outcome for t in firsts]
    ends = [_end(t) for t in firsts]
    sampled = sum(t.num_sampled_tokens for t in group.trajectories)
    values: list[MetricValue] = [
        *_rewards([t.reward for t in firsts if t.reward is not None]),
        ("reward/unscored_episodes", sum(t.reward is None for t in firsts), 1.0),
        ("rollout/sampled_tokens", sampled, 1.0),
        ("rollout/prompt_tokens", group.num_tokens - sampled, 1.0),
        ("agent/episodes", count, 1.0),
        ("agent/ok_episodes", outcomes.count(Outcome.OK), 1.0),
        ("agent/truncated_episodes", outcomes.count(Outcome.TRUNCATED), 1.0),
        ("agent/truncated_fraction", ends.count(StopReason.LENGTH) / count, count),
        ("agent/aborted_fraction", ends.count(StopReason.ABORT) / count, count),
        ("agent/stopped_fraction", ends.count(StopReason.STOP) / count, count),
        ("agent/branch_episodes", len(group.trajectories) - count, 1.0),
        ("agent/turns", sum(map(_num_turns, group.trajectories)) / count, count),
        ("agent/episode_tokens", group.num_tokens / count, count),
        ("agent/sampled_tokens", sampled / count, count),
        ("agent/episode_s", sum(wall) / count, count),
        ("agent/slowest_episode_s", max(wall), 1.0),
    ]
    for place in ("model", "tool", "reward"):
        seconds = sum(t.seconds.get(place, 0.0) for t in firsts)
        values.append((f"time/agent_{place}_s", seconds / count, count))
    return tuple((name, float(value), float(weight)) for name, value, weight in values)


def _rewards(rewards: list[float]) -> list[MetricValue]:
    if not rewards:
        return []
    mean, least, most = math.fsum(rewards) / len(rewards), min(rewards), max(rewards)
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    is_equal = least == most
    return [
        ("reward/mean", mean, len(rewards)),
        ("reward/group_std", 0.0 if is_equal else spread, 1.0),
        ("reward/min", least, 1.0),
        ("reward/max", most, 1.0),
        ("reward/equal_groups", float(is_equal), 1.0),
        ("reward/scored_episodes", len(rewards), 1.0),
    ]


def _end(trajectory: Trajectory) -> StopReason:
    """How an episode ended; one that ran out of turns or window is cut short, too."""
    is_cut = trajectory.outcome is Outcome.TRUNCATED
    return StopReason.LENGTH if is_cut else trajectory.stop_reason


def _num_turns(trajectory: Trajectory) -> int:
    return len(set(trajectory.turn_ids.tolist()) - {-1})
