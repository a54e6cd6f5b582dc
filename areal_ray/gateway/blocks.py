"""A reply as blocks in a row, as Responses and Messages show it: reasoning, text, tool calls."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from areal_ray.gateway.call import (
    CallEvent,
    Choice,
    ChoiceEnd,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
)


class BlockKind(Enum):
    """What a block holds."""

    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class Step(Enum):
    """What becomes of a block."""

    OPEN = auto()
    MORE = auto()
    CLOSE = auto()


@dataclass(slots=True)
class Block:
    """A piece of a reply that is all of one kind."""

    kind: BlockKind
    index: int
    """Among the blocks of its reply."""
    text: str = ""
    """So far; of a tool call its arguments."""
    id: str = ""
    """Of a tool call."""
    name: str = ""
    """Of a tool call."""
    is_unfinished: bool = False
    """It began as a tool call and was none after all."""
    logprobs: list[TokenLogprob] = field(default_factory=list)


def blocks_of(choice: Choice) -> list[Block]:
    """The blocks of a whole reply; at least one that is no reasoning."""
    blocks: list[Block] = []
    if choice.reasoning:
        blocks.append(Block(BlockKind.REASONING, 0, choice.reasoning))
    if choice.text or not choice.tool_calls:
        logprobs = list(choice.logprobs)
        blocks.append(Block(BlockKind.TEXT, len(blocks), choice.text, logprobs=logprobs))
    for call in choice.tool_calls:
        blocks.append(Block(BlockKind.CALL, len(blocks), call.arguments, call.id, call.name))
    return blocks


class BlockReader:
    """Cuts the events of one choice into blocks; `blocks_of` for a reply as it comes."""

    def __init__(self) -> None:
        self._open: Block | None = None
        self._num_blocks = 0
        self.has_said = False
        """Whether any block was no reasoning."""
        self._unplaced: list[TokenLogprob] = []
        """Of tokens before the text that were none of it, such as those of the reasoning."""

    def read(self, event: CallEvent) -> Iterator[tuple[Step, Block, str]]:
        """What an event does to which block, and the text it adds to it."""
        if isinstance(event, ChoiceEnd):
            if not self.has_said:
                yield from self._opened(self._text_block())
            yield from self._closed()
        elif isinstance(event, ReasoningDelta):
            yield from self._grown(BlockKind.REASONING, event.text)
        elif isinstance(event, TextDelta):
            yield from self._grown(BlockKind.TEXT, event.text, event.logprobs)
            if self._open is None or self._open.kind is not BlockKind.TEXT:
                self._unplaced += event.logprobs
        else:
            if event.name:
                call = Block(BlockKind.CALL, self._num_blocks, id=event.id, name=event.name)
                yield from self._opened(call)
            yield from self._grown(BlockKind.CALL, event.arguments)
            if event.is_unfinished and self._open is not None:
                self._open.is_unfinished = True
                yield from self._closed()

    def _grown(
        self, kind: BlockKind, text: str, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> Iterator[tuple[Step, Block, str]]:
        if text and (self._open is None or self._open.kind is not kind):
            is_text = kind is BlockKind.TEXT
            new = self._text_block() if is_text else Block(kind, self._num_blocks)
            yield from self._opened(new)
        block = self._open
        if block is None or block.kind is not kind:
            return
        block.logprobs += logprobs
        if text:
            block.text += text
            yield Step.MORE, block, text

    def _text_block(self) -> Block:
        logprobs, self._unplaced = self._unplaced, []
        return Block(BlockKind.TEXT, self._num_blocks, logprobs=logprobs)

    def _opened(self, block: Block) -> Iterator[tuple[Step, Block, str]]:
        yield from self._closed()
        block.index = self._num_blocks
        self._num_blocks += 1
        self._open = block
        self.has_said = self.has_said or block.kind is not BlockKind.REASONING
        yield Step.OPEN, block, ""

    def _closed(self) -> Iterator[tuple[Step, Block, str]]:
        block, self._open = self._open, None
        if block is not None:
            yield Step.CLOSE, block, ""
