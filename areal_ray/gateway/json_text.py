"""JSON as it was written: the values of an object beside their own text."""

import json
import math
import re
from collections.abc import Collection
from typing import Any

_MOST_DEPTH = 200
"""What can be read but barely could not be written or compared at another place."""
_BLANK = re.compile(r"[ \t\n\r]*")
_HALF_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")


def _refuse(constant: str) -> Any:
    raise json.JSONDecodeError(f"{constant} is no JSON number", constant, 0)


def _finite(text: str) -> float:
    """What is beyond a double would be read as infinity, which no answer could hold again."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is beyond the numbers that can be read")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def read_json(text: str) -> Any:
    """The value of a JSON text; what it holds can be written as JSON in UTF-8 again.

    Raises:
        ValueError: It is none, or holds NaN, an infinity or (UnicodeEncodeError) half a character.
        RecursionError: It is nested too deep.
    """
    value = _DECODER.decode(text)
    _check_depth(value, text)
    if _HALF_ESCAPED.search(text):
        json.dumps(value, ensure_ascii=False).encode()
    return value


def is_deeper(value: Any, depth: int) -> bool:
    """Whether a value has more levels of lists and objects in each other."""
    level: list[Any] = [value]
    for _ in range(depth):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True


def _check_depth(value: Any, text: str) -> None:
    if text.count("[") + text.count("{") > _MOST_DEPTH and is_deeper([value], _MOST_DEPTH + 1):
        raise RecursionError(f"is nested deeper than {_MOST_DEPTH} levels")


class Unfinished(ValueError):
    """The text ends inside a string."""


def after_blank(text: str, start: int) -> int:
    """The first place from `start` on that is no blank of JSON's."""
    blank = _BLANK.match(text, start)
    assert blank is not None
    return blank.end()


def value_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends.

    Raises:
        Unfinished: The text ends inside one of its strings.
        ValueError: There is none, it is nested too deep, or it could not be sent as UTF-8.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
        _check_depth(value, text[start:end])
        if "\\u" in text[start:end]:  # may be half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string"):
            raise Unfinished from error
        raise
    except RecursionError as error:
        raise ValueError("is nested too deep") from error
    return value, end


def object_at(text: str, start: int = 0) -> tuple[dict[str, tuple[Any, str]], int]:
    """The JSON object that begins at `start`: name -> value and its text; and where it ends.

    Raises:
        Unfinished: The text ends inside one of its strings.
        ValueError: There is none.
    """
    fields: dict[str, tuple[Any, str]] = {}
    at = after_blank(text, start)
    _expect(text, at, "{")
    at = after_blank(text, at + 1)
    if text[at : at + 1] == "}":
        return fields, at + 1
    while True:
        _expect(text, at, '"')
        name, at = value_at(text, at)
        at = after_blank(text, at)
        _expect(text, at, ":")
        start = after_blank(text, at + 1)
        value, end = value_at(text, start)
        fields[name] = (value, text[start:end])
        at = after_blank(text, end)
        if text[at : at + 1] == "}":
            return fields, at + 1
        _expect(text, at, ",")
        at = after_blank(text, at + 1)


def open_field(text: str, names: Collection[str]) -> tuple[dict[str, Any], int] | None:
    """Of an object that may not be whole: the values before its first field of these names, and
    where the object begins that this field holds. None where that has not come, or never will.
    """
    fields: dict[str, Any] = {}
    try:
        at = after_blank(text, 0)
        _expect(text, at, "{")
        while True:
            at = after_blank(text, at + 1)
            _expect(text, at, '"')
            name, at = value_at(text, at)
            at = after_blank(text, at)
            _expect(text, at, ":")
            at = after_blank(text, at + 1)
            if name in names:
                return (fields, at) if text[at : at + 1] == "{" else None
            fields[name], at = value_at(text, at)
            at = after_blank(text, at)
            _expect(text, at, ",")
    except ValueError:
        return None


def _expect(text: str, at: int, mark: str) -> None:
    if text[at : at + 1] != mark:
        raise ValueError(f"has {text[at : at + 1]!r} at {at}; must be {mark}")
