"""A streamed turn as events of its call, chunk by chunk."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import PromptedTurn, SampledTurn, TopTokens, TurnChunk
from areal_ray.gateway.call import (
    Call,
    CallEvent,
    Choice,
    ChoiceEnd,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
)
from areal_ray.gateway.pieces import Piece, ReasoningPiece, TextPiece
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.text_stream import TextStream


class TurnReader:
    """Reads one choice of a call while it is sampled.

    Args:
        template: Of the model that samples.
        reply_format: How it writes.
        call: What is answered.
        turn: Whose tokens come.
        index: Of the choice.
        stop: Texts that end the turn.
    """

    def __init__(
        self,
        template: ChatTemplate,
        reply_format: ReplyFormat,
        call: Call,
        turn: PromptedTurn,
        index: int,
        *,
        stop: Sequence[str],
    ) -> None:
        self._template = template
        self._index = index
        self._text = TextStream(reply_format.decode, stop)
        if call.is_raw:
            self._parser = reply_format.raw_parser()
        else:
            self._parser = reply_format.parser(
                shown_tools(call), turn.prompt_ids, turn.handle, max_calls(call)
            )
        self._wants_logprobs = call.logprobs
        self._untold: list[TokenLogprob] = []
        self._num_fed = 0

    def feed(self, chunk: TurnChunk | SampledTurn) -> list[CallEvent]:
        """What the chunk's tokens make certain."""
        ids: list[int] = chunk.token_ids.tolist()
        self._num_fed += len(ids)
        if self._wants_logprobs:
            self._untold += token_logprobs(self._template, chunk)
        text = self._text.feed(ids)
        return self._events(self._parser.feed(text)) if text else []

    def end(self, sampled: SampledTurn, choice: Choice) -> list[CallEvent]:
        """The rest, and the end of the choice."""
        ids = sampled.token_ids[self._num_fed :].tolist()
        if self._wants_logprobs:
            self._untold += token_logprobs(self._template, sampled, self._num_fed)
        text = self._text.feed(ids) + self._text.finish()
        events = self._events([*self._parser.feed(text), *self._parser.finish()])
        if self._untold:
            events.append(TextDelta(self._index, "", self._taken_logprobs()))
        return [*events, ChoiceEnd(self._index, choice)]

    def _events(self, pieces: Sequence[Piece]) -> list[CallEvent]:
        events: list[CallEvent] = []
        for piece in pieces:
            if isinstance(piece, TextPiece):
                events.append(TextDelta(self._index, piece.text, self._taken_logprobs()))
            elif isinstance(piece, ReasoningPiece):
                events.append(ReasoningDelta(self._index, piece.text))
            else:
                events.append(
                    ToolCallDelta(
                        self._index,
                        piece.index,
                        piece.id,
                        piece.name,
                        piece.arguments,
                        piece.is_unfinished,
                    )
                )
        return events

    def _taken_logprobs(self) -> tuple[TokenLogprob, ...]:
        taken = tuple(self._untold)
        self._untold.clear()
        return taken


def shown_tools(call: Call) -> Sequence[dict[str, object]] | None:
    """What the model is shown: nothing but not to know of a tool keeps it from calling it."""
    return None if call.tool_choice == "none" or not call.tools else [*map(dict, call.tools)]


def max_calls(call: Call) -> int | None:
    """How many tool calls of a turn the client is told; None = all."""
    return None if call.parallel_tool_calls else 1


def token_logprobs(
    template: ChatTemplate, sampled: TurnChunk | SampledTurn, start: int = 0
) -> list[TokenLogprob]:
    """Each token from `start` on, but for the one that ends the turn."""
    ids, logprobs = sampled.token_ids[start:].tolist(), sampled.logprobs[start:].tolist()
    tops: Sequence[tuple[TokenLogprob, ...]] = [()] * len(ids)
    if sampled.top is not None:
        tops = _told_tops(template, sampled.top.part(start))
    return [
        _told(template, token, logprob, top)
        for token, logprob, top in zip(ids, logprobs, tops, strict=True)
        if token not in template.end_ids
    ]


def _told_tops(template: ChatTemplate, top: TopTokens) -> list[tuple[TokenLogprob, ...]]:
    """What was likeliest at each place."""
    return [
        tuple(_told(template, token, logprob) for token, logprob in zip(*place, strict=True))
        for place in zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    ]


def _told(
    template: ChatTemplate, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()
) -> TokenLogprob:
    raw = template.token_bytes(token)
    return TokenLogprob(raw.decode(errors="replace"), logprob, raw, top)


@dataclass(frozen=True, slots=True)
class _SampledSoFar:
    """What came of a turn that was broken off; arrays of the same length N."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    stop_reason: StopReason = StopReason.ABORT
    top: TopTokens | None = None


def sampled_so_far(chunks: Sequence[TurnChunk]) -> SampledTurn | None:
    """The chunks of a turn that was broken off as one; None where none came."""
    if not chunks:
        return None
    return _SampledSoFar(
        np.concatenate([chunk.token_ids for chunk in chunks]),
        np.concatenate([chunk.logprobs for chunk in chunks]),
        np.concatenate([chunk.versions for chunk in chunks]),
    )
