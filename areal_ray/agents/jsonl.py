"""JSONL files, read by line feeds alone: other Unicode line breaks are part of the text."""

import json
from pathlib import Path
from typing import Any

from areal_ray.errors import DataError


def read_jsonl(path: Path | str) -> list[dict[str, Any]]:
    """The rows of a JSONL file; blank lines are skipped.

    Raises:
        DataError: No such file, a line that is not a JSON object (named), or no row at all.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}). Give the path of a JSONL file"
        ) from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8-sig").strip(" \t\r\v\f")
            if not text:
                continue
            row = json.loads(text)
        except (ValueError, RecursionError) as error:  # broken JSON, or not UTF-8, or endless
            raise DataError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: is a {type(row).__name__}; must be a JSON object")
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: has no rows. It must hold one JSON object on each line")
    return rows
