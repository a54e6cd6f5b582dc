"""OpenAI's Chat Completions: requests read leniently, replies written with every field.

Both limits on tokens may be given; the smaller holds. Tools that are no functions are passed over.
What `response_format`, `tool_choice` and `strict` ask for is `gateway.structured`'s to keep.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from json.encoder import encode_basestring
from typing import Any

from areal_ray.core.trajectory import StopReason
from areal_ray.gateway.call import (
    Call,
    CallError,
    CallEvent,
    CallHints,
    CallOpening,
    CallReply,
    Choice,
    ChoiceEnd,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
)
from areal_ray.gateway.exchange import json_bytes, one_line
from areal_ray.gateway.fields import (
    asked_schema,
    read_count,
    read_flag,
    read_items,
    read_seed,
    read_stop,
    read_text,
    read_tools,
    read_top_logprobs,
    refuse,
    shown,
    strict_names,
)
from areal_ray.gateway.messages import canonical
from areal_ray.gateway.openai_shapes import DONE, chat_usage, openai_error, shown_logprobs
from areal_ray.gateway.sampling_fields import read_sampling

_ROLES = {
    "system": "system",
    "developer": "system",  # templates know no developer, and some drop what they do not know
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_FINISH = {
    StopReason.STOP: "stop",
    StopReason.LENGTH: "length",
    StopReason.TOOL_CALLS: "tool_calls",
    StopReason.ABORT: "length",
}


class OpenAIChat:
    """See `call.Dialect`."""

    name: str = "chat"
    paths: tuple[str, ...] = ("/chat/completions",)

    def read(self, body: Mapping[str, Any], hints: CallHints) -> Call:
        """See `Dialect.read`."""
        messages = body.get("messages")
        if type(messages) is not list or not messages:
            refuse("messages", f"is {shown(messages)}; must be a list of at least one message")
        limits = [read_count(body, name) for name in ("max_tokens", "max_completion_tokens")]
        given = [limit for limit in limits if limit is not None]
        options = body.get("stream_options")
        top = read_top_logprobs(body)
        if top and not body.get("logprobs"):
            refuse("top_logprobs", f"is {top}, and logprobs is not true; it must be with it")
        user = next((body[k] for k in ("user", "prompt_cache_key") if body.get(k)), "")
        return Call(
            model=read_text(body, "model") or "policy",
            messages=[_message(message, index) for index, message in enumerate(messages)],
            tools=read_tools(body),
            tool_choice=_tool_choice(body.get("tool_choice")),
            parallel_tool_calls=read_flag(body, "parallel_tool_calls", default=True),
            max_tokens=min(given) if given else None,
            stop=read_stop(body),
            n=read_count(body, "n") or 1,
            seed=read_seed(body),
            **read_sampling(body),
            logprobs=bool(body.get("logprobs")),
            top_logprobs=top,
            **_json_schema(body.get("response_format")),
            strict_tools=strict_names(
                tool.get("function") for _, tool in read_items(body, "tools")
            ),
            stream=read_flag(body, "stream", default=False),
            include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
            hints=replace(hints, user=user if isinstance(user, str) else ""),
        )

    def write(self, call: Call, reply: CallReply) -> dict[str, Any]:
        """See `Dialect.write`."""
        return {
            "id": f"chatcmpl-{reply.id}",
            "object": "chat.completion",
            "created": reply.created_s,
            "model": reply.model,
            "choices": [
                {
                    "index": index,
                    "message": _shown_message(choice),
                    "logprobs": _shown_logprobs(choice.logprobs, call) if call.logprobs else None,
                    "finish_reason": _FINISH[choice.stop_reason],
                }
                for index, choice in enumerate(reply.choices)
            ],
            "usage": chat_usage(reply),
            "service_tier": None,
            "system_fingerprint": None,
        }

    def writer(self, call: Call) -> "ChatWriter":
        """See `Dialect.writer`."""
        return ChatWriter(call)

    def error(self, error: CallError) -> dict[str, Any]:
        """See `Dialect.error`."""
        return openai_error(error)


class ChatWriter:
    """Writes `chat.completion.chunk` events; see `call.StreamWriter`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._head = b""
        self._usage = ',"usage":null' if call.include_usage else ""

    def begin(self, opening: CallOpening) -> bytes:
        """See `StreamWriter.begin`."""
        head = json_bytes(
            {
                "id": f"chatcmpl-{opening.id}",
                "object": "chat.completion.chunk",
                "created": opening.created_s,
                "model": opening.model,
                "system_fingerprint": None,
            }
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        role = '"role":"assistant","content":""'
        return b"".join(self._chunk(index, role) for index in range(self._call.n))

    def write(self, event: CallEvent) -> bytes:
        """See `StreamWriter.write`."""
        if isinstance(event, TextDelta):
            told = f'"content":{encode_basestring(event.text)}'
            return self._chunk(event.choice, told, logprobs=event.logprobs)
        if isinstance(event, ReasoningDelta):
            return self._chunk(event.choice, f'"reasoning_content":{encode_basestring(event.text)}')
        if isinstance(event, ChoiceEnd):
            return self._chunk(event.choice, "", finish=_FINISH[event.whole.stop_reason])
        if event.is_unfinished:  # the API has no word for it: the finish reason tells
            return b""
        begun = f'"id":{encode_basestring(event.id)},"type":"function",' if event.name else ""
        name = f'"name":{encode_basestring(event.name)},' if event.name else ""
        function = f'{{{name}"arguments":{encode_basestring(event.arguments)}}}'
        call = f'{{"index":{event.index},{begun}"function":{function}}}'
        return self._chunk(event.choice, f'"tool_calls":[{call}]')

    def end(self, reply: CallReply) -> bytes:
        """See `StreamWriter.end`."""
        if not self._call.include_usage:
            return DONE
        return self._head + b'],"usage":' + json_bytes(chat_usage(reply)) + b"}\n\n" + DONE

    def fail(self, error: CallError) -> bytes:
        """See `StreamWriter.fail`."""
        return b"data: " + json_bytes(openai_error(error)) + b"\n\n" + DONE

    def keep_alive(self) -> bytes:
        """See `StreamWriter.keep_alive`."""
        return b": keep-alive\n\n"

    def _chunk(
        self,
        choice: int,
        delta: str,
        *,
        finish: str = "",
        logprobs: Sequence[TokenLogprob] = (),
    ) -> bytes:
        told = "null"
        if logprobs:
            told = json_bytes(_shown_logprobs(logprobs, self._call)).decode()
        reason = f'"{finish}"' if finish else "null"
        text = (
            f'{{"index":{choice},"delta":{{{delta}}},"logprobs":{told},'
            f'"finish_reason":{reason}}}]{self._usage}}}\n\n'
        )
        return self._head + one_line(text).encode()


def _message(message: Any, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if type(message) is not dict:
        refuse(where, f"is {shown(message)}; must be an object")
    role = message.get("role")
    if type(role) is not str or role not in _ROLES:
        refuse(f"{where}.role", f"is {shown(role)}; must be one of {', '.join(_ROLES)}")
    message = _with_said_of_old(message)
    calls = message.get("tool_calls")
    if calls is not None and type(calls) is not list:
        refuse(f"{where}.tool_calls", f"is {shown(calls)}; must be a list")
    for number, call in enumerate(calls or ()):
        _check_call(call, f"{where}.tool_calls[{number}]")
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None and type(message[name]) is not str:
            refuse(f"{where}.{name}", f"is {shown(message[name])}; must be a string")
    try:
        plain = canonical({**message, "role": _ROLES[role]}, index)
    except ValueError as error:
        place, _, _ = str(error).partition(":")
        raise CallError(400, "invalid_value", str(error), param=place) from error
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if type(reasoning) is str:
            plain["reasoning"] = reasoning
    return plain


def _with_said_of_old(message: dict[str, Any]) -> dict[str, Any]:
    """With what stands in fields of its own: a refusal for content, one call before there were
    `tool_calls`."""
    refusal, call = message.get("refusal"), message.get("function_call")
    if type(refusal) is str and not message.get("content"):
        message = {**message, "content": refusal}
    if call is not None and not message.get("tool_calls"):
        message = {**message, "tool_calls": [{"function": call}]}
    return message


def _check_call(call: Any, where: str) -> None:
    function = call.get("function") if type(call) is dict else None
    if type(function) is not dict or type(function.get("name")) is not str:
        refuse(f"{where}.function.name", "is missing; must be a string")
    if type(function.get("arguments", "")) not in (str, dict, type(None)):
        refuse(f"{where}.function.arguments", "must be the JSON text of an object")
    if type(call.get("id", "")) not in (str, type(None)):
        refuse(f"{where}.id", "must be a string")


def _tool_choice(choice: Any) -> str:
    if choice is None:
        return "auto"
    if type(choice) is dict:
        allowed = choice.get("allowed_tools")
        if type(allowed) is dict:
            return "required" if allowed.get("mode") == "required" else "auto"
        function = choice.get("function")
        name = function.get("name") if type(function) is dict else choice.get("name")
        return name if type(name) is str and name else "auto"
    if choice not in ("auto", "none", "required"):
        refuse("tool_choice", f"is {shown(choice)}; must be auto, none, required or a function")
    return str(choice)


def _json_schema(wanted: Any) -> dict[str, Any]:
    """Fields of a `Call`."""
    if type(wanted) is not dict or wanted.get("type") in (None, "text"):
        return {}
    named = wanted.get("json_schema")
    return asked_schema(named if type(named) is dict else {}, "response_format")


def _shown_message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if choice.text or not choice.tool_calls else None,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:  # an empty list would ask agents for a round of tools
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in choice.tool_calls
        ]
    return message


def _shown_logprobs(logprobs: Sequence[TokenLogprob], call: Call) -> dict[str, Any]:
    return {"content": shown_logprobs(logprobs, top=call.top_logprobs), "refusal": None}
