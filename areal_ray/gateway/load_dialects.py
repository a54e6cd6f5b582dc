"""The dialects as a client writes and reads them, by as little as load needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

DialectName = Literal["chat", "responses", "messages"]


@dataclass(frozen=True, slots=True)
class Heard:
    """What one event of a stream, or one whole answer, says."""

    is_piece: bool = False
    """Something of the reply that was not there before."""
    num_tokens: int | None = None
    """Of the whole reply, where it is told."""
    is_end: bool = False


@dataclass(frozen=True, slots=True)
class ClientDialect:
    """One dialect, seen from the client."""

    path: str
    body: Callable[..., dict[str, Any]]
    """(model, prompt, max_tokens, stream=) -> a request."""
    heard: Callable[[Mapping[str, Any]], Heard]
    """Reads an event or an answer; of another dialect: LookupError, TypeError, AttributeError."""
    headers: Mapping[str, str]


def told_error(content: Mapping[str, Any]) -> str:
    """The kind of an error that an event tells, in any dialect; empty if it tells none."""
    response = content.get("response")
    error = content.get("error") or (response.get("error") if type(response) is dict else None)
    if not error and content.get("type") != "error":
        return ""
    error = error if type(error) is dict else content
    return str(error.get("code") or error.get("type") or "error")


def told_message(content: Any) -> str:
    """What the body of a refusal says, in any dialect; empty if it is none."""
    error = content.get("error") if type(content) is dict else None
    said = error.get("message") if type(error) is dict else error
    return said if type(said) is str else ""


def _chat_body(model: str, prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    body = _messages_body(model, prompt, max_tokens, stream=stream)
    return {**body, "stream_options": {"include_usage": True}} if stream else body


def _chat_heard(content: Mapping[str, Any]) -> Heard:
    usage = content.get("usage") or {}
    choices = content["choices"]
    delta = choices[0].get("delta", {}) if choices else {}
    is_piece = any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
    return Heard(is_piece, usage.get("completion_tokens"))


def _responses_body(model: str, prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    body = {"model": model, "input": prompt, "max_output_tokens": max_tokens}
    return {**body, "stream": stream, "store": False}


def _responses_heard(content: Mapping[str, Any]) -> Heard:
    if content.get("object") == "response":
        return Heard(num_tokens=content["usage"]["output_tokens"])
    kind = content["type"]
    if kind in ("response.completed", "response.incomplete"):
        usage = content["response"].get("usage") or {}
        return Heard(num_tokens=usage.get("output_tokens"), is_end=True)
    return Heard(kind.endswith(".delta") and bool(content.get("delta")))


def _messages_body(model: str, prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    return {**body, "max_tokens": max_tokens, "stream": stream}


def _messages_heard(content: Mapping[str, Any]) -> Heard:
    kind = content["type"]
    usage = content.get("usage") or {}
    if kind in ("message", "message_delta"):
        return Heard(num_tokens=usage.get("output_tokens"))
    return Heard(kind == "content_block_delta", is_end=kind == "message_stop")


DIALECTS: Mapping[DialectName, ClientDialect] = {
    "chat": ClientDialect("/chat/completions", _chat_body, _chat_heard, {}),
    "responses": ClientDialect("/responses", _responses_body, _responses_heard, {}),
    "messages": ClientDialect(
        "/messages", _messages_body, _messages_heard, {"anthropic-version": "2023-06-01"}
    ),
}
