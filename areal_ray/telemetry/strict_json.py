"""JSON that every reader accepts: no NaN or infinity, no NumPy or torch numbers."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def dumps_strict(value: object, *, indent: int | None = None) -> str:
    """JSON text on one line (unless indented); NaN and infinities become null.

    Raises:
        TypeError: A value is none of: null, bool, number, text, path, list, mapping, array.
    """
    separators = (",", ":") if indent is None else None
    return json.dumps(to_plain(value), allow_nan=False, indent=indent, separators=separators)


def to_plain(value: object) -> Any:
    """The same value made of None, bool, int, float, str, list and dict alone."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)  # a StrEnum would print as its name elsewhere
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    tolist = getattr(value, "tolist", None)  # NumPy scalars and arrays, torch tensors
    if tolist is not None:
        return to_plain(tolist())
    raise TypeError(f"{type(value).__name__} {value!r} has no JSON form")
