"""Chat messages in one canonical form, however a client spells them.

Clients resend history in their own words: parts instead of a string, null fields, other key
order, re-serialised tool arguments, new tool-call ids. Two messages that mean the same have the
same `message_key`; `for_template` is the form every chat template understands.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from areal_ray.core.turn import Reply
from areal_ray.gateway.json_text import read_json

T = TypeVar("T")

MessageKey = tuple[str, str, tuple[tuple[str, str], ...]]

ConversationKey = tuple[Any, ...]
"""A `MessageKey`, or one with a text of reasoning behind it."""

RAW = "raw"
"""Role of a prompt that is in no template; of ours alone, clients cannot send it."""

_READ = {"role", "content", "tool_calls", "tool_call_id", "name"}
_LONGEST_ID = 256
"""Of ids that are known again with something appended."""
_NOT_ALPHANUMERIC = re.compile(r"[^0-9A-Za-z]")
_FRACTION = re.compile(r"\d[.e]")


def canonical(message: Any, index: int = 0) -> dict[str, Any]:
    """One message as a plain mapping without empty fields; tool arguments parsed.

    Args:
        message: A mapping, or an object of an SDK with `role` and `content`.
        index: Its place in the conversation, for messages.

    Raises:
        ValueError: No role, content that is not text, or arguments that are not a JSON object.
    """
    fields = message if type(message) is dict else _fields(message)
    role, text = fields.get("role"), fields.get("content")
    if len(fields) == 2 and role and type(role) is str and type(text) is str:
        return {"role": role, "content": text}
    if not isinstance(role, str) or not role:
        raise ValueError(f"messages[{index}].role: is {role!r}; must be a string such as 'user'")
    plain: dict[str, Any] = {"role": role, "content": _text(text, index)}
    calls = fields.get("tool_calls") or ()
    if calls:
        plain["tool_calls"] = [_call(call, index) for call in calls]
    for name in ("tool_call_id", "name"):
        if fields.get(name):
            plain[name] = fields[name]
    return plain


def conversation(messages: Any) -> list[dict[str, Any]]:
    """A given conversation as `canonical` messages; what else its messages hold is kept.

    Raises:
        ValueError: It is no list, or a message of it cannot be read.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"is a {type(messages).__name__}; must be a list of messages")
    plain = []
    for index, message in enumerate(messages):
        fields = message if isinstance(message, Mapping) else {}
        more = {name: value for name, value in fields.items() if name not in _READ}
        plain.append({**more, **canonical(message, index)})
    return plain


def message_key(message: Mapping[str, Any]) -> MessageKey:
    """What a canonical message says, for matching a resent one with the recorded one.

    Assistant text is compared without surrounding whitespace, which clients strip; ids of tool
    calls are left out, which some clients rewrite. Who of several users speaks counts; the names
    that clients give tools' results and their own agents come and go.
    """
    role, text = message["role"], message["content"]
    if role == "assistant":
        text = text.strip()
    elif role != "tool" and message.get("name"):
        role = f"{role} {message['name']}"
    if "tool_calls" not in message:
        return role, text, ()
    calls = tuple(
        (call["function"]["name"], _arguments_key(call["function"]["arguments"]))
        for call in message["tool_calls"]
    )
    return role, text, calls


def _arguments_key(arguments: Any) -> str:
    """Equal for equal JSON, also where a client writes 1.0 as 1 (all JavaScript does)."""
    text = json.dumps(arguments, sort_keys=True)
    if not _FRACTION.search(text):
        return text
    return json.dumps(json.loads(text, parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def in_call_order(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The conversation with the results of parallel tool calls in the order of the calls.

    Agents that run tools side by side send what came first, and say by an id which call it is of;
    a chat template shows no ids, and a model has the order alone to go by.
    """
    ordered: list[Mapping[str, Any]] | None = None
    for index, message in enumerate(messages):
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            continue
        rank_of = CallIds[int]()
        for rank, call in enumerate(calls):
            rank_of.note(call["id"], rank)
        end = index + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        ranks = [rank_of.find(one.get("tool_call_id")) for one in messages[index + 1 : end]]
        known = [rank for rank in ranks if rank is not None]
        if len(set(known)) == len(ranks) and known != sorted(known):
            ordered = ordered or list(messages)
            places = [place for _, place in sorted(zip(known, range(len(known)), strict=True))]
            ordered[index + 1 : end] = [messages[index + 1 + place] for place in places]
    return messages if ordered is None else ordered


class CallIds(Generic[T]):
    """What is kept of tool calls, found by ids that clients take the punctuation from, or append
    to; however many calls there are."""

    def __init__(self) -> None:
        self._kept: dict[str, T] = {}
        self._lengths: list[int] = []
        """Of the ids, the longest first: `call12` is not `call1` with something appended."""

    def note(self, call_id: Any, kept: T) -> None:
        """Keep something of a call, unless its id is known."""
        plain = plain_id(call_id)
        self._kept.setdefault(plain, kept)
        if 0 < len(plain) <= _LONGEST_ID and len(plain) not in self._lengths:
            self._lengths = sorted((*self._lengths, len(plain)), reverse=True)

    def find(self, call_id: Any) -> T | None:
        """What is kept of the call that a result names; None if it names none."""
        if call_id is None:
            return None
        named = plain_id(call_id)
        beginnings = (named, *(named[:length] for length in self._lengths))
        return next((self._kept[one] for one in beginnings if one in self._kept), None)

    def __bool__(self) -> bool:
        return bool(self._kept)


def plain_id(call_id: Any) -> str:
    """Letters and digits of a tool call's id, which clients keep."""
    return _NOT_ALPHANUMERIC.sub("", call_id) if isinstance(call_id, str) else json.dumps(call_id)


def reply_message(reply: Reply) -> dict[str, Any]:
    """The canonical assistant message that `reply` becomes."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in reply.tool_calls
        ]
    if reply.reasoning:
        message["reasoning"] = reply.reasoning
    return message


def _fields(message: Any) -> Mapping[str, Any]:
    if isinstance(message, Mapping):
        return message
    if hasattr(message, "model_dump"):
        dumped: Mapping[str, Any] = message.model_dump()
        return dumped
    names = ("role", "content", "tool_calls", "tool_call_id", "name")
    return {name: getattr(message, name) for name in names if hasattr(message, name)}


def _text(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    where = f"messages[{index}].content"
    if isinstance(content, (Mapping, bytes)) or not isinstance(content, Sequence):
        raise ValueError(
            f"{where}: is {type(content).__name__}; must be text or a list of text parts"
        )
    return "".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    """The text of a part; what an SDK calls a refusal was said, too."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        for name in ("text", "refusal"):
            if isinstance(part.get(name), str):
                return str(part[name])
        kind = str(part.get("type"))[:40]
        if kind in ("text", "refusal"):
            if part.get(kind) is None:
                return ""
            raise ValueError(f"{where}.{kind}: is {type(part[kind]).__name__}; must be a string")
        raise ValueError(f"{where}: is of type {kind}; must be a text part: no media are read")
    raise ValueError(f"{where}: is {type(part).__name__}; must be a text part")


def _call(call: Any, index: int) -> dict[str, Any]:
    fields = call if isinstance(call, Mapping) else _object_fields(call)
    function = fields.get("function") or {}
    if not isinstance(function, Mapping):
        function = _object_fields(function)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"messages[{index}].tool_calls: arguments of {function.get('name')!r} are not "
                f"JSON: {error}"
            ) from error
    if not isinstance(arguments, Mapping):
        raise ValueError(
            f"messages[{index}].tool_calls: arguments of {function.get('name')!r} must be a JSON "
            f"object, not {type(arguments).__name__}"
        )
    plain = {"name": function.get("name", ""), "arguments": dict(arguments)}
    return {"id": fields.get("id", ""), "type": "function", "function": plain}


def _object_fields(value: Any) -> dict[str, Any]:
    return {
        name: getattr(value, name)
        for name in ("id", "function", "name", "arguments")
        if hasattr(value, name)
    }
