"""What a record makes of the ways of agents: which turns train, and what still counts as resent."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class CallLabel(StrEnum):
    """What a model call was for."""

    MAIN = "main"
    SUB_AGENT = "sub_agent"
    TITLE = "title"
    COMPACTION = "compaction"
    """The history put into fewer words."""
    SUMMARY = "summary"
    """The last words of an agent that ran out of steps."""
    SIDE = "side"
    """Another call beside the main line."""


@dataclass(frozen=True, slots=True)
class RecordPolicy:
    """Holds for a whole run: mixing policies would mix two kinds of prompts.

    The defaults are for agents behind the gateway; `IN_PROCESS` is for those in our own process.
    """

    is_tolerant: bool = True
    """Clients rewrite what they send again: known rewritings still count as resent, calls get
    labels and turns get handles. False: a message is resent if its `message_key` is equal."""
    dropped_reasoning: Literal["splice", "branch"] = "splice"
    """What a turn sent back without its reasoning is. splice: the recorded turn, so the model sees
    its own reasoning though the agent did not send it. branch: another history."""
    untaken: Literal["drop", "train"] = "drop"
    """What becomes of siblings, several answers to one prompt. drop: where an answer came back in
    a later prompt, that one trains alone; else the newest call's. train: all of them, as an agent
    that samples several on purpose needs it."""
    aborted: Literal["drop", "train"] = "drop"
    """What was sampled of turns that were broken off."""
    trained: frozenset[CallLabel] = frozenset({CallLabel.MAIN, CallLabel.SUB_AGENT})
    """Calls that train; the others are kept and counted."""


IN_PROCESS = RecordPolicy(is_tolerant=False, untaken="train", trained=frozenset(CallLabel))
"""An agent that runs beside its recorder rewrites nothing by accident and retries nothing."""
