"""Token-in-token-out record of one episode: what the model saw and sampled, id by id.

A conversation that continues a recorded turn gets as prompt the recorded ids, then the tail of the
assistant turn as the template closes it, then the rendered new messages: text of the model's is
never encoded again. Where the template or the agent rewrote the past, the prompt is rendered afresh
and the record *splits*: a new branch, whose repeated past carries no loss, so that each sampled
token is trained once. Splits are counted by reason.
"""

import json
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason, Trajectory
from areal_ray.core.turn import PromptedTurn, Reply, SampledTurn
from areal_ray.gateway.call import CallHints
from areal_ray.gateway.call_labels import said_label, speaker
from areal_ray.gateway.episode_export import EpisodeExport, Style, TurnOutline, unsampled
from areal_ray.gateway.messages import RAW, reply_message
from areal_ray.gateway.prompt_length import check_length
from areal_ray.gateway.prompt_tail import (
    TEMPLATE_REWROTE_PAST,
    TEMPLATE_REWROTE_TURN,
    TOKENS_MERGE,
    TOOLS_CHANGED,
    PromptTail,
    text_digest,
)
from areal_ray.gateway.record_policy import IN_PROCESS, RecordPolicy
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.text_stream import before_stop
from areal_ray.gateway.turn_matching import AGENT_EDITED, Place, find_place, recorded_key
from areal_ray.gateway.turn_record import ReplyReader, TurnRecord, taken_up, written_down
from areal_ray.gateway.turn_tree import MessageNode, Turn

__all__ = [
    "AGENT_EDITED",
    "TEMPLATE_REWROTE_PAST",
    "TEMPLATE_REWROTE_TURN",
    "TOKENS_MERGE",
    "TOOLS_CHANGED",
    "Recorder",
]

_log = logging.getLogger(__name__)

_MOST_TURNS = 1 << 15
"""Calls of an episode that its trajectories can number."""

Tools = Sequence[Mapping[str, Any]] | None


class Recorder:
    """Record of one episode; satisfies `core.turn.TurnRecorder`.

    Open and closed turns may interleave as they like; a turn that is never closed nor broken off
    leaves no trace. For one thread alone.

    Args:
        template: Renders and encodes.
        policy: What counts as sent again, and what trains.
        reader: Reads sampled tokens back; None = as an agent in process has them.
    """

    def __init__(
        self,
        template: ChatTemplate,
        policy: RecordPolicy = IN_PROCESS,
        reader: ReplyReader | None = None,
    ) -> None:
        self._template = template
        self._policy = policy
        self._reader: ReplyReader = reader or ReplyFormat(template)
        self._tail = PromptTail(template, self._reader)
        self.lock = threading.Lock()  # of whoever opens or ends a turn, where threads may
        self._open: dict[int, Turn] = {}
        self._turns: list[Turn] = []
        """Closed or broken off, in that order."""
        self._root, self._num_opened = MessageNode(None, (), {}), 0
        self._last_prompt: NDArray[np.int32] = np.zeros(0, np.int32)
        self.splits: Counter[str] = Counter()
        """Conversations that stopped extending their record, by reason."""
        self.deviations: Counter[str] = Counter()
        """Calls whose history differed from the record that they still matched, by how."""
        self.last_reply = Reply("")
        """What the model said last."""

    @property
    def last_stop_reason(self) -> StopReason:
        """Why the last turn ended; ABORT if none was sampled."""
        return self._turns[-1].stop_reason if self._turns else StopReason.ABORT

    @property
    def num_turns(self) -> int:
        """Turns closed or broken off so far."""
        return len(self._turns)

    @property
    def left_out(self) -> Counter[str]:
        """Turns that do not train, by reason: `untaken`, `aborted`, or what the call was for."""
        return EpisodeExport(self._turns, self._policy).left_out()

    def open_turn(
        self,
        messages: Sequence[Any],
        tools: Tools = None,
        called_by: int | None = None,
        *,
        hints: CallHints | None = None,
        most_tokens: int | None = None,
        is_held: bool = False,
    ) -> PromptedTurn:
        """Fix the prompt of the next model call; see `core.turn.TurnRecorder`.

        Args:
            messages: The whole conversation, as the client sends it.
            tools: What the model may call.
            called_by: Of a sub-agent, `turn_id` of the closed turn that called it.
            hints: What a client behind the gateway says of the call.
            most_tokens: A prompt that is far longer is refused and leaves no trace.
            is_held: Whether it is sampled under a grammar, so that it does not train.

        Raises:
            PromptTooLong: The prompt is far longer.
            ValueError: A message cannot be read, the template refuses the conversation, or the
                episode has had as many calls as its trajectories can number.
        """
        if self._num_opened >= _MOST_TURNS:
            raise ValueError(f"the session has made {_MOST_TURNS} calls, the most. Start another")
        place = find_place(self._root, messages, self._turns, self._policy)
        rendered = self._template.render(place.messages, tools)
        if most_tokens is not None:
            check_length(self._template.encode_array, rendered, most_tokens)
        turn = self._new_turn(place.node)
        turn.new_messages = place.new
        turn.tools, turn.has_tools = tools, bool(tools)
        turn.rendered_length, turn.rendered_digest = len(rendered), text_digest(rendered)
        turn.continues, turn.reappeared = place.continues, place.reappeared
        turn.deviations, turn.is_held = place.deviations, is_held
        if self._policy.is_tolerant:
            _note_client(turn, place.messages, tools, hints or CallHints())
        else:
            turn.caller = self._caller(place, called_by)
        ids = self._prompt(turn, place, rendered)
        self._count(turn)
        if not self._turns:
            self._last_prompt = ids
        return PromptedTurn(turn.turn_id, ids, turn.handle)

    def sibling_turn(self, turn: PromptedTurn) -> PromptedTurn:
        """Another choice of an open call: the same prompt, sampled once more."""
        first = self._open[turn.turn_id]
        other = self._new_turn(first.prompt)
        for name in (
            *("call", "new_messages", "tools", "has_tools", "tools_digest", "base", "num_shared"),
            *("added_ids", "num_prompt", "is_extension", "rendered_length", "rendered_digest"),
            *("caller", "continues", "reappeared", "said_label", "speaker", "is_held"),
        ):
            setattr(other, name, getattr(first, name))
        return PromptedTurn(other.turn_id, turn.prompt_ids, other.handle)

    def close_turn(
        self, turn: PromptedTurn, sampled: SampledTurn, stop: Sequence[str] = ()
    ) -> Reply:
        """Record what was sampled and read it back; padding after the end is dropped.

        Args:
            turn: From `open_turn`.
            sampled: What the engine sampled; all of it is recorded, and trains.
            stop: Texts that end a turn. What is shown ends before the first of them; a next turn
                that continues this one has it in its prompt, as it was sampled.
        """
        opened = self._open.pop(turn.turn_id)
        self._keep(opened, sampled)
        opened.text, _ = before_stop(opened.sampled_text, stop)
        if opened.last_message().get("role") == RAW:
            reply = Reply(opened.text)
        else:
            reply = self._reader.read(opened.text, opened.tools, turn.prompt_ids, opened.handle)
        message = reply_message(reply)
        opened.settle((recorded_key(message, self._policy), message))
        self._turns.append(opened)
        self.last_reply = reply
        return reply

    def abort_turn(self, turn: PromptedTurn, sampled: SampledTurn | None, reason: str) -> None:
        """An open turn was broken off: keep what was sampled of it so far, if anything was.

        Args:
            turn: From `open_turn`.
            sampled: The tokens so far, those that never reached the client included.
            reason: Why, in a few words.
        """
        opened = self._open.pop(turn.turn_id)
        if sampled is not None:
            self._keep(opened, sampled)
            opened.text = opened.sampled_text
        opened.stop_reason = StopReason.ABORT
        opened.abort_reason = reason
        opened.settle(None)
        self._turns.append(opened)

    def trajectories(self, style: Style = "concat", **fields: Any) -> list[Trajectory]:
        """What trains; a prompt without samples if nothing does.

        Args:
            style: concat: one a branch, the main line's first. individual: one a turn.
            fields: The same on every trajectory: names, outcome, reward, times.
        """
        export = EpisodeExport(self._turns, self._policy)
        last = export.last_of_main() if self._policy.is_tolerant else None
        text = self.last_reply.text if last is None else _said(last)
        fields = {"final_text": text, **fields}
        prompt = self._turns[-1].prompt_ids() if self._turns else self._last_prompt
        return export.trajectories(style, fields) or [unsampled(prompt, fields)]

    def outline(self) -> list[TurnOutline]:
        """The tree of turns, without tokens, in the order they were opened."""
        return EpisodeExport(self._turns, self._policy).outline()

    def turn_record(self, turn_id: int) -> TurnRecord:
        """What a closed or broken-off turn added, for `replay`.

        Raises:
            KeyError: It is not closed.
        """
        for turn in reversed(self._turns):
            if turn.turn_id == turn_id:
                return written_down(turn)
        raise KeyError(f"turn {turn_id}: is not closed; must be one of the closed turns")

    def turn_records(self) -> list[TurnRecord]:
        """What all turns that are over added, in the order that `replay` needs."""
        return [written_down(turn) for turn in self._turns]

    def replay(self, record: TurnRecord) -> None:
        """Take up a turn of an earlier process; all of them in their order give it all again."""
        turn = taken_up(record, self._root, self._turns, self._policy)
        turn.sampled_text = self._reader.decode(turn.token_ids[: _num_said(turn)].tolist())
        turn.text = turn.sampled_text[: record.facts["num_shown"]]
        self._num_opened = max(self._num_opened, turn.turn_id + 1)
        self._turns.append(turn)
        self._count(turn)
        if turn.reply is not None:
            self.last_reply = Reply(_said(turn))

    # -- turns ---------------------------------------------------------------------------------

    def _new_turn(self, prompt: MessageNode) -> Turn:
        handle = secrets.token_hex(10) if self._policy.is_tolerant else ""
        turn = Turn(self._num_opened, handle, prompt)
        turn.opened_at = len(self._turns)
        self._num_opened += 1
        self._open[turn.turn_id] = turn
        return turn

    def _prompt(self, turn: Turn, place: Place, rendered: str) -> NDArray[np.int32]:
        """Fix the prompt's ids, by what they add to the record."""
        parent = place.continues
        turn.split = place.reason
        if parent is not None:
            tail = self._tail.ids(parent, place.messages, rendered, turn.tools)
            if not isinstance(tail, str):
                turn.extend(parent, tail)
                return turn.prompt_ids()
            is_offer = tail == TEMPLATE_REWROTE_PAST and parent.tools_digest != turn.tools_digest
            turn.split = TOOLS_CHANGED if is_offer else tail
        ids = self._template.encode_array(rendered)
        turn.share(place.node.owner, ids)
        return ids

    def _count(self, turn: Turn) -> None:
        if turn.split:
            self.splits[turn.split] += 1
            _log.debug("record splits: %s", turn.split)
        if turn.deviations:
            self.deviations.update(turn.deviations)

    def _keep(self, turn: Turn, sampled: SampledTurn) -> None:
        ids = sampled.token_ids.tolist()
        count = _length_without_padding(ids, self._template)
        turn.token_ids = np.array(sampled.token_ids[:count], np.int32)
        turn.logprobs = np.array(sampled.logprobs[:count], np.float32)
        turn.versions = np.array(sampled.versions[:count], np.int32)
        turn.stop_reason = sampled.stop_reason
        turn.has_end = count > 0 and ids[count - 1] in self._template.end_ids
        turn.sampled_text = self._reader.decode(ids[: count - turn.has_end])

    def _caller(self, place: Place, called_by: int | None) -> Turn | None:
        """A turn of the agent that a conversation was called by.

        Args:
            place: Of the conversation.
            called_by: Turn of the caller, where the client tells it.
        """
        if called_by is not None:
            return next(turn for turn in self._turns if turn.turn_id == called_by)
        origin = place.continues or _begun(place, self._turns)
        if origin is not None:
            return origin.caller
        # What begins anew beside the main agent's conversation counts as called by that.
        return next((turn for turn in self._turns if turn.caller is None), None)


def _begun(place: Place, turns: Sequence[Turn]) -> Turn | None:
    """The latest turn of the conversation that an unmatched one sends again or has changed."""
    if not place.node.depth:
        return None
    first = place.node.path()[0]
    begun = [turn for turn in reversed(turns) if turn.prompt.path()[0] is first]
    resent = [turn for turn in begun if not place.new and turn.prompt is place.node]
    return next(iter(resent or (begun if place.has_past else ())), None)


def _note_client(
    turn: Turn, messages: Sequence[Mapping[str, Any]], tools: Tools, hints: CallHints
) -> None:
    """What a client behind the gateway shows of a call: what it is for, and who speaks."""
    turn.said_label, turn.speaker = said_label(messages, hints), speaker(hints)
    if tools:
        turn.tools_digest = text_digest(json.dumps(tools, sort_keys=True))


def _said(turn: Turn) -> str:
    assert turn.reply is not None
    text: str = turn.reply.message["content"]
    return text


def _num_said(turn: Turn) -> int:
    return len(turn.token_ids) - turn.has_end


def _length_without_padding(ids: list[int], template: ChatTemplate) -> int:
    """Tokens up to the first end of turn where only padding follows it; else all."""
    ends, pad = template.end_ids, template.pad_id
    first = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    num_rest = len(ids) - first - 1
    if pad is None or num_rest < 1 or ids[first + 1 :].count(pad) < num_rest:
        return len(ids)
    return first + 1
