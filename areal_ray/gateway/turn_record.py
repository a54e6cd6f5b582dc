"""One turn as it is written down, so that a record survives its process."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import Reply
from areal_ray.gateway.record_policy import CallLabel, RecordPolicy
from areal_ray.gateway.turn_matching import recorded_key
from areal_ray.gateway.turn_tree import MessageNode, Turn

_PLAIN_FACTS = (
    *("call", "num_prompt", "is_extension", "rendered_length", "has_tools", "has_end", "split"),
    *("speaker", "opened_at", "abort_reason", "is_held"),
)
_COLUMNS = (
    ("added_ids", "<i4"),
    ("token_ids", "<i4"),
    ("logprobs", "<f4"),
    ("versions", "<i4"),
)
_HEAD = struct.Struct("<I")  # length of the JSON head
_LINKS = ("caller", "continues", "reappeared")


class ReplyReader(Protocol):
    """Reads sampled tokens back; `reply_parser.ReplyFormat` is one."""

    def decode(self, ids: Any) -> str:
        """Text of sampled ids [N]."""

    def read(self, text: str, tools: Any, prompt_ids: Any, key: str = "") -> Reply:
        """What `text` says to a prompt; the same key gives the same ids of tool calls."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """What a closed or broken-off turn added to its episode. Replay them in their order.

    All but the arrays are JSON values.
    """

    turn_id: int
    handle: str
    after: int
    """Turn whose conversation, its reply included, this one shares messages with; -1 = none."""
    num_kept: int
    """Messages shared with it, from the first on."""
    messages: tuple[Mapping[str, Any], ...]
    """Those that follow, canonical, up to the prompt's end."""
    reply: Mapping[str, Any]
    """The sampled message, canonical."""
    base: int
    """Turn whose ids, prompt and samples, this prompt begins with; -1 = none."""
    num_shared: int
    """How many ids of it."""
    added_ids: NDArray[np.int32]
    """[P] ids of the prompt after those."""
    token_ids: NDArray[np.int32]
    """[N] sampled"""
    logprobs: NDArray[np.float32]
    """[N]"""
    versions: NDArray[np.int32]
    """[N]"""
    stop_reason: StopReason
    facts: Mapping[str, Any]
    """JSON: what else the recorder has to know again."""


def written_down(turn: Turn) -> TurnRecord:
    """A turn that is over, as a record."""
    kept = turn.prompt  # not the reply: another turn may have said the same to the same prompt
    while kept.owner is turn:
        assert kept.parent is not None
        kept = kept.parent
    added = [node.message for node in turn.prompt.path()[kept.depth :]]
    return TurnRecord(
        turn_id=turn.turn_id,
        handle=turn.handle,
        after=_id(kept.owner),
        num_kept=kept.depth,
        messages=tuple(added),
        reply={} if turn.reply is None else turn.reply.message,
        base=_id(turn.base),
        num_shared=turn.num_shared,
        added_ids=turn.added_ids,
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        versions=turn.versions,
        stop_reason=turn.stop_reason,
        facts={
            **{name: getattr(turn, name) for name in _PLAIN_FACTS},
            **{name: _id(getattr(turn, name)) for name in _LINKS},
            "rendered_digest": turn.rendered_digest.hex(),
            "tools_digest": turn.tools_digest.hex(),
            "said_label": None if turn.said_label is None else str(turn.said_label),
            "deviations": list(turn.deviations),
            "num_shown": len(turn.text),
        },
    )


def taken_up(
    record: TurnRecord, root: MessageNode, turns: Sequence[Turn], policy: RecordPolicy
) -> Turn:
    """The turn of a record, settled in the tree; what its text reads is the recorder's to say.

    Args:
        record: Of a turn that was over.
        root: Of the tree that all turns before it are in.
        turns: Those, in the order they ended.
        policy: The record's own.
    """
    known = {turn.turn_id: turn for turn in turns}
    kept = root
    if record.after >= 0:
        before = known[record.after]
        last = before.prompt if before.reply is None else before.reply
        kept = (root, *last.path())[record.num_kept]
    turn = Turn(record.turn_id, record.handle, kept)
    turn.new_messages = [(recorded_key(message, policy), message) for message in record.messages]
    for name in _PLAIN_FACTS:
        setattr(turn, name, record.facts.get(name, getattr(turn, name)))
    for name in _LINKS:
        setattr(turn, name, known.get(record.facts[name]))
    turn.rendered_digest = bytes.fromhex(record.facts["rendered_digest"])
    turn.tools_digest = bytes.fromhex(record.facts["tools_digest"])
    label = record.facts["said_label"]
    turn.said_label = None if label is None else CallLabel(label)
    turn.deviations = tuple(record.facts["deviations"])
    turn.base, turn.num_shared = known.get(record.base), record.num_shared
    turn.added_ids, turn.token_ids = record.added_ids, record.token_ids
    turn.logprobs, turn.versions = record.logprobs, record.versions
    turn.stop_reason = record.stop_reason
    reply = record.reply
    turn.settle((recorded_key(reply, policy), reply) if reply else None)
    return turn


def _id(turn: Turn | None) -> int:
    return -1 if turn is None else turn.turn_id


def encode_turn(record: TurnRecord) -> bytes:
    """A record as bytes: a JSON head, then its arrays."""
    head = {
        name: getattr(record, name) for name in TurnRecord.__slots__ if name not in dict(_COLUMNS)
    }
    arrays = [getattr(record, name).astype(dtype, copy=False) for name, dtype in _COLUMNS]
    head["lengths"] = [len(array) for array in arrays]
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((_HEAD.pack(len(text)), text, *(array.tobytes() for array in arrays)))


def decode_turn(buffer: bytes | memoryview) -> TurnRecord:
    """Inverse of `encode_turn`.

    Raises:
        ValueError: The buffer is no turn record or is cut short.
    """
    try:
        (length,) = _HEAD.unpack_from(buffer)
        place = _HEAD.size + length
        head = json.loads(bytes(buffer[_HEAD.size : place]))
        for (name, dtype), count in zip(_COLUMNS, head.pop("lengths"), strict=True):
            head[name] = np.frombuffer(buffer, dtype, count, place)
            place += head[name].nbytes
        head["messages"] = tuple(head["messages"])
        head["stop_reason"] = StopReason(head["stop_reason"])
        return TurnRecord(**head)
    except (struct.error, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"turn record is damaged or cut short: {error}") from error
