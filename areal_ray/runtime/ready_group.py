"""From sessions that are over to what the driver takes for a group."""

from collections import Counter
from dataclasses import replace

import numpy as np

from areal_ray.core.summaries import GroupSummary
from areal_ray.core.trajectory import Group, Outcome, Trajectory, encode_group
from areal_ray.gateway.sessions import ReadyGroup


def num_rewarded(ready: ReadyGroup) -> int:
    """Sessions with a reward."""
    return len({t.episode_id for t in ready.trajectories if t.reward is not None})


def as_group(
    ready: ReadyGroup, group_id: str, *, has_reward_function: bool
) -> tuple[GroupSummary, bytes]:
    """The summary, and the trajectories as `core.trajectory.encode_group` writes them.

    Args:
        ready: Sessions of one group.
        group_id: The lease's.
        has_reward_function: Sessions without a reward are left for it to score.
    """
    lines = [replace(t, group_id=group_id) for t in ready.trajectories]
    if has_reward_function:
        lines = [_to_be_scored(t) if t.reward is None else t for t in lines]
    payload = encode_group(Group(group_id, ready.task_id, tuple(lines)))
    sampled = [t.versions[t.loss_mask] for t in lines]
    versions = np.unique(np.concatenate(sampled)) if sampled else np.zeros(0, np.int32)
    outcome_of = {t.episode_id: str(t.outcome) for t in lines}
    return GroupSummary(
        group_id=group_id,
        task_id=ready.task_id,
        num_usable=len(ready.session_ids),
        versions=tuple(versions.tolist()),
        num_tokens=sum(len(t.token_ids) for t in lines),
        num_sampled_tokens=sum(map(len, sampled)),
        num_turns=ready.num_turns,
        payload_bytes=len(payload),
        outcomes=dict(Counter(outcome_of.values())),
        splits=dict(ready.splits),
        sessions=ready.session_ids,
        session_group=ready.group_key,
    ), payload


def _to_be_scored(trajectory: Trajectory) -> Trajectory:
    limit = trajectory.details.get("limit_reached", "")
    return replace(
        trajectory, outcome=Outcome.TRUNCATED if limit else Outcome.OK, failure=str(limit)
    )
