"""Fields of a request body, read alike by every dialect: null is absent, a wrong type is a 400."""

from collections.abc import Mapping
from typing import Any, NoReturn

from areal_ray.gateway.call import CallError

_MAX_STOP = 16
_FUNCTION = ("name", "description", "parameters")
"""What of a function prompts show: the rest would tell the same tools apart."""


def read_text(body: Mapping[str, Any], name: str) -> str:
    """A text of a body; empty if it is not there."""
    text = body.get(name)
    if text is not None and type(text) is not str:
        refuse(name, f"is {shown(text)}; must be a string")
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


def read_number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    """A number of a body; None if it is not there."""
    number = body.get(name)
    if number is None:
        return None
    if type(number) not in (int, float) or not least <= number <= most:
        refuse(name, f"is {shown(number)}; must be a number from {least:g} to {most:g}")
    return float(number)


def read_stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Stop strings of a body: a string, a list of them, or none."""
    stop = body.get("stop")
    listed = [stop] if type(stop) is str else ([] if stop is None else stop)
    is_list = type(listed) is list and len(listed) <= _MAX_STOP
    if not is_list or not all(type(text) is str and text for text in listed):
        refuse("stop", f"is {shown(stop)}; must be at most {_MAX_STOP} texts, none empty")
    return tuple(listed)


def read_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The functions among the tools of a body, with the fields that prompts show alone."""
    tools = body.get("tools")
    if tools is None:
        return []
    if type(tools) is not list:
        refuse("tools", f"is {shown(tools)}; must be a list")
    found = []
    for index, tool in enumerate(tools):
        if type(tool) is not dict:
            refuse(f"tools[{index}]", f"is {shown(tool)}; must be an object")
        if tool.get("type", "function") != "function":
            continue
        function = tool.get("function")
        if type(function) is not dict or type(function.get("name")) is not str:
            refuse(f"tools[{index}].function.name", "is missing; must be a string")
        for name, kind in (("description", str), ("parameters", dict)):
            if function.get(name) is not None and type(function[name]) is not kind:
                refuse(f"tools[{index}].function.{name}", f"must be a {kind.__name__}")
        kept = {name: function[name] for name in _FUNCTION if function.get(name) is not None}
        found.append({"type": "function", "function": kept})
    return found


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
