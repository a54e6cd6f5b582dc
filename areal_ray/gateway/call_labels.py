"""Tells the calls of an agent's main line from those beside it.

A client's own word comes first: headers and the texts that known agents ask for titles and
compaction with. Where there is none, the shape of the record tells: what offers no tools while the
main line has some, or begins anew under another system prompt, is beside it. A session id, a key or
a cache key alone tells nothing: side calls share them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from areal_ray.gateway.call import CallHints
from areal_ray.gateway.record_policy import CallLabel
from areal_ray.gateway.turn_tree import MessageNode, Turn

_SUB_AGENT_HEADERS = (
    *("x-claude-code-agent-id", "x-openai-subagent", "x-codex-parent-thread-id"),
    "x-parent-session-id",
)
_SPEAKER_HEADERS = ("x-claude-code-agent-id", "thread-id", "x-session-id")
_SYSTEM_TEXTS = (
    ("You are naming a coding session", CallLabel.TITLE),
    ("You are a title generator", CallLabel.TITLE),
    ("Generate a short, descriptive title", CallLabel.TITLE),
    ("You are a context summarization agent", CallLabel.COMPACTION),
    ("An agent tried to answer a user query but it got stuck", CallLabel.SUMMARY),
    ("cc_is_subagent=true", CallLabel.SUB_AGENT),
)
_LAST_TEXTS = (
    ("CRITICAL: Respond with TEXT ONLY", CallLabel.COMPACTION),
    ("CONTEXT CHECKPOINT COMPACTION", CallLabel.COMPACTION),
    ("Generate a short, descriptive title", CallLabel.TITLE),
)
_SYSTEM = ("system", "developer")


def said_label(messages: Sequence[Mapping[str, Any]], hints: CallHints) -> CallLabel | None:
    """What the client itself, or a text that is known, says a call is for; None = nothing."""
    kind = _request_kind(hints.headers)
    if kind == "compaction":
        return CallLabel.COMPACTION
    for message in messages:
        if message["role"] not in _SYSTEM:
            break
        for text, label in _SYSTEM_TEXTS:
            if text in message["content"]:
                return label
    if messages and messages[-1]["role"] == "user":
        for text, label in _LAST_TEXTS:
            if text in messages[-1]["content"]:
                return label
    if any(hints.headers.get(name) for name in _SUB_AGENT_HEADERS):
        return CallLabel.SUB_AGENT
    return CallLabel.SIDE if kind not in ("", "turn") else None


def speaker(hints: CallHints) -> str:
    """Which of a client's agents asks, where a header tells; the same for all its calls."""
    return next((hints.headers[name] for name in _SPEAKER_HEADERS if name in hints.headers), "")


def _request_kind(headers: Mapping[str, str]) -> str:
    try:
        told = json.loads(headers.get("x-codex-turn-metadata", "{}"))
    except (ValueError, RecursionError):
        return ""
    kind = told.get("request_kind", "") if isinstance(told, dict) else ""
    return kind if isinstance(kind, str) else ""


def labels_of(turns: Sequence[Turn]) -> dict[int, CallLabel]:
    """The label of each turn by its id.

    Args:
        turns: All of an episode, in the order they were opened.
    """
    roots = [turn for turn in turns if turn.said_label is None and turn.continues is None]
    main = next((turn for turn in roots if turn.has_tools), roots[0] if roots else None)
    found: dict[int, CallLabel] = {}
    heads: dict[MessageNode, CallLabel] = {}
    for turn in turns:
        if turn.said_label is not None:
            label = turn.said_label
        elif turn.continues is not None:
            label = found[turn.continues.turn_id]
        else:
            assert main is not None
            label = _by_shape(turn, main, heads)
            heads.setdefault(_head(turn), label)
        found[turn.turn_id] = label
    return found


def _by_shape(turn: Turn, main: Turn, heads: Mapping[MessageNode, CallLabel]) -> CallLabel:
    """The label of a conversation that begins anew."""
    if turn is main:
        return CallLabel.MAIN
    if main.has_tools and not turn.has_tools:
        return CallLabel.SIDE
    head = _head(turn)
    if head in heads:
        return heads[head]
    is_other = head is not _head(main)
    is_fresh = all(node.message["role"] != "assistant" for node in turn.prompt.path())
    return CallLabel.SUB_AGENT if is_other and is_fresh else CallLabel.MAIN


def _head(turn: Turn) -> MessageNode:
    """The last of the system messages that a prompt begins with; the tree's root if none."""
    path = turn.prompt.path()
    leading = 0
    while leading < len(path) and path[leading].message["role"] in _SYSTEM:
        leading += 1
    if leading:
        return path[leading - 1]
    root = path[0].parent if path else turn.prompt
    assert root is not None
    return root
