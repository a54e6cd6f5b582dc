"""What a reply is told in while it is sampled, and how its format is plugged in."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tools = Sequence[Mapping[str, Any]]
"""OpenAI's tool definitions, as the client offered them."""

Ids = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of what is said."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of what is thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A tool call begins (`name` is given) or goes on.

    Whether it is well-formed shows at its end alone. One that is not, or is cut off, stays
    unfinished: it lacks its last brace at least, so that nobody takes it for a whole one; its text
    follows as text, as the whole reply has it, and the turn's stop reason counts no call.
    (vLLM's parsers leave such a call unfinished, too, drop the rest of its text, and end the turn
    with `tool_calls`.)
    """

    index: int
    """Among the calls that began in its turn."""
    id: str
    name: str = ""
    arguments: str = ""
    """More of the JSON text."""
    is_unfinished: bool = False
    """Nothing more comes of it: it was none."""


Piece = TextPiece | ReasoningPiece | CallPiece


CALL_ID_CHARACTERS = 36


def call_id(key: str, index: int) -> str:
    """Id of a turn's call: so many letters and digits, as unique as the turn's `key`."""
    digest = hashlib.blake2s(f"{index} {key}".encode(), digest_size=16)
    return f"call{digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A tool call as a format reads it."""

    name: str
    arguments: str
    """JSON text of an object, as sampled where that is JSON."""


@dataclass(frozen=True, slots=True)
class BegunCall:
    """A call of which all but the arguments has been written."""

    name: str
    at: int
    """Where its arguments begin, with a brace."""


@dataclass(frozen=True, slots=True)
class Block:
    """What a format made of the start of a text."""

    length: int
    """Characters it takes; at least 1."""
    calls: tuple[FoundCall, ...] = ()
    """None: those characters are text."""
    text: str = ""
    """What is said in it before its calls."""


class ToolFormat(Protocol):
    """How a family of models writes tool calls. Stateless.

    What it decides of a text it must decide alike of every longer text that begins so: then a
    reply reads the same in whatever chunks it comes.
    """

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens it is written with, which decoding would hide."""

    def begins(self, text: str, *, is_start: bool) -> int:
        """Where a block, or what may yet become one, begins in `text`; its length if nowhere.

        Args:
            text: Not yet told.
            is_start: Whether nothing but blanks was told before it.
        """

    def begun(self, text: str, tools: Tools) -> BegunCall | None:
        """The first call in `text`, which begins where `begins` says, if it can be told before it
        is whole: `read` may yet make no call, or another one, of it. None = not yet, or never."""

    def read(self, text: str, tools: Tools, *, is_whole: bool) -> Block | None:
        """What `text`, which begins where `begins` says, holds; None = more has to come first.

        Args:
            text: From the block's beginning on.
            tools: What was offered.
            is_whole: Nothing more comes: never None then.
        """
