"""What a session said that another provider served: messages and replies, no tokens."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal_ray.core.trajectory import StopReason
from areal_ray.gateway.turn_record import TurnRecord
from areal_ray.gateway.turn_tree import NO_IDS, NO_LOGPROBS

UPSTREAM = "upstream"
"""Why turns do not train that another provider answered."""

_LOOKED_AT = 8
"""Of the latest turns, how many a conversation is compared with."""


class TurnKeeper(Protocol):
    """What a journal needs of a record; `Recorder` and `TextRecord` are such."""

    @property
    def num_turns(self) -> int:
        """Turns that are over."""

    @property
    def left_out(self) -> Counter[str]:
        """Turns that do not train, by reason."""

    def turn_record(self, turn_id: int) -> TurnRecord:
        """What a turn added; KeyError if there is none."""

    def turn_records(self) -> list[TurnRecord]:
        """Those of all turns, in the order that `replay` needs."""

    def replay(self, record: TurnRecord) -> None:
        """Take up a turn of an earlier process."""


@dataclass(frozen=True, slots=True)
class TextTurn:
    """One call and its reply."""

    turn_id: int
    messages: tuple[Mapping[str, Any], ...]
    """The whole conversation before the reply, canonical."""
    reply: Mapping[str, Any]
    """Canonical; of a turn that was broken off what came of it, {} if nothing did."""
    stop_reason: StopReason
    facts: Mapping[str, Any]
    """JSON: `model` as the provider calls it, `num_prompt` and `num_sampled` as it counts, and
    `abort_reason`."""
    after: int
    """Turn whose conversation, its reply included, this one begins with; -1 = none."""
    num_kept: int
    """How many messages of it."""


class TextRecord:
    """Record of one session; messages that turns share are kept once. A `TurnKeeper`.

    Args:
        upstream: Name of the provider that answers.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.turns: list[TextTurn] = []

    @property
    def num_turns(self) -> int:
        """See `TurnKeeper`."""
        return len(self.turns)

    @property
    def left_out(self) -> Counter[str]:
        """All turns."""
        return Counter({UPSTREAM: len(self.turns)} if self.turns else {})

    def add(
        self,
        messages: Sequence[Mapping[str, Any]],
        reply: Mapping[str, Any],
        stop_reason: StopReason,
        facts: Mapping[str, Any],
    ) -> int:
        """A call is over; returns its turn's number."""
        after = -1
        known: tuple[Mapping[str, Any], ...] = ()
        for turn in self.turns[-_LOOKED_AT:]:
            shared = _shared((*turn.messages, turn.reply), messages)
            if len(shared) > len(known):
                after, known = turn.turn_id, shared
        whole = (*known, *messages[len(known) :])
        turn_id = len(self.turns)
        self.turns.append(TextTurn(turn_id, whole, reply, stop_reason, facts, after, len(known)))
        return turn_id

    def turn_record(self, turn_id: int) -> TurnRecord:
        """See `TurnKeeper`."""
        if not 0 <= turn_id < len(self.turns):
            raise KeyError(f"turn {turn_id}: there is none; must be below {len(self.turns)}")
        return _written_down(self.turns[turn_id])

    def turn_records(self) -> list[TurnRecord]:
        """See `TurnKeeper`."""
        return [_written_down(turn) for turn in self.turns]

    def replay(self, record: TurnRecord) -> None:
        """See `TurnKeeper`."""
        kept: tuple[Mapping[str, Any], ...] = ()
        if record.after >= 0:
            before = self.turns[record.after]
            kept = (*before.messages, before.reply)[: record.num_kept]
        self.turns.append(
            TextTurn(
                record.turn_id,
                (*kept, *record.messages),
                record.reply,
                record.stop_reason,
                record.facts,
                record.after,
                record.num_kept,
            )
        )


def _shared(
    known: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> tuple[Mapping[str, Any], ...]:
    for index, (mine, other) in enumerate(zip(known, messages, strict=False)):
        if mine != other:
            return tuple(known[:index])
    return tuple(known[: len(messages)])


def _written_down(turn: TextTurn) -> TurnRecord:
    return TurnRecord(
        turn_id=turn.turn_id,
        handle="",
        after=turn.after,
        num_kept=turn.num_kept,
        messages=turn.messages[turn.num_kept :],
        reply=turn.reply,
        base=-1,
        num_shared=0,
        added_ids=NO_IDS,
        token_ids=NO_IDS,
        logprobs=NO_LOGPROBS,
        versions=NO_IDS,
        stop_reason=turn.stop_reason,
        facts=turn.facts,
    )
