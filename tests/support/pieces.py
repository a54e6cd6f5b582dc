"""What a client puts together from the pieces of a streamed reply."""

from collections.abc import Sequence

from areal_ray.core.turn import Reply, ToolCall
from areal_ray.gateway.pieces import CallPiece, Piece, ReasoningPiece, TextPiece


def joined(pieces: Sequence[Piece]) -> Reply:
    """The reply, without the calls that stayed unfinished."""
    thought = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
    return Reply(text, tuple(call for call, is_whole in _calls(pieces) if is_whole), thought)


def unfinished(pieces: Sequence[Piece]) -> list[ToolCall]:
    """The calls that began and were none, with as much of their arguments as was told."""
    return [call for call, is_whole in _calls(pieces) if not is_whole]


def _calls(pieces: Sequence[Piece]) -> list[tuple[ToolCall, bool]]:
    calls: dict[int, tuple[ToolCall, bool]] = {}
    for piece in pieces:
        if not isinstance(piece, CallPiece):
            continue
        if piece.name:
            assert piece.index not in calls
            assert not calls or piece.index > max(calls)
            call = ToolCall(piece.id, piece.name, piece.arguments)
        else:
            begun, is_whole = calls[piece.index]
            assert piece.index == max(calls), "a call goes on after another has begun"
            assert is_whole, "an unfinished call goes on"
            assert piece.id == begun.id
            assert piece.arguments or piece.is_unfinished
            call = ToolCall(begun.id, begun.name, begun.arguments + piece.arguments)
        calls[piece.index] = call, not piece.is_unfinished
    return list(calls.values())
