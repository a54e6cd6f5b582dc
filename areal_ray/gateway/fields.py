"""Fields of a request body, read alike by every dialect: null is absent, a wrong type is a 400."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from areal_ray.gateway.call import CallError
from areal_ray.gateway.messages import CallIds

_MAX_STOP = 16
_SAID = ("text", "refusal")
_MAX_TOP_LOGPROBS = 20
_MEDIA = ("image", "image_url", "input_image", "input_file", "input_audio", "document", "file")


def read_text(body: Mapping[str, Any], name: str, where: str = "") -> str:
    """A text of a body, or of an object that stands at `where` in it; empty if it is not there."""
    text = body.get(name)
    if text is not None and type(text) is not str:
        refuse(f"{where}{name}", f"is {shown(text)}; must be a string")
    return text or ""


def read_flag(body: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """A truth value of a body."""
    flag = body.get(name)
    if flag is not None and type(flag) is not bool:
        refuse(name, f"is {shown(flag)}; must be true or false")
    return default if flag is None else flag


def read_count(body: Mapping[str, Any], name: str) -> int | None:
    """A count of at least 1 of a body; None if it is not there."""
    count = body.get(name)
    if count is None:
        return None
    if type(count) is float and count.is_integer():
        count = int(count)
    if type(count) is not int or count < 1:
        refuse(name, f"is {shown(count)}; must be a whole number >= 1")
    return count


def read_top_logprobs(body: Mapping[str, Any], name: str = "top_logprobs") -> int:
    """How many of the likeliest tokens a body asks for at each place; 0 if it does not say."""
    count = body.get(name)
    if type(count) is float and count.is_integer():
        count = int(count)
    if count is not None and (type(count) is not int or not 0 <= count <= _MAX_TOP_LOGPROBS):
        refuse(name, f"is {shown(count)}; must be a whole number from 0 to {_MAX_TOP_LOGPROBS}")
    return count or 0


def read_number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    """A number of a body; None if it is not there."""
    number = body.get(name)
    if number is None:
        return None
    if type(number) not in (int, float) or not least <= number <= most:
        refuse(name, f"is {shown(number)}; must be a number from {least:g} to {most:g}")
    return float(number)


def read_stop(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """Stop strings of a body: a string, a list of them, or none."""
    stop = body.get(name)
    listed = [stop] if type(stop) is str else ([] if stop is None else stop)
    is_list = type(listed) is list and len(listed) <= _MAX_STOP
    if not is_list or not all(type(text) is str and text for text in listed):
        refuse(name, f"is {shown(stop)}; must be at most {_MAX_STOP} texts, none empty")
    return tuple(listed)


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions among the tools of a body, with the fields that prompts show alone."""
    return [
        read_function(tool.get("function"), f"{where}.function")
        for where, tool in read_items(body, "tools")
        if tool.get("type", "function") == "function"
    ]


def strict_names(functions: Iterable[Any]) -> frozenset[str]:
    """Of functions, as a body has them, those whose calls have to fit their schemas."""
    named = (one for one in functions if type(one) is dict and one.get("strict") is True)
    return frozenset(one["name"] for one in named if type(one.get("name")) is str)


def asked_schema(wanted: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Fields of a `Call` whose reply has to be JSON.

    Args:
        wanted: Its `schema` and whether it is `strict`; any object where there is no schema.
        field: Of the body.
    """
    schema = wanted.get("schema")
    return {
        "json_schema": schema if type(schema) is dict else {},
        "is_strict": wanted.get("strict") is True,
        "schema_field": field,
    }


def read_items(body: Mapping[str, Any], name: str) -> list[tuple[str, dict[str, Any]]]:
    """The objects in a list of a body, each with its path; none if the list is not there."""
    items = body.get(name)
    if items is None:
        return []
    if type(items) is not list:
        refuse(name, f"is {shown(items)}; must be a list")
    found = [(f"{name}[{index}]", item) for index, item in enumerate(items)]
    for where, item in found:
        if type(item) is not dict:
            refuse(where, f"is {shown(item)}; must be an object")
    return found


def read_function(function: Any, where: str, schema: str = "parameters") -> dict[str, Any]:
    """A tool in the form of `Call.tools`.

    Args:
        function: Its name, description and schema.
        where: Its path in the body.
        schema: The dialect's name for the schema.
    """
    if type(function) is not dict or type(function.get("name")) is not str:
        refuse(f"{where}.name", "is missing; must be a string")
    for name, kind in (("description", str), (schema, dict)):
        if function.get(name) is not None and type(function[name]) is not kind:
            refuse(f"{where}.{name}", f"must be a {kind.__name__}")
    kept = {"name": function["name"]}
    for name, ours in (("description", "description"), (schema, "parameters")):
        if function.get(name) is not None:
            kept[ours] = function[name]
    return {"type": "function", "function": kept}


def read_parts(content: Any, where: str, between: str = "") -> str:
    """The text in a string or in a list of parts, refusals too, which were said as well; parts that
    hold neither text nor media are passed over, and null is no text.

    Args:
        content: Of a message or of a tool's result.
        where: Its path in the body.
        between: What stands between the parts.
    """
    if type(content) is str:
        return content
    if content is None:
        return ""
    if type(content) is not list:
        refuse(where, f"is {shown(content)}; must be text or a list of parts")
    texts = []
    for index, part in enumerate(content):
        if type(part) is str:
            texts.append(part)
        elif type(part) is not dict:
            refuse(f"{where}[{index}]", f"is {shown(part)}; must be an object")
        elif (kind := part.get("type")) in _MEDIA:
            refuse(f"{where}[{index}].type", f"is {kind}; must be text: no media are read")
        else:
            texts += [read_text(part, name, f"{where}[{index}].") for name in _SAID if name in part]
    return between.join(texts)


def check_answers(messages: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
    """Refuse the result of a call that nobody made, where calls have fields of their own. A result
    without an id is of a call that was written as text.

    Args:
        messages: The whole conversation, canonical.
        places: Of each in the body.
    """
    known = CallIds[bool]()
    for message, place in zip(messages, places, strict=True):
        for call in message.get("tool_calls", ()):
            known.note(call["id"], True)
        answered = message["tool_call_id"] if message["role"] == "tool" else ""
        if answered and known.find(answered) is None:
            told = f"{shown(answered)} is of no tool call before it"
            refuse(place, f"{told}; must be the id of one above")


def read_seed(body: Mapping[str, Any]) -> int | None:
    """The seed in a body; None if it is not there."""
    seed = body.get("seed")
    if seed is not None and type(seed) is not int:
        refuse("seed", f"is {shown(seed)}; must be a whole number")
    return None if seed is None else seed % 2**63


def refuse(name: str, message: str) -> NoReturn:
    """Refuse a body for one of its fields.

    Raises:
        CallError: 400, always.
    """
    raise CallError(400, "invalid_value", f"{name}: {message}", param=name)


def shown(found: Any) -> str:
    """What stood in a field, for a message."""
    text = repr(found)
    return text if len(text) <= 60 else f"{text[:57]}..."
