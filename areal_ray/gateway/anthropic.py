"""Anthropic's Messages: requests read leniently, replies written with every field and event name.

Reasoning is shown where the client asks for thinking, as the API does; the signature of its block
is the turn's handle, by which a turn that comes back is known. What `output_config.format`,
`tool_choice` and `strict` ask for is `gateway.structured`'s to keep; where the engines cannot, a
format is passed over, since agents ask for titles so.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from areal_ray.core.trajectory import StopReason
from areal_ray.gateway.blocks import Block, BlockKind, BlockReader, Step, blocks_of
from areal_ray.gateway.call import (
    Call,
    CallError,
    CallEvent,
    CallHints,
    CallOpening,
    CallReply,
    Choice,
)
from areal_ray.gateway.exchange import json_bytes
from areal_ray.gateway.fields import (
    asked_schema,
    check_answers,
    read_count,
    read_flag,
    read_function,
    read_items,
    read_parts,
    read_stop,
    read_text,
    refuse,
    shown,
    strict_names,
)
from areal_ray.gateway.messages import canonical
from areal_ray.gateway.sampling_fields import read_sampling

_BETWEEN_BLOCKS = "\n\n"
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_TOO_LONG = "prompt is too long"


class AnthropicMessages:
    """See `call.Dialect`."""

    name: str = "messages"
    paths: tuple[str, ...] = ("/messages",)
    count_paths: tuple[str, ...] = ("/messages/count_tokens",)

    def read(self, body: Mapping[str, Any], hints: CallHints) -> Call:
        """See `Dialect.read`."""
        given = read_items(body, "messages")
        if not given:
            refuse("messages", "is empty; must be a list of at least one message")
        messages = _system(body)
        places = ["system"] * len(messages)
        for where, message in given:
            messages += _read_message(message, where)
            places += [where] * (len(messages) - len(places))
        check_answers(messages, places)
        choice, metadata = body.get("tool_choice"), body.get("metadata")
        choice = choice if type(choice) is dict else {}
        user = metadata.get("user_id") if type(metadata) is dict else ""
        return Call(
            model=read_text(body, "model") or "policy",
            messages=messages,
            places=tuple(places),
            tools=_tools(body),
            tool_choice=_tool_choice(choice),
            parallel_tool_calls=not read_flag(choice, "disable_parallel_tool_use", default=False),
            max_tokens=read_count(body, "max_tokens"),
            stop=read_stop(body, "stop_sequences"),
            **read_sampling(body),
            **_json_schema(body),
            strict_tools=strict_names(tool for _, tool in read_items(body, "tools")),
            stream=read_flag(body, "stream", default=False),
            hints=replace(hints, user=user if isinstance(user, str) else ""),
            extra={"thinking": _thinking(body.get("thinking"))},
        )

    def write(self, call: Call, reply: CallReply) -> dict[str, Any]:
        """See `Dialect.write`."""
        (choice,) = reply.choices
        content = [
            _shown_block(block, call, choice.handle)
            for block in blocks_of(choice)
            if _is_shown(block, call)
        ]
        return {
            **_message(reply.id, reply.model),
            "content": content,
            **_ending(call, choice),
            "usage": _usage(reply, choice.num_tokens),
        }

    def writer(self, call: Call) -> "MessagesWriter":
        """See `Dialect.writer`."""
        return MessagesWriter(call)

    def error(self, error: CallError) -> dict[str, Any]:
        """See `Dialect.error`."""
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
        if error.code in ("overloaded", "shutting_down"):
            kind = "overloaded_error"
        message = error.message
        if _TOO_LONG in message:  # clients read the two counts that follow it
            message = message[message.index(_TOO_LONG) :]
        told = {"type": _ERROR_TYPES.get(error.status, kind), "message": message}
        return {"type": "error", "error": told, "request_id": None}

    def write_count(self, count: int) -> dict[str, Any]:
        """The body of an answer to a request to count."""
        return {"input_tokens": count}


class MessagesWriter:
    """Writes named events from `message_start` to `message_stop`; see `call.StreamWriter`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._blocks = BlockReader()
        self._handle = ""
        self._num_hidden = 0

    def begin(self, opening: CallOpening) -> bytes:
        """See `StreamWriter.begin`."""
        self._handle = opening.handle
        begun = {
            **_message(opening.id, opening.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(opening, 0),
        }
        return _event("message_start", message=begun)

    def write(self, event: CallEvent) -> bytes:
        """See `StreamWriter.write`."""
        written = b""
        for step, block, text in self._blocks.read(event):
            if not _is_shown(block, self._call):
                self._num_hidden += step is Step.OPEN
                continue
            index = block.index - self._num_hidden
            if step is Step.OPEN:
                empty = _shown_block(Block(block.kind, 0, "", block.id, block.name), self._call, "")
                written += _event("content_block_start", index=index, content_block=empty)
            elif step is Step.MORE:
                written += self._delta(block, index, text)
            else:
                if block.kind is BlockKind.REASONING:
                    signed = {"type": "signature_delta", "signature": self._handle}
                    written += _event("content_block_delta", index=index, delta=signed)
                written += _event("content_block_stop", index=index)
        return written

    def end(self, reply: CallReply) -> bytes:
        """See `StreamWriter.end`."""
        (choice,) = reply.choices
        usage = _usage(reply, choice.num_tokens)
        ended = _event("message_delta", delta=_ending(self._call, choice), usage=usage)
        return ended + _event("message_stop")

    def fail(self, error: CallError) -> bytes:
        """See `StreamWriter.fail`."""
        told = AnthropicMessages().error(error)
        return b"event: error\ndata: " + json_bytes(told) + b"\n\n"

    def keep_alive(self) -> bytes:
        """See `StreamWriter.keep_alive`."""
        return _event("ping")

    def _delta(self, block: Block, index: int, text: str) -> bytes:
        if block.kind is BlockKind.TEXT:
            delta = {"type": "text_delta", "text": text}
        elif block.kind is BlockKind.CALL:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif self._call.extra["thinking"] == "shown":
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            return b""
        return _event("content_block_delta", index=index, delta=delta)


# -- requests ----------------------------------------------------------------------------------


def _system(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = read_parts(body.get("system"), "system", _BETWEEN_BLOCKS)
    return [{"role": "system", "content": text}] if text else []


def _read_message(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The canonical messages that one of Anthropic's is: results of tools are of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        refuse(f"{where}.role", f"is {shown(role)}; must be user, assistant or system")
    where = f"{where}.content"
    if role == "assistant" and type(content) is list:
        return [_assistant(content, where)]
    between = "" if role == "assistant" else _BETWEEN_BLOCKS
    results = []
    if type(content) is list and role == "user":
        results = [
            _tool_result(block, f"{where}[{index}]")
            for index, block in enumerate(content)
            if _kind(block) == "tool_result"
        ]
    text = read_parts(content, where, between)
    return results if results and not text else [*results, {"role": role, "content": text}]


def _assistant(content: Sequence[Any], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": read_parts(content, where)}
    calls = []
    for index, block in enumerate(content):
        kind = _kind(block)
        if kind == "tool_use":
            for name in ("id", "name"):
                if type(block.get(name)) is not str:
                    refuse(f"{where}[{index}].{name}", "is missing; must be a string")
            if type(block.get("input")) not in (dict, type(None)):
                refuse(f"{where}[{index}].input", "must be an object")
            function = {"name": block["name"], "arguments": block.get("input") or {}}
            calls.append({"id": block["id"], "function": function})
        elif kind == "thinking":
            if type(block.get("thinking")) is str:
                message["reasoning"] = message.get("reasoning", "") + block["thinking"]
            if type(block.get("signature")) is str:
                message["handle"] = block["signature"]
    marks = {name: message[name] for name in ("reasoning", "handle") if message.get(name)}
    return {**canonical({**message, "tool_calls": calls}), **marks}


def _tool_result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    call_id = block.get("tool_use_id")
    if type(call_id) is not str:  # an empty one is of a call that the model wrote as text
        refuse(f"{where}.tool_use_id", f"is {shown(call_id)}; must be a string")
    text = read_parts(block.get("content"), f"{where}.content", _BETWEEN_BLOCKS)
    if block.get("is_error") is True and "error" not in text.lower():
        text = f"Error: {text}"  # a template has no other place for it
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def _kind(block: Any) -> Any:
    return block.get("type") if type(block) is dict else None


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The client's own tools: those of the provider have a type, and deferred ones are not yet
    to be shown.
    """
    return [
        read_function(tool, where, "input_schema")
        for where, tool in read_items(body, "tools")
        if tool.get("type") in (None, "custom") and tool.get("defer_loading") is not True
    ]


def _tool_choice(choice: Mapping[str, Any]) -> str:
    kind, name = choice.get("type"), choice.get("name")
    if kind == "tool" and type(name) is str and name:
        return name
    return {"any": "required", "none": "none"}.get(kind, "auto") if type(kind) is str else "auto"


def _json_schema(body: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a `Call`."""
    config = body.get("output_config")
    wanted = config.get("format") if type(config) is dict else body.get("output_format")
    if type(wanted) is not dict or wanted.get("type") != "json_schema":
        return {}
    return asked_schema({"schema": wanted.get("schema")}, "output_config.format")


def _thinking(wanted: Any) -> str:
    """shown, signed (its text left out) or hidden."""
    if type(wanted) is not dict or wanted.get("type") not in ("enabled", "adaptive"):
        return "hidden"
    return "signed" if wanted.get("display") == "omitted" else "shown"


# -- replies -----------------------------------------------------------------------------------


def _event(kind: str, **fields: Any) -> bytes:
    told = json_bytes({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + told + b"\n\n"


def _message(reply_id: str, model: str) -> dict[str, Any]:
    return {"id": f"msg_{reply_id}", "type": "message", "role": "assistant", "model": model}


def _is_shown(block: Block, call: Call) -> bool:
    return block.kind is not BlockKind.REASONING or call.extra["thinking"] != "hidden"


def _shown_block(block: Block, call: Call, handle: str) -> dict[str, Any]:
    if block.kind is BlockKind.TEXT:
        return {"type": "text", "text": block.text, "citations": None}
    if block.kind is BlockKind.REASONING:
        text = block.text if call.extra["thinking"] == "shown" else ""
        return {"type": "thinking", "thinking": text, "signature": handle}
    given = json.loads(block.text) if block.text else {}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": given}


def _ending(call: Call, choice: Choice) -> dict[str, Any]:
    reason = "end_turn"
    stop_text = choice.stop_text if choice.stop_text in call.stop else ""
    if choice.stop_reason is StopReason.TOOL_CALLS:
        reason = "tool_use"
    elif choice.stop_reason in (StopReason.LENGTH, StopReason.ABORT):
        reason = "max_tokens"
    elif stop_text:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop_text or None}


def _usage(counts: CallOpening | CallReply, num_tokens: int) -> dict[str, Any]:
    """Cached tokens are no input tokens here."""
    return {
        "input_tokens": counts.num_prompt_tokens - counts.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.num_cached_tokens,
        "output_tokens": num_tokens,
    }
