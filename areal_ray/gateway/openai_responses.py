"""OpenAI's Responses: requests read leniently, replies written with every field and every event.

Reasoning is shown as its summary; `encrypted_content` holds the turn's handle, by which a turn that
comes back is known. What `text.format`, `tool_choice` and `strict` ask for is
`gateway.structured`'s to keep.
"""

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
    ChoiceEnd,
    TokenLogprob,
)
from areal_ray.gateway.exchange import json_bytes
from areal_ray.gateway.fields import (
    asked_schema,
    check_answers,
    read_count,
    read_flag,
    read_items,
    read_seed,
    read_stop,
    read_text,
    read_top_logprobs,
    refuse,
    strict_names,
)
from areal_ray.gateway.messages import canonical
from areal_ray.gateway.openai_shapes import openai_error, shown_logprobs
from areal_ray.gateway.responses_input import OfferedTools, item_id, read_input, read_offered
from areal_ray.gateway.sampling_fields import read_sampling

_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "previous_response_id"),
    *("prompt_cache_key", "reasoning", "safety_identifier", "text", "tool_choice", "tools"),
    *("truncation", "user"),
)
_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(_ECHOED),
    "metadata": {},
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
}
_PREFIXES = {BlockKind.REASONING: "rs", BlockKind.TEXT: "msg", BlockKind.CALL: "fc"}
_CUT_OFF = (StopReason.LENGTH, StopReason.ABORT)


class OpenAIResponses:
    """See `call.Dialect`."""

    name: str = "responses"
    paths: tuple[str, ...] = ("/responses",)
    count_paths: tuple[str, ...] = ("/responses/input_tokens",)

    def read(self, body: Mapping[str, Any], hints: CallHints) -> Call:
        """See `Dialect.read`."""
        tools = read_offered(body)
        instructions = read_text(body, "instructions")
        before = read_text(body, "previous_response_id")
        given, places = read_input(body, tools)
        if not given and not before:
            refuse("input", "is empty; must be a text or a list of at least one item")
        lead = [{"role": "system", "content": instructions}] if instructions else []
        places = [*["instructions"] * len(lead), *places]
        messages = _checked([*lead, *given], places)
        if not before:
            check_answers(messages, places)
        user = next((body[k] for k in ("prompt_cache_key", "user") if body.get(k)), "")
        included = body.get("include")
        wants = type(included) is list and "message.output_text.logprobs" in included
        echo = {**_DEFAULTS, **{name: body[name] for name in _ECHOED if body.get(name)}}
        is_stored = read_flag(body, "store", default=True)
        return Call(
            model=read_text(body, "model") or "policy",
            messages=messages,
            places=tuple(places),
            tools=tools.functions,
            tool_choice=_tool_choice(body.get("tool_choice"), tools),
            parallel_tool_calls=read_flag(body, "parallel_tool_calls", default=True),
            max_tokens=read_count(body, "max_output_tokens"),
            stop=read_stop(body),
            seed=read_seed(body),
            **read_sampling(body),
            logprobs=wants,
            top_logprobs=read_top_logprobs(body),
            **_json_schema(body.get("text")),
            strict_tools=strict_names(tool for _, tool in read_items(body, "tools")),
            stream=read_flag(body, "stream", default=False),
            hints=replace(
                hints,
                user=user if isinstance(user, str) else "",
                previous_response_id=before,
            ),
            is_stored=is_stored,
            num_instructions=len(lead),
            extra={"echo": {**echo, "store": is_stored}, "tools": tools},
        )

    def write(self, call: Call, reply: CallReply) -> dict[str, Any]:
        """See `Dialect.write`."""
        items = _Items(call, reply.id, reply.choices[0].handle)
        status = _status(reply)
        output = [items.item(block, "completed") for block in blocks_of(reply.choices[0])]
        if status == "incomplete":
            output[-1]["status"] = status
        return _response(call, _opening(reply), status, output, _usage(reply))

    def writer(self, call: Call) -> "ResponsesWriter":
        """See `Dialect.writer`."""
        return ResponsesWriter(call)

    def error(self, error: CallError) -> dict[str, Any]:
        """See `Dialect.error`."""
        return openai_error(error)

    def write_count(self, count: int) -> dict[str, Any]:
        """The body of an answer to a request to count."""
        return {"object": "response.input_tokens", "input_tokens": count}

    def stored_name(self, reply: CallReply) -> str:
        """What later calls name a reply by."""
        return f"resp_{reply.id}"


class ResponsesWriter:
    """Writes the ladder of `response.*` events; see `call.StreamWriter`."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._blocks = BlockReader()
        self._num_events = 0
        self._opening: CallOpening | None = None
        self._items = _Items(call, "", "")
        self._done: list[dict[str, Any]] = []
        self._num_told_logprobs = 0

    def begin(self, opening: CallOpening) -> bytes:
        """See `StreamWriter.begin`."""
        self._opening = opening
        self._items = _Items(self._call, opening.id, opening.handle)
        begun = _response(self._call, opening, "in_progress", [])
        return self._event("created", response=begun) + self._event("in_progress", response=begun)

    def write(self, event: CallEvent) -> bytes:
        """See `StreamWriter.write`."""
        is_cut = isinstance(event, ChoiceEnd) and event.whole.stop_reason in _CUT_OFF
        has_only_reasoned = not self._blocks.has_said
        written = b""
        for step, block, text in self._blocks.read(event):
            place = {"item_id": self._items.id(block), "output_index": block.index}
            if step is Step.OPEN:
                empty = self._items.item(block, "in_progress")
                written += self._event("output_item.added", output_index=block.index, item=empty)
            if block.kind is BlockKind.REASONING:
                written += self._reasoning(step, block, text, {**place, "summary_index": 0})
            elif block.kind is BlockKind.TEXT:
                written += self._text(step, block, text, {**place, "content_index": 0})
            else:
                written += self._arguments(step, block, text, place)
            if step is Step.CLOSE:
                # What was only reasoned is whole: the text that was to follow is what is cut.
                is_whole = has_only_reasoned and block.kind is BlockKind.REASONING
                is_part = (is_cut and not is_whole) or block.is_unfinished
                whole = self._items.item(block, "incomplete" if is_part else "completed")
                if not block.is_unfinished:  # the whole says what it says where nothing is streamed
                    self._done.append(whole)
                written += self._event("output_item.done", output_index=block.index, item=whole)
        return written

    def end(self, reply: CallReply) -> bytes:
        """See `StreamWriter.end`."""
        status = _status(reply)
        whole = _response(self._call, _opening(reply), status, self._done, _usage(reply))
        return self._event(status, response=whole)

    def fail(self, error: CallError) -> bytes:
        """See `StreamWriter.fail`."""
        code = "server_error" if error.status >= 500 else error.code
        told: dict[str, Any] = {"code": code, "message": error.message}
        if self._opening is None:
            return self._event("error", is_bare=True, param=error.param or None, **told)
        failed = _response(self._call, self._opening, "failed", self._done)
        return self._event("failed", response={**failed, "error": told})

    def keep_alive(self) -> bytes:
        """See `StreamWriter.keep_alive`; an event, since some clients do not count comments."""
        if self._opening is None:  # the SDK's helper takes no event before `response.created`
            return b": keep-alive\n\n"
        now = _response(self._call, self._opening, "in_progress", [])
        return self._event("in_progress", response=now)

    def _reasoning(self, step: Step, block: Block, text: str, place: Mapping[str, Any]) -> bytes:
        part = {"type": "summary_text", "text": block.text}
        if step is Step.OPEN:
            return self._event("reasoning_summary_part.added", **place, part=part)
        if step is Step.MORE:
            return self._event("reasoning_summary_text.delta", **place, delta=text)
        told = self._event("reasoning_summary_text.done", **place, text=block.text)
        return told + self._event("reasoning_summary_part.done", **place, part=part)

    def _text(self, step: Step, block: Block, text: str, place: Mapping[str, Any]) -> bytes:
        if step is Step.OPEN:
            self._num_told_logprobs = 0
            part = self._items.text_part(block)
            return self._event("content_part.added", **place, part=part)
        if step is Step.MORE:
            more = self._items.logprobs(block.logprobs[self._num_told_logprobs :])
            self._num_told_logprobs = len(block.logprobs)
            return self._event("output_text.delta", **place, delta=text, logprobs=more)
        part = self._items.text_part(block)
        logprobs = part["logprobs"]
        told = self._event("output_text.done", **place, text=block.text, logprobs=logprobs)
        return told + self._event("content_part.done", **place, part=part)

    def _arguments(self, step: Step, block: Block, text: str, place: Mapping[str, Any]) -> bytes:
        if step is Step.OPEN or block.is_unfinished:
            return b""
        if step is Step.MORE:
            return self._event("function_call_arguments.delta", **place, delta=text)
        name = self._items.origin(block)[1]
        told: dict[str, Any] = {**place, "arguments": block.text, "name": name}
        return self._event("function_call_arguments.done", **told)

    def _event(self, kind: str, *, is_bare: bool = False, **fields: Any) -> bytes:
        kind = kind if is_bare else f"response.{kind}"
        numbered = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + json_bytes(numbered) + b"\n\n"


class _Items:
    """Blocks of one reply as the items that its client is shown."""

    def __init__(self, call: Call, reply_id: str, handle: str) -> None:
        self._call = call
        self._reply_id = reply_id
        self._handle = handle

    def id(self, block: Block) -> str:
        return item_id(_PREFIXES[block.kind], self._reply_id, block.index)

    def item(self, block: Block, status: str) -> dict[str, Any]:
        """As it stands; `in_progress` without its content."""
        has_content = status != "in_progress"
        if block.kind is BlockKind.REASONING:
            summary = [{"type": "summary_text", "text": block.text}] if has_content else []
            kept = {"summary": summary, "encrypted_content": self._handle or None}
            return {"id": self.id(block), "type": "reasoning", **kept, "status": status}
        if block.kind is BlockKind.TEXT:
            content = [self.text_part(block)] if has_content else []
            head = {"id": self.id(block), "type": "message", "role": "assistant"}
            return {**head, "status": status, "content": content}
        namespace, name = self.origin(block)
        call = {
            "id": self.id(block),
            "type": "function_call",
            "call_id": block.id,
            "name": name,
            "arguments": block.text,
            "status": status,
        }
        return {**call, "namespace": namespace} if namespace else call

    def origin(self, block: Block) -> tuple[str, str]:
        """Namespace, if any, and name of a call as the client offered it."""
        tools: OfferedTools = self._call.extra["tools"]
        return tools.origins.get(block.name, ("", block.name))

    def text_part(self, block: Block) -> dict[str, Any]:
        logprobs = self.logprobs(block.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": logprobs}

    def logprobs(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return shown_logprobs(logprobs, top=self._call.top_logprobs)


def _checked(messages: Sequence[dict[str, Any]], places: Sequence[str]) -> list[dict[str, Any]]:
    plain = []
    for place, message in zip(places, messages, strict=True):
        try:
            kept = canonical(message)
        except ValueError as error:
            told = f"{place}{str(error).removeprefix('messages[0]')}"
            raise CallError(400, "invalid_value", told, param=place) from error
        for name in ("reasoning", "handle"):
            if message.get(name):
                kept[name] = message[name]
        plain.append(kept)
    return plain


def _tool_choice(choice: Any, tools: OfferedTools) -> str:
    if type(choice) is dict and choice.get("type") == "function":
        name = choice.get("name")
        return tools.shown_name(choice.get("namespace"), name) if type(name) is str else "auto"
    if type(choice) is dict and choice.get("mode") in ("auto", "required"):
        return str(choice["mode"])
    return choice if choice in ("none", "required") else "auto"


def _json_schema(text: Any) -> dict[str, Any]:
    """Fields of a `Call`."""
    wanted = text.get("format") if type(text) is dict else None
    if type(wanted) is not dict or wanted.get("type") in (None, "text"):
        return {}
    return asked_schema(wanted, "text.format")


def _status(reply: CallReply) -> str:
    return "incomplete" if reply.choices[0].stop_reason in _CUT_OFF else "completed"


def _opening(reply: CallReply) -> CallOpening:
    return CallOpening(reply.id, reply.created_s, reply.model, reply.num_prompt_tokens)


def _response(
    call: Call,
    opening: CallOpening,
    status: str,
    output: Sequence[Mapping[str, Any]],
    usage: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    is_cut = status == "incomplete"
    return {
        "id": f"resp_{opening.id}",
        "object": "response",
        "created_at": opening.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": opening.model,
        "output": list(output),
        "parallel_tool_calls": call.parallel_tool_calls,
        "service_tier": "default",
        "temperature": 1.0 if call.temperature is None else call.temperature,
        "top_logprobs": call.top_logprobs,
        "top_p": 1.0 if call.top_p is None else call.top_p,
        "usage": usage,
        **call.extra["echo"],
    }


def _usage(reply: CallReply) -> dict[str, Any]:
    choice = reply.choices[0]
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": reply.num_cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": choice.num_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.num_reasoning_tokens},
        "total_tokens": reply.num_prompt_tokens + choice.num_tokens,
    }
