"""Tells text from tool calls, as a reply is sampled or whole, with the same result."""

import secrets
from dataclasses import dataclass, field

from areal_ray.core.turn import ToolCall
from areal_ray.gateway.json_scan import ObjectScan
from areal_ray.gateway.pieces import (
    Block,
    CallPiece,
    FoundCall,
    Piece,
    TextPiece,
    ToolFormat,
    Tools,
    call_id,
)


@dataclass(slots=True)
class _Begun:
    """A call whose block is not decided."""

    index: int
    id: str
    name: str
    num_read: int
    """Characters of its block that were read for its arguments, or stand before them."""
    scan: ObjectScan = field(default_factory=ObjectScan)
    told: str = ""
    """Of its arguments."""
    is_told: bool = False
    """Whether anybody was told of it."""

    def more(self, text: str) -> list[Piece]:
        """What its block, as far as it has come, lets be told."""
        pieces: list[Piece] = []
        if not self.is_told:
            self.is_told = True
            pieces.append(CallPiece(self.index, self.id, self.name))
        certain = self.scan.feed(text[self.num_read :])
        self.num_read = len(text)
        if certain:
            self.told += certain
            pieces.append(CallPiece(self.index, self.id, arguments=certain))
        return pieces


class CallReader:
    """Tells text from tool calls; blanks before and after calls are no text."""

    def __init__(
        self, tool_format: ToolFormat | None, tools: Tools, key: str, max_calls: int | None
    ) -> None:
        self._format = tool_format
        self._tools = tools
        self._key = key or secrets.token_hex(16)
        self._max_calls = max_calls
        self._text = ""
        """Not yet told as text, from where a call may begin."""
        self._blank = ""
        """Told once text follows it."""
        self._has_calls = False
        self._begun: _Begun | None = None
        self._num_begun = 0
        """Calls so far, unfinished ones too: those are no part of the reply, but what follows must
        have another index, also where the reply is read whole."""
        self.drops_newlines = False
        """Whether newlines that come next belong to the end of the reasoning."""
        self.told: list[str] = []
        self.calls: list[ToolCall] = []

    def read(self, text: str, *, is_whole: bool) -> list[Piece]:
        """What `text` and the end, if it is that, let be told."""
        pieces: list[Piece] = []
        self._text += text
        while self._text:
            at = self._begins()
            self._say(self._text[:at], pieces)
            self._text = self._text[at:]
            if not self._text or self._format is None:
                break
            self._look_for_call(self._format)
            block = self._format.read(self._text, self._tools, is_whole=is_whole)
            if block is None:
                if self._begun is not None and not self._is_full:
                    pieces += self._begun.more(self._text)
                break
            self._decide(block, pieces)
            self._text = self._text[block.length :]
        if is_whole and self._blank and not self._has_calls:
            self.told.append(self._blank)
            pieces.append(TextPiece(self._blank))
        return pieces

    @property
    def _is_full(self) -> bool:
        """Whether no call more is told."""
        return self._max_calls is not None and len(self.calls) >= self._max_calls

    def _begins(self) -> int:
        if self._format is None:
            return len(self._text)
        is_start = not self.told and not self._has_calls
        return self._format.begins(self._text, is_start=is_start)

    def _look_for_call(self, tool_format: ToolFormat) -> None:
        # Before the block is read, and whether or not it can be: indices must not depend on how
        # the reply was cut.
        if self._begun is None and (found := tool_format.begun(self._text, self._tools)):
            self._begun = _Begun(*self._next(), found.name, found.at)

    def _next(self) -> tuple[int, str]:
        """Index and id of the next call."""
        self._num_begun += 1
        return self._num_begun - 1, call_id(self._key, self._num_begun - 1)

    def _decide(self, block: Block, pieces: list[Piece]) -> None:
        begun, self._begun = self._begun, None
        calls = list(block.calls)
        is_one = (
            begun is not None
            and bool(calls)
            and calls[0].name == begun.name
            and calls[0].arguments.startswith(begun.told)
        )
        if begun is not None and begun.is_told and not is_one:
            pieces.append(CallPiece(begun.index, begun.id, is_unfinished=True))
        self._say(block.text if calls else self._text[: block.length], pieces)
        self._has_calls = self._has_calls or bool(calls)
        for call in calls:
            self._tell(call, begun if is_one else None, pieces)
            is_one = False

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if self.drops_newlines:
            text = text.lstrip("\n")
            self.drops_newlines = not text
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said:
            self.told.append(said)
            pieces.append(TextPiece(said))

    def _tell(self, found: FoundCall, begun: _Begun | None, pieces: list[Piece]) -> None:
        """The rest of a call that has begun, or the whole of another."""
        index, our_id = self._next() if begun is None else (begun.index, begun.id)
        if self._is_full:
            return
        self.calls.append(ToolCall(our_id, found.name, found.arguments))
        if begun is not None and begun.is_told:
            rest = found.arguments[len(begun.told) :]
            pieces.append(CallPiece(index, our_id, arguments=rest))
        else:
            pieces.append(CallPiece(index, our_id, found.name, found.arguments))
