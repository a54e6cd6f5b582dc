"""Anthropic's helpful and harmless pairs: two ends of one conversation, the better one marked.

A row is {"chosen": transcript, "rejected": transcript}, with turns that begin with a blank line and
`Human: ` or `Assistant: `.
"""

import re
from collections.abc import Iterator
from typing import Any

from areal_ray.agents.hub import read_hub
from areal_ray.agents.jsonl import read_jsonl
from areal_ray.errors import DataError

_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant"}

Message = dict[str, str]


def load(
    path: str | None = None, hub: str = "Anthropic/hh-rlhf", split: str = "train"
) -> Iterator[tuple[list[Message], str, str]]:
    """Pairs of a JSONL file, or of the hub's data set where no path is given.

    Rows whose two transcripts differ before their last answer have no common prompt and are left
    out, as are those with an empty or twice the same answer.

    Args:
        path: File with a JSON object {"chosen": ..., "rejected": ...} on each line.
        hub: Data set name; needs the `datasets` package.
        split: Of the hub's data set.

    Raises:
        DataError: A file, line or row that cannot be used; it is named.
    """
    rows = read_jsonl(path) if path is not None else read_hub(hub, split)
    for number, row in enumerate(rows):
        where = f"{path or f'{hub} ({split})'} row {number}"
        *prompt, chosen = messages(row.get("chosen"), f"{where}: 'chosen'")
        *other, rejected = messages(row.get("rejected"), f"{where}: 'rejected'")
        better, worse = chosen["content"], rejected["content"]
        if prompt == other and better and worse and better != worse:
            yield prompt, better, worse


def messages(transcript: Any, where: str) -> list[Message]:
    """A transcript as chat messages, the assistant's last.

    Raises:
        DataError: It is no text, or does not end with the assistant.
    """
    parts = _TURN.split(transcript) if isinstance(transcript, str) else []
    turns = [
        {"role": _ROLES[role], "content": text.strip()}
        for role, text in zip(parts[1::2], parts[2::2], strict=True)
    ]
    if len(turns) < 2 or turns[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: must be a transcript of Human and Assistant, ending with the latter"
        )
    return turns
