"""How families of models write tool calls; each satisfies `pieces.ToolFormat`.

What is not written as its family writes it is no call: it stays text.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from areal_ray.gateway.json_text import Unfinished, after_blank, object_at, open_field, value_at
from areal_ray.gateway.pieces import BegunCall, Block, FoundCall, ToolFormat, Tools

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesFormat:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen, Hermes."""

    markers = (_OPEN, _CLOSE)
    _keys = ("arguments", "parameters")
    """Models that are shown tools with parameters call those so, too: they are not to be lost."""

    def begins(self, text: str, *, is_start: bool) -> int:
        """See `ToolFormat`."""
        return first_of(text, (_OPEN,))

    def begun(self, text: str, tools: Tools) -> BegunCall | None:
        """See `ToolFormat`."""
        return _begun(text, len(_OPEN), self._keys) if text.startswith(_OPEN) else None

    def read(self, text: str, tools: Tools, *, is_whole: bool) -> Block | None:
        """See `ToolFormat`."""
        unread = Block(min(len(_OPEN), len(text)))
        end = _closing(text)
        if end < 0:
            return unread if is_whole else None
        try:
            fields, at = object_at(text[:end], len(_OPEN))
            if text[at:end].strip():
                return unread
            return Block(end + len(_CLOSE), (_call(fields, self._keys),))
        except ValueError:
            return unread


class Qwen3CoderFormat:
    """`<tool_call><function=add><parameter=a>1</parameter></function></tool_call>`.

    Values are read as the tool's schema types them.
    """

    markers = (_OPEN, _CLOSE)
    _begin = "<function="
    _end = re.compile(rf"</function>\s*({_CLOSE})")
    """A closing that stands elsewhere is part of a value."""
    _function = re.compile(r"\s*<function=([^<>\s]+)>(.*)</function>\s*", re.DOTALL)
    _parameter = re.compile(r"\s*<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

    def begins(self, text: str, *, is_start: bool) -> int:
        """See `ToolFormat`."""
        return first_of(text, (_OPEN,))

    def begun(self, text: str, tools: Tools) -> BegunCall | None:
        """None: its JSON is ours, and of what type a value is shows at its end alone."""
        return None

    def read(self, text: str, tools: Tools, *, is_whole: bool) -> Block | None:
        """See `ToolFormat`."""
        unread = Block(min(len(_OPEN), len(text)))
        if text.startswith(_OPEN):
            begun = text[len(_OPEN) :].lstrip()[: len(self._begin)]
            if not self._begin.startswith(begun):
                return unread
        closing = self._end.search(text, min(len(_OPEN), len(text)))
        if closing is None:
            return unread if is_whole else None
        call = self._read_call(text[len(_OPEN) : closing.start(1)], tools)
        return unread if call is None else Block(closing.end(), (call,))

    def _read_call(self, body: str, tools: Tools) -> FoundCall | None:
        found = self._function.fullmatch(body)
        if found is None:
            return None
        name, inside = found[1], found[2]
        schemas = _parameter_schemas(tools, name)
        arguments, at = {}, 0
        while at < len(inside.rstrip()):
            parameter = self._parameter.match(inside, at)
            if parameter is None:
                return None
            arguments[parameter[1]] = _typed(parameter[2], schemas.get(parameter[1]))
            at = parameter.end()
        return FoundCall(name, json.dumps(arguments, ensure_ascii=False))


class Llama3Format:
    """`{"name": ..., "parameters": {...}}` as the whole turn, several joined by `;`.

    `<|python_tag|>` may stand before it; without that, only an offered tool is called.
    """

    _tag = "<|python_tag|>"
    markers = (_tag,)

    def begins(self, text: str, *, is_start: bool) -> int:
        """See `ToolFormat`."""
        tagged = first_of(text, (self._tag,))
        bare = text.lstrip()
        if is_start and bare.startswith("{"):
            return min(tagged, len(text) - len(bare))
        return tagged

    def begun(self, text: str, tools: Tools) -> BegunCall | None:
        """See `ToolFormat`."""
        has_tag = text.startswith(self._tag)
        found = _begun(text, len(self._tag) * has_tag, ("parameters", "arguments"))
        is_offered = found is not None and found.name in map(_name_of, tools)
        return found if has_tag or is_offered else None

    def read(self, text: str, tools: Tools, *, is_whole: bool) -> Block | None:
        """See `ToolFormat`."""
        has_tag = not text.startswith("{")
        if not has_tag and re.match(r'\{\s*("|\Z)', text) is None:
            return Block(1)
        if not is_whole:
            return None
        offered = {_name_of(tool) for tool in tools}
        try:
            calls = tuple(self._read_calls(text.removeprefix(self._tag)))
        except ValueError:
            calls = ()
        if calls and (has_tag or all(call.name in offered for call in calls)):
            return Block(len(text), calls)
        return Block(min(len(self._tag), len(text)) if has_tag else 1)

    def _read_calls(self, text: str) -> Iterator[FoundCall]:
        at = after_blank(text, 0)
        while at < len(text):
            fields, at = object_at(text, at)
            yield _call(fields, ("parameters", "arguments"))
            at = after_blank(text, at)
            if text[at : at + 1] == ";":
                at = after_blank(text, at + 1)


class MistralFormat:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name{...}` each."""

    _open = "[TOOL_CALLS]"
    markers = (_open, "[ARGS]", "[CALL_ID]")
    _named = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
    _list = re.compile(r"\s*\[")

    def begins(self, text: str, *, is_start: bool) -> int:
        """See `ToolFormat`."""
        return first_of(text, (self._open,))

    def begun(self, text: str, tools: Tools) -> BegunCall | None:
        """See `ToolFormat`."""
        if not text.startswith(self._open):
            return None
        if listed := self._list.match(text, len(self._open)):
            return _begun(text, listed.end(), ("arguments",))
        named = self._named.match(text, len(self._open))
        return BegunCall(named[1], named.end()) if named else None

    def read(self, text: str, tools: Tools, *, is_whole: bool) -> Block | None:
        """See `ToolFormat`."""
        if not is_whole:
            return None
        unread = Block(min(len(self._open), len(text)))
        if not text.startswith(self._open):
            return unread
        body = text[len(self._open) :].strip()
        try:
            listed = self._listed(body) if body.startswith("[") else self._one_by_one(body)
            calls = tuple(listed)
        except ValueError:
            return unread
        return Block(len(text), calls) if calls else unread

    def _listed(self, body: str) -> Iterator[FoundCall]:
        at = 0
        while body[at : at + 1] == ("," if at else "["):
            fields, at = object_at(body, at + 1)
            yield _call(fields, ("arguments",))
            at = after_blank(body, at)
        if body[at:] != "]":
            raise ValueError("the list of calls does not end")

    def _one_by_one(self, body: str) -> Iterator[FoundCall]:
        at = 0
        while at < len(body):
            named = self._named.match(body, at)
            if named is None:
                raise ValueError("no name and arguments")
            _, end = object_at(body, named.end())
            yield FoundCall(named[1], body[named.end() : end])
            at = after_blank(body, end)
            if at < len(body) and not body.startswith(self._open, at):
                raise ValueError("text behind a call")
            at += len(self._open)


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": HermesFormat(),
    "qwen3_coder": Qwen3CoderFormat(),
    "llama3": Llama3Format(),
    "mistral": MistralFormat(),
}


def guess_tool_format(template: str) -> str:
    """Name of the format that a chat template's source shows; hermes where it shows none."""
    signs = {
        "[TOOL_CALLS]": "mistral",
        "<function=": "qwen3_coder",
        _OPEN: "hermes",
        "<|python_tag|>": "llama3",
        "Environment: ipython": "llama3",
    }
    return next((name for sign, name in signs.items() if sign in template), "hermes")


def first_of(text: str, openers: Iterable[str]) -> int:
    """Where the first opener, or a beginning of one at the end, stands; the length if nowhere."""
    places = [len(text)]
    for opener in openers:
        place = text.find(opener)
        places.append(place if place >= 0 else len(text) - len_held(text, opener))
    return min(places)


def len_held(text: str, opener: str) -> int:
    """Characters at the end of `text` that begin `opener`, short of all of it."""
    longest = min(len(text), len(opener) - 1)
    return next((n for n in range(longest, 0, -1) if opener.startswith(text[-n:])), 0)


def _closing(text: str) -> int:
    """Where the first `</tool_call>` stands that is in no string of the object that follows
    `<tool_call>` at the beginning of a text; -1 if there is none yet.

    Those behind it are in none either. Models that repeat themselves write thousands inside a
    string that they never close: these are not tried one by one, with each token that comes.
    """
    first = text.find(_CLOSE, len(_OPEN))
    if first < 0 or not _is_unfinished(text[:first]):
        return first
    ends, at = [first], text.find(_CLOSE, first + 1)
    while at >= 0:
        ends.append(at)
        at = text.find(_CLOSE, at + 1)
    found = bisect_left(ends, True, key=lambda end: not _is_unfinished(text[:end]))
    return ends[found] if found < len(ends) else -1


def _is_unfinished(text: str) -> bool:
    """Whether a text that begins with `<tool_call>` ends inside a string of its object."""
    try:
        object_at(text, len(_OPEN))
    except Unfinished:
        return True
    except ValueError:
        return False
    return False


def _call(fields: Mapping[str, tuple[Any, str]], keys: tuple[str, ...]) -> FoundCall:
    name, _ = fields.get("name", ("", ""))
    arguments, text = next((fields[key] for key in keys if key in fields), ({}, "{}"))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("no name, or arguments that are no object")
    return FoundCall(name, text)


def _begun(text: str, start: int, keys: tuple[str, ...]) -> BegunCall | None:
    """A call as an object from `start` on, whose arguments stand under one of the keys, once they
    begin; None also where they stand before the name."""
    found = open_field(text[start:], keys)
    name = "" if found is None else found[0].get("name")
    return BegunCall(name, start + found[1]) if found and name and isinstance(name, str) else None


def _name_of(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _parameter_schemas(tools: Tools, name: str) -> Mapping[str, Any]:
    """JSON schemas of a tool's parameters; none where the client gave none."""
    for tool in tools:
        if _name_of(tool) == name:
            parameters = tool["function"].get("parameters")
            schemas = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return schemas if isinstance(schemas, Mapping) else {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    """A value as its schema types it; text where it is of another type after all."""
    kinds = kinds_of(schema)
    if not kinds or "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    spelled = text.strip()
    if spelled in ("True", "False", "None"):
        spelled = {"True": "true", "False": "false", "None": "null"}[spelled]
    try:
        value, end = value_at(spelled, 0)
    except ValueError:
        return text
    return value if end == len(spelled) else text


def kinds_of(schema: Any) -> set[str]:
    """JSON types that a schema names; none where it names none."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set()
    if isinstance(named, list):
        kinds |= {kind for kind in named if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        choices = schema.get(key)
        for choice in choices if isinstance(choices, list) else []:
            kinds |= kinds_of(choice)
    return kinds
