"""Token-in-token-out record of one episode: what the model saw and sampled, id by id.

A conversation that continues a recorded turn gets as prompt the recorded ids, then the tail of the
assistant turn as the template closes it, then the rendered new messages: text of the model's is
never encoded again. Where the template or the agent rewrote the past, the prompt is rendered afresh
and the record *splits*: a new branch, whose repeated past carries no loss, so that each sampled
token is trained once. Splits are counted by reason.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason, Trajectory
from areal_ray.core.turn import PromptedTurn, Reply, SampledTurn
from areal_ray.gateway.messages import MessageKey, canonical, message_key, reply_key
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.text_stream import before_stop

_log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]

TEMPLATE_REWROTE_PAST = "the template rewrote earlier turns"
TEMPLATE_REWROTE_TURN = "the template rewrote the assistant turn"
AGENT_EDITED = "the agent edited the history"
TOKENS_MERGE = "the tokenizer merges across the turn border"


@dataclass(slots=True)
class _Turn:
    """One sampled turn and the prompt it was sampled from."""

    turn_id: int
    parent: "_Turn | None"
    """The turn this one's prompt extends token by token."""
    prompt_ids: NDArray[np.int32]
    rendered: str
    """The prompt as the template wrote it."""
    keys: tuple[MessageKey, ...]
    """Of the messages in the prompt; the reply's own once sampled."""
    tools: Sequence[Mapping[str, Any]]
    """What was offered."""
    caller: int = -1
    """Branch of the agent that called this one as its sub-agent; -1 = the main agent's."""
    branch_id: int = -1
    text: str = ""
    """What the agent was shown of the sampled text, tool calls and all."""
    sampled_text: str = ""
    """The same with the stop string that ended it."""
    token_ids: NDArray[np.int32] | None = None
    logprobs: NDArray[np.float32] | None = None
    versions: NDArray[np.int32] | None = None
    stop_reason: StopReason = StopReason.ABORT
    has_end: bool = False
    """Whether the end of the turn was sampled."""
    is_extended: bool = False
    """Whether a later turn already continues this branch from here."""


class Recorder:
    """Record of one episode; satisfies `core.turn.TurnRecorder`.

    open_turn and close_turn may interleave between sub-agents; a turn that is never closed (its
    request failed or was cancelled) leaves no trace.
    """

    def __init__(self, template: ChatTemplate, reader: ReplyFormat | None = None) -> None:
        self._template = template
        self._reader = reader or ReplyFormat(template)
        self._open: dict[int, _Turn] = {}
        self._turns: list[_Turn] = []
        self._num_opened = 0
        self._num_branches = 0
        self._last_prompt: NDArray[np.int32] = np.zeros(0, np.int32)
        self.splits: Counter[str] = Counter()
        """Conversations that stopped extending their record, by reason."""
        self.last_reply = Reply("")
        """What the model said last."""

    @property
    def last_stop_reason(self) -> StopReason:
        """Why the last sampled turn ended; ABORT if none was."""
        return self._turns[-1].stop_reason if self._turns else StopReason.ABORT

    @property
    def num_turns(self) -> int:
        """Turns sampled so far."""
        return len(self._turns)

    def open_turn(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        called_by: int | None = None,
    ) -> PromptedTurn:
        """Fix the prompt of the next model call; see `core.turn.TurnRecorder`.

        Raises:
            ValueError: A message cannot be read or the template refuses the conversation.
        """
        plain = [canonical(message, index) for index, message in enumerate(messages)]
        keys = tuple(message_key(message) for message in plain)
        rendered = self._template.render(plain, tools)
        parent = self._parent_of(keys)
        caller = self._caller(parent or self._begun(keys), called_by)
        ids, parent = self._prompt(parent, plain, keys, rendered, tools)
        turn = _Turn(
            turn_id=self._num_opened,
            parent=parent,
            prompt_ids=ids,
            rendered=rendered,
            keys=keys,
            tools=tools or (),
            caller=caller,
        )
        self._num_opened += 1
        self._open[turn.turn_id] = turn
        self._last_prompt = ids
        return PromptedTurn(turn.turn_id, ids)

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
        ids = sampled.token_ids.tolist()
        count = _length_without_padding(ids, self._template)
        opened.token_ids = np.asarray(sampled.token_ids[:count], np.int32)
        opened.logprobs = np.asarray(sampled.logprobs[:count], np.float32)
        opened.versions = np.asarray(sampled.versions[:count], np.int32)
        opened.stop_reason = sampled.stop_reason
        opened.has_end = count > 0 and ids[count - 1] in self._template.end_ids
        opened.sampled_text = self._reader.decode(ids[: count - opened.has_end])
        opened.text, _ = before_stop(opened.sampled_text, stop)
        reply = self._reader.read(opened.text, opened.tools, opened.prompt_ids)
        parent = opened.parent
        if parent is None or parent.is_extended:  # another turn got there first: fork
            opened.branch_id = self._num_branches
            self._num_branches += 1
        else:
            opened.branch_id = parent.branch_id
            parent.is_extended = True
        opened.keys = (*opened.keys, reply_key(reply))
        self._turns.append(opened)
        self.last_reply = reply
        return reply

    def trajectories(self, **fields: Any) -> list[Trajectory]:
        """One a branch, in the order they began; a prompt without samples if nothing was sampled.

        Args:
            fields: The same on every branch: names, outcome, reward, times.
        """
        fields = {"final_text": self.last_reply.text, **fields}
        if not self._turns:
            return [_unsampled(self._last_prompt, fields)]
        leaves = sorted(
            (turn for turn in self._turns if not turn.is_extended), key=lambda turn: turn.branch_id
        )
        return [self._trajectory(leaf, fields) for leaf in leaves]

    # -- prompts -------------------------------------------------------------------------------

    def _parent_of(self, keys: tuple[MessageKey, ...]) -> _Turn | None:
        """The latest turn whose whole conversation, its reply included, begins `keys`."""
        if not self._turns:
            return None
        matching = (turn for turn in self._turns if keys[: len(turn.keys)] == turn.keys)
        return max(matching, key=lambda turn: (len(turn.keys), turn.turn_id), default=None)

    def _prompt(
        self,
        parent: _Turn | None,
        messages: Messages,
        keys: tuple[MessageKey, ...],
        rendered: str,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> tuple[NDArray[np.int32], _Turn | None]:
        if parent is None:
            begun = self._begun(keys)
            if begun is not None and begun.keys[:-1] != keys:
                self._split(AGENT_EDITED)
            return self._template.encode_array(rendered), None
        tail = self._tail(parent, messages, rendered, tools)
        if not isinstance(tail, str):
            assert parent.token_ids is not None
            return np.concatenate((parent.prompt_ids, parent.token_ids, tail)), parent
        self._split(tail)
        return self._template.encode_array(rendered), None

    def _begun(self, keys: tuple[MessageKey, ...]) -> _Turn | None:
        """The latest turn of the conversation that an unmatched one sends again or has changed."""
        begun = [turn for turn in self._turns if turn.keys[0] == keys[0]]
        resent = [turn for turn in begun if turn.keys[:-1] == keys]
        has_past = any(key[0] == "assistant" for key in keys)
        return next(reversed(resent or (begun if has_past else [])), None)

    def _caller(self, origin: _Turn | None, called_by: int | None) -> int:
        """Branch that the agent of a conversation was called from.

        Args:
            origin: A turn of the same conversation.
            called_by: Turn of the caller, where the client tells it.
        """
        if called_by is not None:
            return next(turn.branch_id for turn in self._turns if turn.turn_id == called_by)
        if origin is not None:
            return origin.caller
        # What begins anew beside the main agent's conversation counts as called by that.
        return next((turn.branch_id for turn in self._turns if turn.caller < 0), -1)

    def _tail(
        self,
        parent: _Turn,
        messages: Messages,
        rendered: str,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> NDArray[np.int32] | str:
        """Ids to append to the parent's prompt and samples, or why they cannot be extended."""
        if not rendered.startswith(parent.rendered):
            return TEMPLATE_REWROTE_PAST
        body = rendered[len(parent.rendered) :]
        length = self._length_as_rendered(parent, messages, body, tools)
        if length is None:
            return TEMPLATE_REWROTE_TURN
        closing = body[length:]
        assert parent.token_ids is not None
        if parent.has_end:
            end = self._template.token_text(int(parent.token_ids[-1]))
            closing = closing.removeprefix(end)
        elif self._merges(parent.sampled_text, closing):
            return TOKENS_MERGE
        return self._template.encode_array(closing)

    def _length_as_rendered(
        self,
        parent: _Turn,
        messages: Messages,
        body: str,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> int | None:
        """Characters that the parent's reply takes at the start of `body`; None if rewritten."""
        for spelling in (parent.text, parent.text.strip()):
            if body.startswith(spelling + self._template.turn_close):
                return len(spelling)
        # Not as sampled: find where the template ends the turn, and see whether it says the same.
        upto = messages[: len(parent.keys)]
        whole = self._template.render(upto, tools, add_generation_prompt=False)
        close = self._template.turn_close
        said = whole.removeprefix(parent.rendered).removesuffix(close)
        if not whole.startswith(parent.rendered) or not body.startswith(said + close):
            return None
        again = self._reader.read(said, parent.tools, parent.prompt_ids)
        return len(said) if reply_key(again) == parent.keys[-1] else None

    def _merges(self, said: str, closing: str) -> bool:
        """Whether encoding both at once differs from one after the other at the border."""
        if not said or not closing or self._template.starts_with_special(closing):
            return False
        encode = self._template.encode
        return encode(said + closing) != encode(said) + encode(closing)

    def _split(self, reason: str) -> None:
        self.splits[reason] += 1
        _log.debug("record splits: %s", reason)

    def _trajectory(self, leaf: _Turn, fields: Mapping[str, Any]) -> Trajectory:
        assert leaf.token_ids is not None
        total = len(leaf.prompt_ids) + len(leaf.token_ids)
        token_ids = np.concatenate([leaf.prompt_ids, leaf.token_ids])
        mask = np.zeros(total, np.bool_)
        logprobs = np.zeros(total, np.float32)
        versions = np.empty(total, np.int32)
        versions.fill(-1)
        turn_ids = np.empty(total, np.int16)
        turn_ids.fill(-1)
        turn: _Turn | None = leaf
        while turn is not None and turn.branch_id == leaf.branch_id:
            assert turn.token_ids is not None
            assert turn.logprobs is not None
            assert turn.versions is not None
            start = len(turn.prompt_ids)
            span = slice(start, start + len(turn.token_ids))
            mask[span] = True
            logprobs[span] = turn.logprobs
            versions[span] = turn.versions
            turn_ids[span] = turn.turn_id
            turn = turn.parent  # a parent on another branch is trained there
        return Trajectory(
            token_ids=token_ids,
            loss_mask=mask,
            behaviour_logprobs=logprobs,
            versions=versions,
            turn_ids=turn_ids,
            branch_id=leaf.branch_id,
            parent_branch_id=leaf.caller,
            stop_reason=leaf.stop_reason,
            **fields,
        )


def _length_without_padding(ids: list[int], template: ChatTemplate) -> int:
    """Tokens up to the first end of turn where only padding follows it; else all."""
    ends, pad = template.end_ids, template.pad_id
    first = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    num_rest = len(ids) - first - 1
    if pad is None or num_rest < 1 or ids[first + 1 :].count(pad) < num_rest:
        return len(ids)
    return first + 1


def _unsampled(prompt_ids: NDArray[np.int32], fields: Mapping[str, Any]) -> Trajectory:
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
