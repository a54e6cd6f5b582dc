"""A session's trajectories as JSON: a row for each turn, a row for each branch, or the tree."""

from dataclasses import asdict
from typing import Any

from areal_ray.core.trajectory import Trajectory
from areal_ray.gateway.record_policy import CallLabel
from areal_ray.gateway.session_state import Session


def exported(session: Session, style: str, discount: float) -> dict[str, Any]:
    """One session, with its ids, log-probs and versions as sampled.

    Args:
        session: That ended.
        style: individual: a row for each turn that trains, its reward the turn's own plus
            `discount` times that of the turn after it; the session's reward counts to the last turn
            of the main line (AReaL's rule). concat: a row for each branch, with the sum of all
            rewards. tree: all turns, with what each added. Of a session that another provider
            served in any style its turns as text: messages, reply, and how many tokens it counted.
        discount: From 0 to 1.
    """
    told = {
        "session_id": session.session_id,
        "task_id": session.start.task_id,
        "group_id": session.group.key,
        "state": str(session.state),
        "reward": session.total_reward,
        "turn_rewards": {str(turn): reward for turn, reward in session.turn_rewards.items()},
        "splits": dict(session.recorder.splits),
        "left_out": dict(session.turns.left_out),
    }
    if session.record.texts is not None:
        return {**told, "upstream": session.start.upstream, "turns": _texts(session)}
    if style == "tree":
        return {**told, "turns": _tree(session)}
    rows = [_row(trajectory) for trajectory in session.trajectories(style)]
    if style == "individual":
        reply_of = {turn: reply for reply, turn in session.calls.items()}
        rewards = _discounted(session, discount)
        for row in rows:
            turn = max(row["turn_ids"], default=-1)
            row["turn"], row["interaction_id"] = turn, reply_of.get(turn, "")
            row["reward"] = rewards.get(turn)
    return {**told, "trajectories": rows}


def _texts(session: Session) -> list[dict[str, Any]]:
    assert session.record.texts is not None
    reply_of = {turn: reply for reply, turn in session.calls.items()}
    return [
        {
            "turn": one.turn_id,
            "interaction_id": reply_of.get(one.turn_id, ""),
            "reward": session.turn_rewards.get(one.turn_id),
            "messages": list(one.messages),
            "reply": one.reply,
            "stop_reason": str(one.stop_reason),
            **one.facts,
        }
        for one in session.record.texts.turns
    ]


def _discounted(session: Session, discount: float) -> dict[int, float]:
    """The reward of each turn that trains; none if none was set."""
    if session.total_reward is None:
        return {}
    outline = [one for one in session.recorder.outline() if one.branch >= 0]
    main = [one.turn_id for one in outline if one.label is CallLabel.MAIN]
    last = main[-1] if main else -1
    found: dict[int, float] = {}
    following = 0.0
    for one in reversed(outline):
        own = session.turn_rewards.get(one.turn_id, 0.0)
        if one.turn_id == last:
            own += session.reward or 0.0
        following = found[one.turn_id] = own + discount * following
    return found


def _row(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "token_ids": trajectory.token_ids.tolist(),
        "loss_mask": trajectory.loss_mask.astype(int).tolist(),
        "behaviour_logprobs": trajectory.behaviour_logprobs.tolist(),
        "versions": trajectory.versions.tolist(),
        "turn_ids": trajectory.turn_ids.tolist(),
        "branch_id": trajectory.branch_id,
        "parent_branch_id": trajectory.parent_branch_id,
        "stop_reason": str(trajectory.stop_reason),
        "outcome": str(trajectory.outcome),
        "reward": trajectory.reward,
        "final_text": trajectory.final_text,
    }


def _tree(session: Session) -> list[dict[str, Any]]:
    records = {record.turn_id: record for record in session.recorder.turn_records()}
    reply_of = {turn: reply for reply, turn in session.calls.items()}
    told = []
    for one in session.recorder.outline():
        record = records[one.turn_id]
        told.append(
            {
                **asdict(one),
                "interaction_id": reply_of.get(one.turn_id, ""),
                "reward": session.turn_rewards.get(one.turn_id),
                "messages": list(record.messages),
                "reply": record.reply,
                "base": record.base,
                "num_shared": record.num_shared,
                "added_ids": record.added_ids.tolist(),
                "token_ids": record.token_ids.tolist(),
                "behaviour_logprobs": record.logprobs.tolist(),
                "versions": record.versions.tolist(),
            }
        )
    return told
