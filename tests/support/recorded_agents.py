"""A scripted model behind a recorder, as an agent of the gateway meets it."""

import json
from typing import Any

import numpy as np

from areal_ray.core.turn import PromptedTurn
from areal_ray.gateway.call import CallHints
from areal_ray.gateway.record_policy import RecordPolicy
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.template import ChatTemplate
from tests.support.templates import ScriptedTurn, letter_tokenizer

TPL_T = (
    "{% for t in tools or [] %}[tool {{ t.function.name }}]\n{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}[/]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Writes tools, reasoning and tool calls; rewrites nothing."""

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("run", "see")
]
EXTRA_TOOL = {"type": "function", "function": {"name": "more", "parameters": {}}}


class RecordedModel:
    """Records what a client asks and a script answers, and keeps the engine's own log."""

    def __init__(self, policy: RecordPolicy | None = None, source: str = TPL_T) -> None:
        self.template = ChatTemplate(letter_tokenizer(), source)
        self.policy = policy or RecordPolicy()
        self.recorder = self.fresh_recorder()
        self.log: dict[int, list[int]] = {}
        """Turn -> ids as the engine sampled them."""
        self.prompts: dict[int, list[int]] = {}

    def fresh_recorder(self) -> Recorder:
        """An empty recorder of the same kind."""
        return Recorder(self.template, self.policy, ReplyFormat(self.template))

    def open(self, messages: Any, tools: Any = None, **headers: str) -> PromptedTurn:
        """Open a turn; header names with _ for -."""
        hints = CallHints({name.replace("_", "-"): value for name, value in headers.items()})
        turn = self.recorder.open_turn(messages, tools, hints=hints)
        self.prompts[turn.turn_id] = turn.prompt_ids.tolist()
        return turn

    def close(self, turn: PromptedTurn, text: str, *, version: int = 0, stop: Any = ()) -> Any:
        """Answer a turn; the message that a faithful client resends."""
        ids = self.template.encode(text)
        self.log[turn.turn_id] = ids
        reply = self.recorder.close_turn(turn, ScriptedTurn(ids, version=version), stop)
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.reasoning:
            message |= {"reasoning": reply.reasoning}
        if reply.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "function": {"name": c.name, "arguments": c.arguments}}
                for c in reply.tool_calls
            ]
        return message

    def say(self, messages: Any, text: str, tools: Any = None, **headers: str) -> Any:
        """One whole turn."""
        return self.close(self.open(messages, tools, **headers), text)

    def abort(self, turn: PromptedTurn, text: str, reason: str = "client left") -> None:
        """Break a turn off after `text`."""
        ids = self.template.encode(text)
        self.log[turn.turn_id] = ids
        self.recorder.abort_turn(turn, ScriptedTurn(ids), reason)

    def text(self, ids: Any) -> str:
        """Ids as text, special tokens too."""
        return "".join(self.template.token_text(int(i)) for i in ids)

    def lines(self, recorder: Recorder | None = None, **options: Any) -> Any:
        """The trajectories."""
        names = {"task_id": "t", "group_id": "g", "episode_id": "e"}
        return (recorder or self.recorder).trajectories(**names, **options)

    def trained(self, **options: Any) -> list[str]:
        """The trained text of each trajectory."""
        return [self.text(line.token_ids[line.loss_mask]) for line in self.lines(**options)]

    def trained_ids(self) -> dict[int, list[int]]:
        """Turn -> trained ids; fails where a turn is trained twice or under another prompt."""
        found: dict[int, list[int]] = {}
        for line in self.lines():
            for turn in np.unique(line.turn_ids[line.loss_mask]):
                places = np.flatnonzero(line.turn_ids == turn)
                assert int(turn) not in found, f"turn {turn} is trained twice"
                found[int(turn)] = line.token_ids[places].tolist()
                assert line.token_ids[: places[0]].tolist() == self.prompts[int(turn)]
        return found


def call(name: str, arguments: str) -> str:
    """A tool call as the model samples it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def user(text: str) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    """A system message."""
    return {"role": "system", "content": text}


def result(message: Any, text: str, index: int = 0) -> dict[str, Any]:
    """The result of a call in an assistant message."""
    return {"role": "tool", "tool_call_id": message["tool_calls"][index]["id"], "content": text}


def redumped(message: Any, **spacing: Any) -> Any:
    """The message with its arguments written anew."""
    calls = [
        {
            **c,
            "function": {
                **c["function"],
                "arguments": json.dumps(json.loads(c["function"]["arguments"]), **spacing),
            },
        }
        for c in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)
