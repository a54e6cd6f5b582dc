"""The tree of an episode: each message once, each turn with the ids it added."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason
from areal_ray.gateway.messages import ConversationKey
from areal_ray.gateway.record_policy import CallLabel

NO_IDS: NDArray[np.int32] = np.zeros(0, np.int32)
NO_LOGPROBS: NDArray[np.float32] = np.zeros(0, np.float32)
NO_IDS.flags.writeable = NO_LOGPROBS.flags.writeable = False

NewMessages = Sequence[tuple[ConversationKey, Mapping[str, Any]]]


class MessageNode:
    """One message after those above it; what conversations begin with alike they share."""

    __slots__ = ("children", "depth", "key", "message", "owner", "parent", "replies")

    def __init__(
        self, parent: "MessageNode | None", key: ConversationKey, message: Mapping[str, Any]
    ) -> None:
        self.parent = parent
        self.key = key
        self.message = message
        """Canonical, as it was recorded first."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Messages up to this one; 0 = the root, which is none."""
        self.children: dict[ConversationKey, MessageNode] = {}
        self.replies: tuple[Turn, ...] = ()
        """Turns that sampled it, in the order they were closed."""
        self.owner: Turn | None = None
        """The first turn whose conversation holds it."""

    def grown(self, new: NewMessages) -> "MessageNode":
        """The node of the last of these messages below this one."""
        at = self
        for key, message in new:
            below = at.children.get(key)
            if below is None:
                below = at.children[key] = MessageNode(at, key, message)
            at = below
        return at

    def samples(self) -> "list[Turn]":
        """Turns whose whole reply to the conversation up to here is known."""
        return [turn for node in self.children.values() for turn in node.replies]

    def path(self) -> "list[MessageNode]":
        """From the first message to this one."""
        nodes: list[MessageNode] = []
        at = self
        while at.parent is not None:
            nodes.append(at)
            at = at.parent
        nodes.reverse()
        return nodes


class Turn:
    """One model call: the prompt it was sampled from, and what was sampled."""

    __slots__ = (
        "abort_reason",
        "added_ids",
        "base",
        "call",
        "caller",
        "continues",
        "deviations",
        "handle",
        "has_end",
        "has_tools",
        "is_extension",
        "is_held",
        "is_taken",
        "logprobs",
        "new_messages",
        "num_prompt",
        "num_shared",
        "opened_at",
        "prompt",
        "reappeared",
        "rendered_digest",
        "rendered_length",
        "reply",
        "said_label",
        "sampled_text",
        "speaker",
        "split",
        "stop_reason",
        "text",
        "token_ids",
        "tools",
        "tools_digest",
        "turn_id",
        "versions",
    )  # fmt: skip

    def __init__(self, turn_id: int, handle: str, prompt: MessageNode) -> None:
        self.turn_id = turn_id
        self.handle = handle
        self.call = turn_id
        """The first of the turns that are choices of one call."""
        self.prompt = prompt
        """Last message of the prompt; while the turn is open, the last one recorded before it."""
        self.new_messages: NewMessages = ()
        """Of an open turn: those of the prompt that follow `prompt`."""
        self.tools: Any = None
        """Of an open turn."""
        self.has_tools = False
        self.tools_digest = b""
        self.base: Turn | None = None
        """The turn whose ids this prompt begins with."""
        self.num_shared = 0
        """How many of its ids, prompt and samples."""
        self.added_ids = NO_IDS
        """[P - num_shared]"""
        self.num_prompt = 0
        self.is_extension = False
        """Whether the prompt begins with all ids of `base`, as its continuation."""
        self.is_held = False
        """Whether it was sampled under a grammar: then not by the policy alone."""
        self.rendered_length = 0
        """Characters of the prompt as the template wrote it."""
        self.rendered_digest = b""
        self.caller: Turn | None = None
        """Of a sub-agent in process: a turn of the agent that called it."""
        self.continues: Turn | None = None
        """The last turn whose reply the prompt holds, token by token or not."""
        self.reappeared: Turn | None = None
        """A turn whose reply the prompt holds in another place."""
        self.split = ""
        """Why the prompt is no extension of what it continues."""
        self.deviations: tuple[str, ...] = ()
        """How the client's history differs from the record it still matches."""
        self.said_label: CallLabel | None = None
        self.speaker = ""
        """Which of the client's agents asked, where it tells."""
        self.opened_at = 0
        """Turns that were closed before."""
        self.reply: MessageNode | None = None
        """None of a turn that was broken off."""
        self.abort_reason = ""
        self.is_taken = False
        """Whether the reply came back in a later prompt."""
        self.text = ""
        """What the agent was shown of the sampled text, tool calls and all."""
        self.sampled_text = ""
        """The same with the stop string that ended it."""
        self.token_ids = NO_IDS
        self.logprobs = NO_LOGPROBS
        self.versions = NO_IDS
        self.stop_reason = StopReason.ABORT
        self.has_end = False
        """Whether the end of the turn was sampled."""

    @property
    def num_ids(self) -> int:
        """Of prompt and samples."""
        return self.num_prompt + len(self.token_ids)

    def last_message(self) -> Mapping[str, Any]:
        """Of the prompt; of a turn that is open too."""
        return self.new_messages[-1][1] if self.new_messages else self.prompt.message

    @property
    def parent(self) -> "Turn | None":
        """The turn this one's prompt extends token by token."""
        return self.base if self.is_extension else None

    def prompt_ids(self) -> NDArray[np.int32]:
        """[P] all ids of the prompt."""
        if not self.num_shared:
            return self.added_ids
        pieces = self._prompt_pieces()
        pieces.reverse()
        return np.concatenate(pieces)

    def all_ids(self) -> NDArray[np.int32]:
        """[P + N] prompt and samples."""
        pieces = [self.token_ids, *self._prompt_pieces()]
        pieces.reverse()
        return np.concatenate(pieces)

    def _prompt_pieces(self) -> list[NDArray[np.int32]]:
        """The prompt, last piece first."""
        pieces, need, at = [self.added_ids], self.num_shared, self.base
        while need:
            assert at is not None
            num_prompt, num_shared = at.num_prompt, at.num_shared
            if need > num_prompt:
                pieces.append(at.token_ids[: need - num_prompt])
            if need > num_shared:
                pieces.append(at.added_ids[: min(need, num_prompt) - num_shared])
            need, at = min(need, num_shared), at.base
        return pieces

    def share(self, base: "Turn | None", prompt_ids: NDArray[np.int32]) -> None:
        """Keep of a prompt what follows the ids it has in common with another turn."""
        self.num_prompt = len(prompt_ids)
        if base is not None:
            self.base = base
            ids = base.all_ids()
            length = min(len(ids), len(prompt_ids))
            differ = ids[:length] != prompt_ids[:length]
            self.num_shared = int(differ.argmax()) if differ.any() else length
        if self.num_shared:
            self.added_ids = prompt_ids[self.num_shared :].copy()
        else:
            self.added_ids, self.base = prompt_ids, None

    def extend(self, base: "Turn", tail: NDArray[np.int32]) -> None:
        """Make the prompt a continuation of `base`, prompt and samples."""
        self.base, self.num_shared, self.added_ids = base, base.num_ids, tail
        self.num_prompt = base.num_ids + len(tail)
        self.is_extension = True

    def settle(self, reply: "tuple[ConversationKey, Mapping[str, Any]] | None") -> None:
        """The turn is over: its messages join the tree.

        Args:
            reply: What was sampled; None if the turn was broken off.
        """
        self.prompt = at = self.prompt.grown(self.new_messages)
        self.new_messages, self.tools = (), None
        if reply is not None:
            self.reply = at = at.grown([reply])
            at.replies = (*at.replies, self)
        while at.owner is None and at.parent is not None:
            at.owner = self
            at = at.parent
        for earlier in (self.continues, self.reappeared):
            if earlier is not None:
                earlier.is_taken = True
