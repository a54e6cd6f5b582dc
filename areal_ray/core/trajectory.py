"""Trajectory and Group: token-exact records of what the model saw and sampled.

A group travels as one buffer (`encode_group`): through the object store, and byte for byte the
same into the run's journal. Small buffers are deflated, since Ray carries objects below 100 kB
inside its control messages and siblings repeat their prompt; large ones stay raw so that readers
map them without a copy.
"""

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"ARG3"
_HEADER = struct.Struct("<4sBxxxII")  # magic, deflated, length of the JSON head, length raw
_DEFLATE_BELOW_BYTES = 65536
_COLUMNS = (
    ("token_ids", "<i4"),
    ("loss_mask", "|b1"),
    ("behaviour_logprobs", "<f4"),
    ("versions", "<i4"),
    ("turn_ids", "<i2"),
)


class Outcome(StrEnum):
    """How an episode ended. Only the first two carry a reward that means something."""

    OK = "ok"
    TRUNCATED = "truncated"
    """A token or turn limit cut it short; what was said is still scored."""
    AGENT_ERROR = "agent_error"
    ENV_ERROR = "env_error"
    TIMEOUT = "timeout"
    UNSCORED = "unscored"
    """It finished, but the reward raised, timed out or abstained. Not a reward of zero."""

    @property
    def is_scored(self) -> bool:
        """Whether a reward of such an episode may be trained on."""
        return self in _SCORED


_SCORED = frozenset({Outcome.OK, Outcome.TRUNCATED})


class StopReason(StrEnum):
    """Why the engine stopped sampling a turn."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One row of tokens as the model saw them; the arrays have the same length T."""

    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T] True on tokens the policy sampled."""
    behaviour_logprobs: NDArray[np.float32]
    """[T] log-prob at the sampling temperature when sampled; 0 elsewhere."""
    versions: NDArray[np.int32]
    """[T] version that sampled the token; -1 elsewhere."""
    turn_ids: NDArray[np.int16]
    """[T] index of the model call that sampled the token; -1 elsewhere."""
    task_id: str
    group_id: str
    episode_id: str
    branch_id: int = 0
    """0 = main line; sub-agents and rewritten histories count up."""
    parent_branch_id: int = -1
    """Of a sub-agent, the branch that called it; -1 = none, also of a history of the main agent
    that was rewritten or taken up again."""
    reward: float | None = None
    """None until scored, and for ever when it could not be scored."""
    outcome: Outcome = Outcome.OK
    stop_reason: StopReason = StopReason.STOP
    failure: str = ""
    """Reason, where the outcome is not ok; one line."""
    final_text: str = ""
    """The last assistant message, what most rewards read."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by place: model, tool, reward."""
    details: dict[str, Any] = field(default_factory=dict)
    """JSON values a reward or agent wants to see in reports."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        mask, logprobs, versions = self.loss_mask, self.behaviour_logprobs, self.versions
        if not length == len(mask) == len(logprobs) == len(versions) == len(self.turn_ids):
            counts = ", ".join(f"{name} {len(getattr(self, name))}" for name, _ in _COLUMNS)
            raise ValueError(
                f"trajectory {self.episode_id}: its arrays differ in length ({counts}); they must "
                "have one entry a token"
            )
        # A finite sum of squares has finite terms; only where it is not is it worth a closer look.
        if not math.isfinite(logprobs.dot(logprobs)) and not np.isfinite(logprobs[mask]).all():
            raise ValueError(
                f"trajectory {self.episode_id}: a sampled token has no finite behaviour log-prob; "
                "the engine must report one for each token it samples"
            )
        if np.count_nonzero((versions < 0) & mask):
            raise ValueError(
                f"trajectory {self.episode_id}: a sampled token has no version; "
                "the engine must stamp each token it samples"
            )

    def with_verdict(self, **facts: Any) -> "Trajectory":
        """The same tokens with other facts about their end.

        Many times faster than `dataclasses.replace`, since the arrays are not checked anew.
        """
        changed = object.__new__(Trajectory)
        for name in self.__slots__:
            object.__setattr__(changed, name, facts.get(name, getattr(self, name)))
        return changed

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled: what a loss may count."""
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first sampled one (all, if none was sampled)."""
        first = int(self.loss_mask.argmax()) if len(self.loss_mask) else 0
        return first if first or self.loss_mask[:1].any() else len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        """Oldest version among sampled tokens; -1 if none was sampled."""
        return int(self.versions[self.loss_mask].min()) if self.loss_mask.any() else -1

    @property
    def newest_version(self) -> int:
        """Newest version among sampled tokens; -1 if none was sampled."""
        return int(self.versions[self.loss_mask].max()) if self.loss_mask.any() else -1


@dataclass(frozen=True, slots=True)
class Group:
    """Sibling episodes of one task: the unit of admission, baseline and ledger."""

    group_id: str
    task_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def oldest_version(self) -> int:
        """Oldest version that sampled any token of the group; -1 if nothing was sampled."""
        versions = [t.oldest_version for t in self.trajectories if t.oldest_version >= 0]
        return min(versions, default=-1)

    @property
    def num_tokens(self) -> int:
        """All tokens of all siblings, shared prompts counted each time."""
        return sum(len(t.token_ids) for t in self.trajectories)


def edges_above(parents: Mapping[int, int]) -> dict[int, int]:
    """How many calls of sub-agents lie between the main agent and each branch of an episode.

    Args:
        parents: Branch -> `parent_branch_id`.

    Raises:
        ValueError: The calls go round in a circle.
    """
    found: dict[int, int] = {}
    for branch in parents:
        path, at = [], branch
        while at not in found and parents.get(at, -1) >= 0:
            path.append(at)
            at = parents[at]
            if len(path) > len(parents):
                raise ValueError(f"parents: {dict(parents)} has a circle; must be a tree")
        found.setdefault(at, 0)
        for child in reversed(path):
            found[child] = found[parents[child]] + 1
    return found


_SHARED = (
    "task_id", "group_id", "episode_id", "branch_id", "parent_branch_id", "reward", "outcome",
    "stop_reason", "failure", "final_text",
)  # fmt: skip
"""Facts that are written once where all siblings agree, in the order of the fields."""
_write_json = json.JSONEncoder(separators=(",", ":")).encode


def encode_group(group: Group) -> bytes:
    """One self-contained buffer: a JSON head, then each column of all siblings end to end."""
    lines = group.trajectories
    facts: dict[str, Any] = {}
    for name in _SHARED if lines else ():
        values = [getattr(t, name) for t in lines]
        facts[name] = values[:1] if values.count(values[0]) == len(values) else values
    head = {
        "group_id": group.group_id,
        "task_id": group.task_id,
        "lengths": [len(t.token_ids) for t in lines],
        "facts": facts,
        "seconds": [t.seconds for t in lines],
        "details": [t.details for t in lines],
    }
    head_bytes = _write_json(head).encode()
    head_bytes += b" " * (-(_HEADER.size + len(head_bytes)) % 8)  # columns start aligned
    parts, num_bytes = [head_bytes], 0
    for name, dtype in _COLUMNS if lines else ():
        column = np.concatenate([getattr(t, name) for t in lines])
        parts.append(column.astype(dtype, copy=False).tobytes())
        num_bytes += len(parts[-1])
        parts.append(b"\0" * (-num_bytes % 8))
        num_bytes += len(parts[-1])
    body = b"".join(parts)
    deflated = len(body) < _DEFLATE_BELOW_BYTES
    packed = zlib.compress(body, level=1) if deflated else body
    return _HEADER.pack(_MAGIC, deflated, len(head_bytes), len(body)) + packed


def decode_group(buffer: bytes | memoryview) -> Group:
    """Inverse of `encode_group`. Arrays of large groups are read-only views of `buffer`.

    Raises:
        ValueError: The buffer is not a group or is cut short.
    """
    if len(buffer) < _HEADER.size or bytes(buffer[:4]) != _MAGIC:
        raise ValueError("buffer is not an encoded group")
    _, deflated, head_length, body_length = _HEADER.unpack_from(buffer)
    body = memoryview(buffer)[_HEADER.size :]
    if deflated:
        try:
            body = memoryview(zlib.decompress(body))
        except zlib.error as error:
            raise ValueError(f"encoded group is damaged or cut short: {error}") from error
    if len(body) != body_length:
        raise ValueError(f"encoded group has {len(body)} bytes, its header says {body_length}")
    head = json.loads(str(body[:head_length], "utf-8"))
    lengths = head["lengths"]
    total, columns, offset = sum(lengths), [], head_length
    for _, dtype in _COLUMNS if lengths else ():
        column = np.frombuffer(body, dtype=dtype, count=total, offset=offset)
        columns.append(_cut(column, lengths))
        offset += column.nbytes + (-(offset - head_length + column.nbytes) % 8)
    facts = head["facts"]
    for name, kind in (("outcome", Outcome), ("stop_reason", StopReason)) if lengths else ():
        facts[name] = [kind(value) for value in facts[name]]
    spread = [v if len(v) == len(lengths) else v * len(lengths) for v in facts.values()]
    rows = map(Trajectory, *columns, *spread, head["seconds"], head["details"])
    return Group(head["group_id"], head["task_id"], tuple(rows))


def _cut(column: NDArray[Any], lengths: list[int]) -> list[NDArray[Any]]:
    pieces, start = [], 0
    for length in lengths:
        pieces.append(column[start : start + length])
        start += length
    return pieces
