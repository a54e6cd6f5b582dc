"""From the tree of an episode's turns to trajectories: each sampled token trained at most once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason, Trajectory
from areal_ray.gateway.call_labels import labels_of
from areal_ray.gateway.record_policy import CallLabel, RecordPolicy
from areal_ray.gateway.turn_tree import Turn

UNTAKEN = "untaken"
ABORTED = "aborted"
HELD = "held_to_a_grammar"

Style = Literal["concat", "individual"]


@dataclass(frozen=True, slots=True)
class TurnOutline:
    """What became of one turn; with the others of its episode, the tree. JSON values."""

    turn_id: int
    handle: str
    label: CallLabel
    parent: int
    """Turn that the prompt extends token by token; -1 = none, so with the next two."""
    continues: int
    """Turn whose reply the prompt holds last."""
    follows: int
    """Of a main line that begins anew, after compaction say: the turn of the main line before."""
    branch: int
    """Branch that trains it; -1 = none."""
    left_out: str
    """Why it does not train: its label, or one of the reasons above; empty if it does."""
    stop_reason: StopReason
    abort_reason: str
    split: str
    """Why its prompt does not extend the turn it continues, if it does not."""
    deviations: tuple[str, ...]
    """How the client's history differed from the record that it matched."""
    num_prompt: int
    num_sampled: int


@dataclass(slots=True)
class _Row:
    """Turns that one trajectory trains, the last one first."""

    turns: list[Turn]
    """Those held to a grammar among them are context: their tokens carry no loss."""
    branch: int = 0

    def drop_untrained_end(self) -> bool:
        """Leave out what only follows the last turn that trains; whether there is any."""
        while self.turns and self.turns[0].is_held:
            del self.turns[0]
        return bool(self.turns)


class EpisodeExport:
    """One reading of a finished or growing record.

    Args:
        turns: In the order they were closed or broken off.
        policy: What trains.
    """

    def __init__(self, turns: Sequence[Turn], policy: RecordPolicy) -> None:
        self._turns = turns
        self._policy = policy
        self._labels: Mapping[int, CallLabel] = {}
        if policy.is_tolerant:
            self._labels = labels_of(sorted(turns, key=lambda turn: turn.turn_id))
        self._left_out = self._what_is_left_out()

    def label(self, turn: Turn) -> CallLabel:
        """What a turn was for."""
        return self._labels.get(turn.turn_id, CallLabel.MAIN)

    def trajectories(self, style: Style, fields: Mapping[str, Any]) -> list[Trajectory]:
        """One a branch (concat) or a turn (individual); the main line's first."""
        rows = self._rows(style)
        branch_of = _branches(rows)
        return [
            _trajectory(row, branch_of.get(self._caller_id(row.turns[0]), -1), fields)
            for row in rows
        ]

    def outline(self) -> list[TurnOutline]:
        """All turns, in the order they were opened."""
        branch_of = _branches(self._rows("concat"))
        return [
            TurnOutline(
                turn_id=turn.turn_id,
                handle=turn.handle,
                label=self.label(turn),
                parent=_id(turn.parent),
                continues=_id(turn.continues),
                follows=self._follows(turn),
                branch=branch_of.get(turn.turn_id, -1),
                left_out=self._left_out.get(turn.turn_id, ""),
                stop_reason=turn.stop_reason,
                abort_reason=turn.abort_reason,
                split=turn.split,
                deviations=turn.deviations,
                num_prompt=turn.num_prompt,
                num_sampled=len(turn.token_ids),
            )
            for turn in sorted(self._turns, key=lambda turn: turn.turn_id)
        ]

    def left_out(self) -> Counter[str]:
        """Turns that do not train, by reason."""
        return Counter(self._left_out.values())

    def last_of_main(self) -> Turn | None:
        """The turn that the main line ended in, so far."""
        closed = (turn for turn in reversed(self._turns) if turn.reply is not None)
        return next((turn for turn in closed if self.label(turn) is CallLabel.MAIN), None)

    def _what_is_left_out(self) -> dict[int, str]:
        policy = self._policy
        found: dict[int, str] = {}
        siblings: dict[Any, list[Turn]] = {}
        for turn in self._turns:
            label = self.label(turn)
            if label not in policy.trained:
                found[turn.turn_id] = str(label)
            elif turn.reply is None and (policy.aborted == "drop" or not len(turn.token_ids)):
                found[turn.turn_id] = ABORTED
            elif turn.reply is not None and policy.untaken == "drop":
                key = (turn.prompt, turn.rendered_digest, turn.speaker)
                siblings.setdefault(key, []).append(turn)
        for group in siblings.values():
            newest = max(turn.call for turn in group)
            is_any_taken = any(turn.is_taken for turn in group)
            for turn in group:
                if not (turn.is_taken if is_any_taken else turn.call == newest):
                    found[turn.turn_id] = UNTAKEN
        held = (turn.turn_id for turn in self._turns if turn.is_held)
        return {**dict.fromkeys(held, HELD), **found}

    def _rows(self, style: Style) -> list[_Row]:
        rows: list[_Row] = []
        row_of: dict[int, _Row] = {}
        extended: set[int] = set()
        for turn in self._turns:
            if self._left_out.get(turn.turn_id, HELD) != HELD:
                continue
            parent = turn.parent
            is_first = parent is not None and parent.turn_id not in extended
            if style == "concat" and parent is not None and parent.turn_id in row_of and is_first:
                row = row_of[parent.turn_id]
                row.turns.insert(0, turn)
                extended.add(parent.turn_id)
            else:  # begins anew, or another turn went on from there first: fork
                row = _Row([turn])
                rows.append(row)
            row_of[turn.turn_id] = row
        rows = [row for row in rows if row.drop_untrained_end()]
        if self._labels:
            rows.sort(key=lambda row: self.label(row.turns[-1]) is not CallLabel.MAIN)
        for number, row in enumerate(rows):
            row.branch = number
        return rows

    def _caller_id(self, turn: Turn) -> int:
        """A turn of the agent that called the one of `turn` as its sub-agent; -1 = none."""
        if not self._policy.is_tolerant:
            return _id(turn.caller)
        if self.label(turn) is CallLabel.MAIN:
            return -1
        while turn.continues is not None and self.label(turn.continues) is self.label(turn):
            turn = turn.continues
        return self._main_before(turn)

    def _follows(self, turn: Turn) -> int:
        is_new = turn.continues is None and self.label(turn) is CallLabel.MAIN
        return self._main_before(turn) if is_new else -1

    def _main_before(self, turn: Turn) -> int:
        """The last turn of the main line that trains and was over when `turn` began."""
        for earlier in reversed(self._turns[: turn.opened_at]):
            is_main = self.label(earlier) is CallLabel.MAIN
            if is_main and earlier.turn_id not in self._left_out:
                return earlier.turn_id
        return -1


def unsampled(prompt_ids: NDArray[np.int32], fields: Mapping[str, Any]) -> Trajectory:
    """A prompt that nothing was sampled from."""
    length = len(prompt_ids)
    return Trajectory(
        token_ids=prompt_ids,
        loss_mask=np.zeros(length, np.bool_),
        behaviour_logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        turn_ids=np.full(length, -1, np.int16),
        stop_reason=StopReason.ABORT,
        **fields,
    )


def _branches(rows: Sequence[_Row]) -> dict[int, int]:
    """By which row each turn trains."""
    return {turn.turn_id: row.branch for row in rows for turn in row.turns if not turn.is_held}


def _id(turn: Turn | None) -> int:
    return -1 if turn is None else turn.turn_id


def _trajectory(row: _Row, parent_branch: int, fields: Mapping[str, Any]) -> Trajectory:
    leaf = row.turns[0]
    token_ids = leaf.all_ids()
    total = len(token_ids)
    mask = np.zeros(total, np.bool_)
    logprobs = np.zeros(total, np.float32)
    versions = np.empty(total, np.int32)
    versions.fill(-1)
    turn_ids = np.empty(total, np.int16)
    turn_ids.fill(-1)
    for turn in row.turns:
        if turn.is_held:
            continue
        span = slice(turn.num_prompt, turn.num_ids)
        mask[span] = True
        logprobs[span] = turn.logprobs
        versions[span] = turn.versions
        turn_ids[span] = turn.turn_id
    return Trajectory(
        token_ids=token_ids,
        loss_mask=mask,
        behaviour_logprobs=logprobs,
        versions=versions,
        turn_ids=turn_ids,
        branch_id=row.branch,
        parent_branch_id=parent_branch,
        stop_reason=leaf.stop_reason,
        **fields,
    )
