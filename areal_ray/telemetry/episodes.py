"""episodes.jsonl: sample episodes of a run, token by token, for the report and for reading.

One line an episode (one a branch), in the order of the group; every line names the task, group
and sample it belongs to, so that no reply can be paired with another's reward.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from areal_ray.core.trajectory import Group, Trajectory
from areal_ray.telemetry.log import REDACTED, redact_all
from areal_ray.telemetry.rows import keep_rows_through
from areal_ray.telemetry.strict_json import dumps_strict

EPISODES_FILE = "episodes.jsonl"

Decode = Callable[[Sequence[int]], list[str]]
"""Token ids to one text each, so that the texts joined are what the model saw."""


def episode_lines(group: Group, decode: Decode, step: int) -> list[dict[str, Any]]:
    """The lines of one group.

    Args:
        step: The step that trained on it.
    """
    samples: dict[str, int] = {}
    lines = []
    for trajectory in group.trajectories:
        sample = samples.setdefault(trajectory.episode_id, len(samples))
        lines.append(_line(trajectory, decode, step, sample))
    return lines


def _line(trajectory: Trajectory, decode: Decode, step: int, sample: int) -> dict[str, Any]:
    ids = [int(i) for i in trajectory.token_ids]
    tokens = [
        {"text": text, "id": token_id, "mask": bool(mask), "version": int(version),
         "logprob": round(float(logprob), 5), "turn": int(turn)}
        for text, token_id, mask, version, logprob, turn in zip(
            decode(ids), ids, trajectory.loss_mask, trajectory.versions,
            trajectory.behaviour_logprobs, trajectory.turn_ids, strict=True,
        )
    ]  # fmt: skip
    return {
        "step": step,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "episode_id": trajectory.episode_id,
        "sample": sample,
        "branch_id": trajectory.branch_id,
        "parent_branch_id": trajectory.parent_branch_id,
        "versions": [trajectory.oldest_version, trajectory.newest_version],
        "finish_reason": trajectory.stop_reason,
        "outcome": trajectory.outcome,
        "failure": trajectory.failure,
        "reward": trajectory.reward,
        "reply": trajectory.final_text,
        "seconds": trajectory.seconds,
        "details": trajectory.details,
        "tokens": tokens,
    }


def without_secrets(line: dict[str, Any], secrets: Collection[str]) -> dict[str, Any]:
    """The line with secrets blotted out of every text, and of tokens that spell one together."""
    return {
        name: _blotted(value, secrets) if name == "tokens" else redact_all(value, secrets)
        for name, value in line.items()
    }


def _blotted(tokens: list[dict[str, Any]], secrets: Collection[str]) -> list[dict[str, Any]]:
    """Tokens of a secret lose text and id: either would spell it."""
    joined = "".join(token["text"] for token in tokens)
    spans = [m.span() for secret in secrets for m in re.finditer(re.escape(secret), joined)]
    kept, start = [], 0
    for token in tokens:
        end = start + len(token["text"])
        is_hit = any(start < last and first < end for first, last in spans)
        kept.append({**token, "text": REDACTED, "id": -1} if is_hit else token)
        start = end
    return kept


class EpisodeLog:
    """Appends to episodes.jsonl of a run folder; each line is flushed."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / EPISODES_FILE
        keep_rows_through(self._path, -1 if resume_step is None else resume_step)

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append the lines of a group."""
        self.append(self._path.parent, lines)

    @staticmethod
    def append(folder: Path, lines: Iterable[dict[str, Any]]) -> None:
        """Append the lines of a group to the episodes.jsonl in `folder`, as it is."""
        with (folder / EPISODES_FILE).open("ab") as file:
            for line in lines:
                file.write(dumps_strict(line).encode() + b"\n")
