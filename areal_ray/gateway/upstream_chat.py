"""Chat Completions from the client's side: a call as a request body, and streamed chunks read."""

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal_ray.core.trajectory import StopReason
from areal_ray.gateway.call import (
    Call,
    CalledTool,
    CallEvent,
    Choice,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from areal_ray.gateway.json_text import read_json
from areal_ray.gateway.turn_reader import shown_tools

_STOPS = {"length": StopReason.LENGTH, "tool_calls": StopReason.TOOL_CALLS}
_PLAIN = ("temperature", "top_p", "seed")
_LEAST_LOGPROB = -9999.0
"""What the API has for a token that cannot come; other servers send -Infinity, which JSON lacks."""
_MOST_LOGPROB = 1e6
"""Above 0 by rounding at most; what is far beyond is no number that a client could read."""


def chat_body(call: Call, model: str, limit_field: str = "max_tokens") -> dict[str, Any]:
    """The body of a streamed request.

    Args:
        call: That it is for.
        model: What the provider calls its model.
        limit_field: What it calls the limit on the tokens of a reply.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [_told_message(message) for message in call.messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {name: getattr(call, name) for name in _PLAIN if getattr(call, name) is not None}
    body |= call.wishes.given() | dict(call.passed_on)
    if call.max_tokens is not None:
        body[limit_field] = call.max_tokens
    if call.n > 1:
        body["n"] = call.n
    if call.stop:
        body["stop"] = list(call.stop)
    if tools := [_told_tool(tool, call.strict_tools) for tool in shown_tools(call) or ()]:
        is_named = call.tool_choice not in ("auto", "required")
        named = {"type": "function", "function": {"name": call.tool_choice}}
        body |= {"tools": tools, "tool_choice": named if is_named else call.tool_choice}
        if not call.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    if call.logprobs:
        body |= {"logprobs": True} | (
            {"top_logprobs": call.top_logprobs} if call.top_logprobs else {}
        )
    if call.json_schema is not None:
        strict = {"strict": True} if call.is_strict else {}
        schema = {"name": "reply", "schema": call.json_schema, **strict}
        body["response_format"] = (
            {"type": "json_schema", "json_schema": schema}
            if call.json_schema
            else {"type": "json_object"}
        )
    return body


def _told_tool(tool: Mapping[str, Any], strict_names: Collection[str]) -> dict[str, Any]:
    function = tool["function"]
    strict = {"strict": True} if function["name"] in strict_names else {}
    return {**tool, "function": {**function, **strict}}


def _told_message(message: Mapping[str, Any]) -> dict[str, Any]:
    told = {name: message[name] for name in ("role", "content", "name") if name in message}
    if "tool_call_id" in message:
        told["tool_call_id"] = message["tool_call_id"]
    if "tool_calls" in message:
        told["tool_calls"] = [_told_call(call) for call in message["tool_calls"]]
    if message.get("reasoning"):
        told["reasoning_content"] = message["reasoning"]
    return told


def _told_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


@dataclass(slots=True)
class _GatheredCall:
    name: str
    id: str = field(default_factory=lambda: "call" + secrets.token_hex(12))
    """Ours: the provider's may be what a dialect cannot carry."""
    arguments: list[str] = field(default_factory=list)

    def shown(self) -> CalledTool:
        return CalledTool(self.id, self.name, "".join(self.arguments) or "{}")


@dataclass(slots=True)
class Gathered:
    """What has come of one choice so far."""

    index: int
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[_GatheredCall] = field(default_factory=list)
    stop_reason: StopReason = StopReason.ABORT
    """Until the provider says why it ended."""
    wants_logprobs: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_told_logprobs: int = 0
    """Those that events have told of."""

    def feed(self, choice: Mapping[str, Any]) -> list[CallEvent]:
        """What one chunk adds.

        Raises:
            ValueError: It is not of the API's form.
        """
        delta = choice.get("delta") or {}
        if not isinstance(delta, Mapping):
            raise ValueError("its delta is no object")
        if self.wants_logprobs:
            self.logprobs += _told_logprobs(choice.get("logprobs"))
        events: list[CallEvent] = []
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            self.reasoning.append(reasoning)
            events.append(ReasoningDelta(self.index, reasoning))
        text = delta.get("content")
        if isinstance(text, str) and text:
            self.text.append(text)
            events.append(TextDelta(self.index, text, self._taken_logprobs()))
        calls = delta.get("tool_calls") or ()
        if not isinstance(calls, Sequence):
            raise ValueError("its tool_calls are no list")
        for call in calls:
            events += self._feed_call(call)
        if isinstance(reason := choice.get("finish_reason"), str):
            self.stop_reason = _STOPS.get(reason, StopReason.STOP)
            if left := self._taken_logprobs():
                events.append(TextDelta(self.index, "", left))
        return events

    def _taken_logprobs(self) -> tuple[TokenLogprob, ...]:
        new = tuple(self.logprobs[self.num_told_logprobs :])
        self.num_told_logprobs = len(self.logprobs)
        return new

    def _feed_call(self, told: Any) -> list[CallEvent]:
        function = told.get("function") if isinstance(told, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError("a tool call in it has no function")
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        index = told.get("index", len(self.calls) if name else len(self.calls) - 1)
        if not (isinstance(name, str) and isinstance(arguments, str) and type(index) is int):
            raise ValueError("a tool call in it is not of the API's form")
        if index == len(self.calls) and name:
            self.calls.append(_GatheredCall(name))
        elif not 0 <= index < len(self.calls):
            raise ValueError(f"a tool call in it has index {index} and no beginning")
        else:
            name = ""  # some providers repeat it
        call = self.calls[index]
        if arguments:
            call.arguments.append(arguments)
        return [ToolCallDelta(self.index, index, call.id, name, arguments)]

    def choice(self, num_tokens: int, num_reasoning_tokens: int) -> Choice:
        """The whole."""
        return Choice(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(call.shown() for call in self.calls),
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs),
            num_tokens=num_tokens,
            num_reasoning_tokens=num_reasoning_tokens,
        )

    def message(self) -> dict[str, Any]:
        """The same as a canonical message, to be recorded; {} if nothing has come."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.text)}
        if self.calls:
            message["tool_calls"] = [_recorded_call(call.shown()) for call in self.calls]
        if self.reasoning:
            message["reasoning"] = "".join(self.reasoning)
        return message if any((self.text, self.calls, self.reasoning)) else {}


def _told_logprobs(told: Any) -> list[TokenLogprob]:
    """The tokens of a chunk, as the API tells their log-probs.

    Raises:
        ValueError: They are not of its form.
    """
    content = told.get("content") if isinstance(told, Mapping) else None
    found = []
    for token in _listed(content):
        plain = _told_token(token)
        top = tuple(_told_token(one) for one in _listed(token.get("top_logprobs")))
        found.append(replace(plain, top=top))
    return found


def _told_token(told: Any) -> TokenLogprob:
    known = told if isinstance(told, Mapping) else {}
    text, raw = known.get("token"), known.get("bytes")
    logprob: Any = known.get("logprob")
    is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
    if not isinstance(text, str) or not is_number or not logprob < _MOST_LOGPROB:  # nor NaN
        raise ValueError("a token in it has no text or no log-prob")
    logprob = max(logprob, _LEAST_LOGPROB)
    if raw is None:  # the provider knows none
        return TokenLogprob(text, float(logprob), text.encode())
    if not all(type(byte) is int and 0 <= byte < 256 for byte in _listed(raw)):
        raise ValueError("the bytes of a token in it are none")
    return TokenLogprob(text, float(logprob), bytes(raw))


def _listed(told: Any) -> list[Any]:
    if told is not None and not isinstance(told, list):
        raise ValueError("its log-probs are no list")
    return told or []


def _recorded_call(call: CalledTool) -> dict[str, Any]:
    try:
        arguments = read_json(call.arguments)
    except (ValueError, RecursionError):
        arguments = call.arguments  # as it came: the record has to tell what was said
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
