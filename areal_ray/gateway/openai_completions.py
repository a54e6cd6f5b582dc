"""OpenAI's old Completions: one raw prompt, in no template; its reply is text alone.

Every call stands for itself in the record: a prompt that repeats an earlier reply is encoded anew.
"""

import codecs
from collections.abc import Mapping, Sequence
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
    TextDelta,
    TokenLogprob,
)
from areal_ray.gateway.exchange import json_bytes
from areal_ray.gateway.fields import (
    read_count,
    read_flag,
    read_seed,
    read_stop,
    read_text,
    read_top_logprobs,
    refuse,
    shown,
)
from areal_ray.gateway.messages import RAW
from areal_ray.gateway.openai_shapes import DONE, chat_usage, openai_error, shown_logprob
from areal_ray.gateway.sampling_fields import read_sampling

_FINISH = {
    StopReason.STOP: "stop",
    StopReason.TOOL_CALLS: "stop",
    StopReason.LENGTH: "length",
    StopReason.ABORT: "length",
}
_DEFAULT_TOKENS = 16
"""As the API has it where a call names no limit."""


class OpenAICompletions:
    """See `call.Dialect`."""

    name: str = "completions"
    paths: tuple[str, ...] = ("/completions",)

    def read(self, body: Mapping[str, Any], hints: CallHints) -> Call:
        """See `Dialect.read`."""
        prompt = body.get("prompt")
        if type(prompt) is list and len(prompt) == 1:
            prompt = prompt[0]
        if type(prompt) is not str or not prompt:
            refuse("prompt", f"is {shown(prompt)}; must be one text, not empty")
        for name in ("echo", "suffix"):
            if body.get(name):
                refuse(name, f"is {shown(body[name])}; is not served here. Leave it out")
        wanted = body.get("logprobs")
        if type(wanted) is bool:  # as some clients have it, who know the other API
            wanted = 1 if wanted else None
        options = body.get("stream_options")
        return Call(
            model=read_text(body, "model") or "policy",
            messages=[{"role": RAW, "content": prompt}],
            max_tokens=read_count(body, "max_tokens") or _DEFAULT_TOKENS,
            stop=read_stop(body),
            n=read_count(body, "n") or 1,
            seed=read_seed(body),
            **read_sampling(body),
            logprobs=wanted is not None,
            top_logprobs=read_top_logprobs({"logprobs": wanted}, "logprobs"),
            stream=read_flag(body, "stream", default=False),
            include_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
            hints=hints,
        )

    def write(self, call: Call, reply: CallReply) -> dict[str, Any]:
        """See `Dialect.write`."""
        choices = []
        for index, choice in enumerate(reply.choices):
            told = _logprobs(choice.logprobs, _Offsets(), call) if call.logprobs else None
            choices.append(_choice(index, choice.text, told, choice))
        return {**_head(reply), "choices": choices, "usage": chat_usage(reply)}

    def writer(self, call: Call) -> "CompletionWriter":
        """See `Dialect.writer`."""
        return CompletionWriter(call)

    def error(self, error: CallError) -> dict[str, Any]:
        """See `Dialect.error`."""
        return openai_error(error)


class CompletionWriter:
    """Writes `text_completion` events; see `call.StreamWriter`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._head: dict[str, Any] = {}
        self._offsets = [_Offsets() for _ in range(call.n)]
        """By choice."""

    def begin(self, opening: CallOpening) -> bytes:
        """See `StreamWriter.begin`."""
        self._head = _head(opening)
        return b""

    def write(self, event: CallEvent) -> bytes:
        """See `StreamWriter.write`."""
        if isinstance(event, ChoiceEnd):
            return self._chunk([_choice(event.choice, "", None, event.whole)])
        if not isinstance(event, TextDelta):
            return b""
        told = None
        if event.logprobs:
            told = _logprobs(event.logprobs, self._offsets[event.choice], self._call)
        return self._chunk([_choice(event.choice, event.text, told)])

    def end(self, reply: CallReply) -> bytes:
        """See `StreamWriter.end`."""
        last = self._chunk([], usage=chat_usage(reply)) if self._call.include_usage else b""
        return last + DONE

    def fail(self, error: CallError) -> bytes:
        """See `StreamWriter.fail`."""
        return b"data: " + json_bytes(openai_error(error)) + b"\n\n" + DONE

    def keep_alive(self) -> bytes:
        """See `StreamWriter.keep_alive`."""
        return b": keep-alive\n\n"

    def _chunk(self, choices: Sequence[Any], **more: Any) -> bytes:
        return b"data: " + json_bytes({**self._head, "choices": choices, **more}) + b"\n\n"


def _head(known: CallOpening | CallReply) -> dict[str, Any]:
    return {
        "id": f"cmpl-{known.id}",
        "object": "text_completion",
        "created": known.created_s,
        "model": known.model,
        "system_fingerprint": None,
    }


def _choice(index: int, text: str, logprobs: Any, whole: Choice | None = None) -> dict[str, Any]:
    reason = None if whole is None else _FINISH[whole.stop_reason]
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class _Offsets:
    """At which character of a reply each of its tokens begins; with half a character, in it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def next(self, token: TokenLogprob) -> int:
        """Of the token that follows."""
        begin = self._num_characters
        self._num_characters += len(self._decoder.decode(token.raw))
        return begin


def _logprobs(logprobs: Sequence[TokenLogprob], offsets: _Offsets, call: Call) -> dict[str, Any]:
    """By columns."""
    return {
        "tokens": [_name(token) for token in logprobs],
        "token_logprobs": [shown_logprob(token) for token in logprobs],
        "top_logprobs": [_top(token) for token in logprobs] if call.top_logprobs else None,
        "text_offset": [offsets.next(token) for token in logprobs],
    }


def _top(token: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens, the likeliest first, and the sampled one where it is none of them."""
    told: dict[str, float] = {}
    for one in token.top:
        told.setdefault(_name(one), shown_logprob(one))
    return {**told, _name(token): shown_logprob(token)}


def _name(token: TokenLogprob) -> str:
    """Its text; its bytes, as the API has it, where those are no whole characters."""
    try:
        return token.raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)
