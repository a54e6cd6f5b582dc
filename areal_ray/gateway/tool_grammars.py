"""What tool calls are held to, in each format that `tool_formats` reads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal_ray.gateway.grammar_text import GrammarText, escaped, nested
from areal_ray.gateway.pieces import ToolFormat
from areal_ray.gateway.tool_formats import (
    HermesFormat,
    Llama3Format,
    MistralFormat,
    Qwen3CoderFormat,
    kinds_of,
)


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that a grammar lets the model call."""

    name: str
    schema: dict[str, Any]
    """Of its arguments."""
    is_strict: bool
    """Whether the schema has to be kept to the letter, or refused."""


class ToolGrammar(Protocol):
    """Writes a format's calls as rules. Stateless."""

    def calls(self, text: GrammarText, tools: Sequence[CallableTool], *, is_single: bool) -> str:
        """Add rules for a turn of one call, or of at least one; what they are in a rule."""

    def free(self, text: GrammarText, tools: Sequence[CallableTool]) -> str:
        """Add rules for a turn that says what it likes and may call; what they are in a rule."""


def tool_grammar(tool_format: ToolFormat | None) -> ToolGrammar | None:
    """Of a format; None of those whose parsers are not ours."""
    return _GRAMMARS.get(type(tool_format))


class _Marked:
    """Of formats in which a mark opens each call."""

    opener = "<tool_call>"
    between = '"\\n"?'

    def calls(self, text: GrammarText, tools: Sequence[CallableTool], *, is_single: bool) -> str:
        """See `ToolGrammar`."""
        call = text.rule(f"{text.mark(self.opener)} {self.rest(text, tools)}")
        return call if is_single else f"{call} ({self.between} {call})*"

    def free(self, text: GrammarText, tools: Sequence[CallableTool]) -> str:
        """See `ToolGrammar`."""
        rest = self.rest(text, tools)
        return f"({text.up_to(self.opener)} {rest})* {text.any_text()}?"

    def rest(self, text: GrammarText, tools: Sequence[CallableTool]) -> str:
        """Add rules for what follows the mark."""
        raise NotImplementedError


class HermesGrammar(_Marked):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    def rest(self, text: GrammarText, tools: Sequence[CallableTool]) -> str:
        """See `_Marked`."""
        body = _one_of(_json_call(text, tool, "arguments") for tool in tools)
        return f'"\\n"? {body} "\\n"? {text.mark("</tool_call>")}'


class Qwen3CoderGrammar(_Marked):
    """`<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`.

    Parameters come in the order of the schema. Texts are written as they are, so of their schemas
    `enum` and `const` alone are kept.
    """

    def rest(self, text: GrammarText, tools: Sequence[CallableTool]) -> str:
        """See `_Marked`."""
        functions = _one_of(self._function(text, tool) for tool in tools)
        return f'"\\n" {functions} "\\n" {text.mark("</tool_call>")}'

    def _function(self, text: GrammarText, tool: CallableTool) -> str:
        properties = tool.schema.get("properties")
        required = tool.schema.get("required")
        parts = [json.dumps(f"<function={tool.name}>\n")]
        for name, schema in (properties if isinstance(properties, Mapping) else {}).items():
            parameter = self._parameter(text, tool, name, schema)
            is_needed = isinstance(required, list) and name in required
            parts.append(parameter if is_needed else f"{parameter}?")
        return text.rule(" ".join([*parts, json.dumps("</function>")]))

    def _parameter(self, text: GrammarText, tool: CallableTool, name: str, schema: Any) -> str:
        opened, closed = json.dumps(f"<parameter={name}>\n"), "\n</parameter>\n"
        choices = _texts(schema)
        if choices:
            return text.rule(f"{opened} {_one_of(map(json.dumps, choices))} {json.dumps(closed)}")
        if _is_text(schema):
            value = text.rule(f"/(?s:.*){escaped(closed)}/", "lazy")
            return text.rule(f"{opened} {value}")
        definitions = [key for key in ("$defs", "definitions") if key in tool.schema]
        shared: dict[str, Any] = {key: tool.schema[key] for key in definitions}
        value = text.json({**shared, **schema}, is_lenient=not tool.is_strict)
        return text.rule(f"{opened} {value} {json.dumps(closed)}")


class MistralGrammar(_Marked):
    """`[TOOL_CALLS]name[ARGS]{...}` where `[ARGS]` is a token, else a list of JSON calls."""

    opener = "[TOOL_CALLS]"
    between = ""

    def calls(self, text: GrammarText, tools: Sequence[CallableTool], *, is_single: bool) -> str:
        """See `ToolGrammar`."""
        if text.has_token("[ARGS]"):
            return super().calls(text, tools, is_single=is_single)
        return f"{text.mark(self.opener)} {self._listed(text, tools, is_single=is_single)}"

    def free(self, text: GrammarText, tools: Sequence[CallableTool]) -> str:
        """See `ToolGrammar`; nothing follows the calls."""
        rest = self.rest(text, tools)
        again = f"({text.mark(self.opener)} {rest})*" if text.has_token("[ARGS]") else ""
        return f"{text.up_to(self.opener)} {rest} {again} | {text.any_text()}?"

    def rest(self, text: GrammarText, tools: Sequence[CallableTool]) -> str:
        """See `_Marked`."""
        if not text.has_token("[ARGS]"):
            return self._listed(text, tools, is_single=False)
        marked = (
            f"{json.dumps(tool.name)} {text.mark('[ARGS]')} "
            f"{text.json(tool.schema, is_lenient=not tool.is_strict)}"
            for tool in tools
        )
        return _one_of(marked)

    def _listed(self, text: GrammarText, tools: Sequence[CallableTool], *, is_single: bool) -> str:
        call = _one_of(_json_call(text, tool, "arguments") for tool in tools)
        return f'"[" {call} "]"' if is_single else f'"[" {call} (/, ?/ {call})* "]"'


class Llama3Grammar:
    """`{"name": ..., "parameters": {...}}` as the whole turn, several joined by `;`."""

    def calls(self, text: GrammarText, tools: Sequence[CallableTool], *, is_single: bool) -> str:
        """See `ToolGrammar`."""
        call = _one_of(_json_call(text, tool, "parameters") for tool in tools)
        return call if is_single else f"{call} (/; ?/ {call})*"

    def free(self, text: GrammarText, tools: Sequence[CallableTool]) -> str:
        """See `ToolGrammar`; a turn that begins as a call does is one."""
        said = text.rule(r"/[^{\s](?s:.*)/", is_terminal=True)
        return f"{self.calls(text, tools, is_single=False)} | {said}?"


_GRAMMARS: Mapping[type, ToolGrammar] = {
    HermesFormat: HermesGrammar(),
    Qwen3CoderFormat: Qwen3CoderGrammar(),
    MistralFormat: MistralGrammar(),
    Llama3Format: Llama3Grammar(),
}


def _json_call(text: GrammarText, tool: CallableTool, key: str) -> str:
    arguments = nested(tool.schema, "#/$defs/arguments")
    call = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: {"$ref": "#/$defs/arguments"}},
        "required": ["name", key],
        "additionalProperties": False,
        "$defs": {"arguments": arguments},
    }
    return text.json(call, is_lenient=not tool.is_strict)


def _one_of(options: Any) -> str:
    listed = list(options)
    return listed[0] if len(listed) == 1 else f"({' | '.join(listed)})"


def _texts(schema: Any) -> list[str]:
    """The texts that a schema allows, where it names them."""
    if not isinstance(schema, Mapping):
        return []
    named = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
    return [text for text in named if isinstance(text, str)] if _is_text(schema) else []


def _is_text(schema: Any) -> bool:
    """Whether the format's parser reads a value of this schema as text."""
    kinds = kinds_of(schema)
    return not kinds or "string" in kinds
