"""Finds what a request sends again of the record, however its client spells it.

In this order: the handle we gave (in reasoning signatures and encrypted content), ids of tool
calls (also without punctuation, or with something appended), what is said. A turn named by handle
or id is still another one if it says something else.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_ray.gateway.messages import CallIds, ConversationKey, canonical, message_key, plain_id
from areal_ray.gateway.pieces import CALL_ID_CHARACTERS, call_id
from areal_ray.gateway.record_policy import RecordPolicy
from areal_ray.gateway.turn_tree import MessageNode, NewMessages, Turn

AGENT_EDITED = "the agent edited the history"
AGENT_OMITTED = "the agent left a turn out"
MOVED_TAIL = "the agent moved its last message"
BROKEN_OFF = "the agent sent a broken-off turn again"
REASONING_LEFT_OUT = "the agent left the reasoning out"

REASONING_DROPPED = "reasoning dropped"
REASONING_INLINE = "reasoning moved into the text"
RESPELLED = "blanks or the order of calls changed"

_MOST_UNFINISHED = 3
_BILLING_LINE = re.compile(r"^x-[\w-]*billing[\w-]*:.*\n?", re.MULTILINE | re.IGNORECASE)
"""What a client counts its requests by, in the system text."""
_INLINE_REASONING = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


@dataclass(slots=True)
class Place:
    """Where a request's conversation lies in the record."""

    node: MessageNode
    """The last of its messages that is recorded."""
    messages: list[Mapping[str, Any]]
    """All of them, canonical: as recorded where they are."""
    new: NewMessages
    """Those that are not recorded yet."""
    continues: Turn | None = None
    """The last turn whose reply is among the recorded ones."""
    reappeared: Turn | None = None
    """A turn whose reply is among the new ones."""
    reason: str = ""
    """Why the conversation leaves its record, if it does."""
    deviations: tuple[str, ...] = ()
    """How the client's words differ from the recorded ones."""
    has_past: bool = False
    """Whether it holds any assistant message."""


def find_place(
    root: MessageNode, messages: Sequence[Any], turns: Sequence[Turn], policy: RecordPolicy
) -> Place:
    """The place of a conversation as the client sends it.

    Args:
        root: Of the tree.
        messages: From the first on.
        turns: All that were closed or broken off, in that order.
        policy: What counts as sent again.

    Raises:
        ValueError: A message cannot be read, or answers a tool call that nobody made.
    """
    if policy.is_tolerant:
        read = [_with_marks(message, index) for index, message in enumerate(messages)]
        return _Finder(turns, policy).find(root, read)
    plain: list[Mapping[str, Any]] = [
        canonical(message, index) for index, message in enumerate(messages)
    ]
    keys = [message_key(message) for message in plain]
    place, at = Place(root, plain, ()), root
    for index, key in enumerate(keys):
        below = at.children.get(key)
        if below is None:
            break
        at = below
        plain[index] = at.message
        if at.replies:
            place.continues = max(at.replies, key=lambda turn: turn.turn_id)
    place.node = at
    place.new = new = list(zip(keys, plain, strict=True))[at.depth :]
    place.has_past = any(key[0] == "assistant" for key in keys)
    if new and at.depth and at.children and any(_is_reply(message) for _, message in new):
        place.reason = AGENT_EDITED
    return place


class _Finder:
    """One search that tolerates what clients are known to do."""

    def __init__(self, turns: Sequence[Turn], policy: RecordPolicy) -> None:
        self._turns = turns
        self._policy = policy
        self._deviations: dict[str, None] = {}
        self._call_ids = CallIds[str]()
        """Of the tool calls so far, as recorded."""
        self._reason = ""

    def find(self, root: MessageNode, messages: Sequence[dict[str, Any]]) -> Place:
        place = Place(root, [], ())
        place.has_past = any(_is_reply(message) for message in messages)
        at = root
        new: list[tuple[ConversationKey, Mapping[str, Any]]] = []
        for index, message in enumerate(messages):
            # Where a model calls tools in its text, the agent has ids of its own for the results.
            is_in_text = place.has_past and not self._call_ids
            answered = message if is_in_text else self._answered(message, index)
            key = _key(answered)
            below = None if new else self._below(at, answered, key, place)
            if below is not None:
                at = below
                recorded = below.message
            else:
                recorded = {name: value for name, value in answered.items() if name != "handle"}
                new.append((key, recorded))
            self._note_calls(recorded, message)
            place.messages.append(recorded)
        place.node, place.new = at, new
        place.deviations = tuple(self._deviations)
        if new:
            self._explain(place, messages[len(messages) - len(new) :])
        return place

    def _below(
        self, at: MessageNode, message: Mapping[str, Any], key: ConversationKey, place: Place
    ) -> MessageNode | None:
        if not _is_reply(message):
            return at.children.get(key)
        found: tuple[bool, bool, int, Turn] | None = None
        for turn in at.samples():
            named = is_named(turn, message)
            differs = self._difference(turn, message, key, named=named)
            if differs is not None:
                rank = (named, not differs, turn.turn_id, turn)
                found = rank if found is None or rank[:3] > found[:3] else found
        if found is None:
            return at.children.get(key)
        place.continues = turn = found[3]
        self._reason = ""
        differs = self._difference(turn, message, key, named=found[0])
        self._deviations.update(dict.fromkeys(differs or ()))
        return turn.reply

    def _difference(
        self, turn: Turn, message: Mapping[str, Any], key: ConversationKey, *, named: bool
    ) -> tuple[str, ...] | None:
        """How a resent message differs from what `turn` said; None if it is another one."""
        assert turn.reply is not None
        recorded, said = turn.reply.message, turn.reply.key[:3]
        kept = recorded.get("reasoning", "").strip()
        sent = message.get("reasoning", "").strip()
        found: list[str] = []
        if key[:3] != said:
            inline = _INLINE_REASONING.match(message["content"])
            rest = {**message, "content": message["content"][inline.end() :]} if inline else {}
            if inline and kept and message_key(rest) == said:
                sent = inline[1].strip()
                found.append(REASONING_INLINE)
            elif named and _loose(key) == _loose(said):
                found.append(RESPELLED)
            else:
                return None
        if sent == kept or (named and not sent and message.get("handle") == turn.handle):
            return tuple(found)
        if sent:
            return None
        if self._policy.dropped_reasoning == "branch":
            self._reason = REASONING_LEFT_OUT
            return None
        return (*found, REASONING_DROPPED)

    def _note_calls(self, recorded: Mapping[str, Any], sent: Mapping[str, Any]) -> None:
        for message in (recorded, sent):
            for call, kept in zip(
                message.get("tool_calls", ()), recorded.get("tool_calls", ()), strict=False
            ):
                self._call_ids.note(call["id"], kept["id"])

    def _answered(self, message: dict[str, Any], index: int) -> dict[str, Any]:
        """A tool result under the id of its call as recorded."""
        call_id = message.get("tool_call_id")
        if not call_id or message["role"] != "tool":
            return message
        known = self._call_ids.find(call_id)
        if known is None:
            raise ValueError(
                f"messages[{index}].tool_call_id: {call_id!r} is of no tool call before it; must "
                "be the id of one in an assistant message above"
            )
        return message if known == call_id else {**message, "tool_call_id": known}

    def _explain(self, place: Place, rest: Sequence[Mapping[str, Any]]) -> None:
        """Say why the conversation leaves the record, where it leaves one."""
        at, samples = place.node, place.node.samples()
        for message in rest:
            if _is_reply(message) and place.reappeared is None:
                place.reappeared = self._elsewhere(at, message)
        if _is_reply(rest[0]):
            if place.reappeared is not None and not samples:
                place.reason = MOVED_TAIL if at.depth else AGENT_EDITED
            elif any(_is_part(turn, at, rest[0]) for turn in self._turns):
                place.reason = BROKEN_OFF
            elif samples:
                place.reason = self._reason or AGENT_EDITED
        elif samples:
            place.reason = AGENT_OMITTED
        elif any(_is_reply(message) for message in rest) and (
            place.reappeared is not None or (at.depth and at.children)
        ):
            place.reason = AGENT_EDITED

    def _elsewhere(self, at: MessageNode, message: Mapping[str, Any]) -> Turn | None:
        """The latest turn that said this, after another conversation than that up to `at`."""
        key = _key(message)
        for turn in reversed(self._turns):
            if turn.reply is None or turn.prompt is at:
                continue
            named = is_named(turn, message)
            if named or turn.reply.key[:3] == key[:3]:
                return turn
        return None


def is_named(turn: Turn, message: Mapping[str, Any]) -> bool:
    """Whether a resent message names `turn`, by its handle or by an id of a call of its."""
    if turn.handle and message.get("handle") == turn.handle:
        return True
    assert turn.reply is not None
    theirs = [plain_id(call["id"]) for call in message.get("tool_calls", ())]
    if not theirs:
        return False
    # Turns that said the same share a message, with the ids of the first; each has its own by its
    # handle. Calls that stayed unfinished took indices before those of the reply.
    most = len(turn.reply.message.get("tool_calls", ())) + _MOST_UNFINISHED
    ours = {call_id(turn.handle, index) for index in range(most)}
    return any(their[:CALL_ID_CHARACTERS] in ours for their in theirs)


def _with_marks(message: Any, index: int) -> dict[str, Any]:
    plain = canonical(message, index)
    if isinstance(message, Mapping):
        for name in ("reasoning", "handle"):
            if message.get(name):
                plain[name] = message[name]
    return plain


def _key(message: Mapping[str, Any]) -> ConversationKey:
    """`message_key`, without lines that change with each request; reasoning behind it."""
    if message["role"] in ("system", "developer") and "billing" in message["content"].lower():
        message = {**message, "content": _BILLING_LINE.sub("", message["content"])}
    return conversation_key(message)


def conversation_key(message: Mapping[str, Any]) -> ConversationKey:
    """`message_key` with the reasoning, where there is any: what a node is found by."""
    key = message_key(message)
    reasoning = message.get("reasoning", "").strip()
    return (*key, reasoning) if reasoning else key


def recorded_key(message: Mapping[str, Any], policy: RecordPolicy) -> ConversationKey:
    """The key that a recorded message has in its tree."""
    return _key(message) if policy.is_tolerant else message_key(message)


def _is_reply(message: Mapping[str, Any]) -> bool:
    return bool(message["role"] == "assistant")


def _is_part(turn: Turn, at: MessageNode, message: Mapping[str, Any]) -> bool:
    """Whether a message is what came through of a turn that was broken off after `at`."""
    if turn.reply is not None or turn.prompt is not at or message.get("tool_calls"):
        return False
    return turn.sampled_text.strip().startswith(message["content"].strip())


def _loose(key: ConversationKey) -> tuple[str, list[tuple[str, str]]]:
    return "".join(key[1].split()), sorted(key[2])
