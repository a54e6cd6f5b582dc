"""Structured output: what a call's reply has to be, as a grammar that the engines hold it to.

A schema is compiled here before anything is sampled, on a thread of its own, so that one that
cannot be kept is a 400 in the dialect's shape and stalls nobody.

constrained() waits for: the compilation; bounded by `core.grammars`, and by `_DEADLINE_S` where
many wait for it.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

from areal_ray.core.grammars import Grammars, Matcher
from areal_ray.gateway.call import Call, CallError
from areal_ray.gateway.grammar_text import GrammarText, object_schema
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.tool_grammars import CallableTool

Mode = Literal["auto", "on", "off"]

_DEADLINE_S = 20.0
_RETRY_S = 1.0


class StructuredOutput:
    """Makes and checks the grammars of calls.

    Args:
        template: Of the model that samples.
        reply_format: How it writes its replies.
        mode: auto: calls that do not train are constrained. on: all that ask for it. off: none.
        why_not: Why the engines cannot; empty if they can.
    """

    def __init__(
        self,
        template: ChatTemplate,
        reply_format: ReplyFormat,
        *,
        mode: Mode = "auto",
        why_not: str = "",
    ) -> None:
        self._template = template
        self._format = reply_format
        self._mode = mode
        self._why_not = why_not or template.why_no_grammars
        self._grammars = Grammars(template.tokenizer_json, 0, sorted(template.end_ids))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="structured-output")

    async def constrained(self, call: Call, *, is_trained: bool) -> Call:
        """The call with its grammar, if it asks for one that is kept here.

        Args:
            call: As a dialect read it.
            is_trained: Whether what is sampled may train.

        Raises:
            CallError: 400: a schema that cannot be kept, a tool that is not offered, or a promise
                that the engines cannot keep; 503: too many schemas wait to be compiled.
        """
        if self._mode == "off" or (self._mode == "auto" and is_trained):
            return call
        if call.is_raw or not _asks(call):
            return call
        if self._why_not:
            return self._unkept(call, self._why_not)
        grammar = self._grammar(call)
        if grammar:
            await self._check(call, grammar)
        return replace(call, grammar=grammar)

    def _unkept(self, call: Call, why: str) -> Call:
        """The call as it is, where it lives without what it asks for."""
        field = "tool_choice" if _needs_call(call) else call.schema_field
        if call.is_strict or _needs_call(call):
            told = f"{field}: cannot be kept: {why}"
            raise CallError(400, "unsupported_value", told, param=field)
        return call

    async def _check(self, call: Call, grammar: str) -> None:
        whole = f"start: reply\n{grammar}"
        found = self._grammars.begin(whole)
        if found is None:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    found = await loop.run_in_executor(self._thread, self._grammars.compile, whole)
            except TimeoutError:
                told = "many schemas are being compiled. Try again"
                raise CallError(503, "overloaded", told, retry_after_s=_RETRY_S) from None
        if not isinstance(found, Matcher):
            is_tools = call.json_schema is None or _needs_call(call)
            field = "tools" if is_tools else call.schema_field
            told = f"{field}: the schema cannot be kept: {found}"
            raise CallError(400, "invalid_json_schema", told, param=field)

    def _grammar(self, call: Call) -> str:
        """Empty where nothing is left to keep."""
        tools = _callable_tools(call)
        text = GrammarText(self._template.added_id)
        calls = self._format.tool_grammar
        if _needs_call(call):
            if calls is None:
                self._unkept(call, "the calls are read by a parser that writes no grammar")
                return ""
            start = calls.calls(text, tools, is_single=not call.parallel_tool_calls)
        elif call.json_schema is None:
            if calls is None:
                return ""
            start = calls.free(text, tools)
        elif tools and calls is None and self._format.reads_calls:
            self._unkept(call, "beside it, the calls are read by a parser that writes no grammar")
            return ""
        else:
            schema = call.json_schema or {"type": "object"}
            start = text.json(schema, is_lenient=not call.is_strict)
            if tools and calls is not None:
                start += f" | {calls.calls(text, tools, is_single=not call.parallel_tool_calls)}"
        return text.written(start)


def _asks(call: Call) -> bool:
    if call.json_schema is not None or _needs_call(call):
        return True
    names = {tool["function"]["name"] for tool in call.tools}
    return call.tool_choice != "none" and not names.isdisjoint(call.strict_tools)


def _needs_call(call: Call) -> bool:
    """Whether the reply has to be a call; without tools there is none to make."""
    return bool(call.tools) and call.tool_choice not in ("auto", "none")


def _callable_tools(call: Call) -> list[CallableTool]:
    """Those that may be called; all that are offered, or the one that is named."""
    if call.tool_choice == "none":
        return []
    offered = [tool["function"] for tool in call.tools]
    if call.tool_choice not in ("auto", "required"):
        offered = [one for one in offered if one["name"] == call.tool_choice]
        if not offered and call.tools:
            told = f"tool_choice: names {call.tool_choice!r}, which is not among tools"
            raise CallError(400, "invalid_value", told, param="tool_choice")
    return [_callable(one, call) for one in offered]


def _callable(function: Mapping[str, Any], call: Call) -> CallableTool:
    is_strict = function["name"] in call.strict_tools
    is_held = is_strict or _needs_call(call)
    schema = function.get("parameters") if is_held else None
    return CallableTool(function["name"], object_schema(schema), is_strict)
