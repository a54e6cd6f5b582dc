"""Claude Code, Codex and opencode themselves, at a model that plays a script.

Each thinks, runs two commands at once, asks a sub-agent, and answers. Variables name the programs:
CLAUDE_CODE, CODEX, OPENCODE.
"""

import asyncio
import json
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from areal_ray.core.turn import TurnRequest
from areal_ray.gateway.limits import EdgeLimits
from areal_ray.gateway.record_policy import CallLabel
from areal_ray.gateway.turn_matching import REASONING_DROPPED
from tests.support.coding_agents import (
    CODEX_IDLE_S,
    TASK,
    Pointing,
    Traffic,
    claude_code,
    codex,
    opencode,
    play,
    program_of,
)
from tests.support.real_agents import sampled_by_call, serving_agents, session_lines, trained_ids
from tests.support.scripted_sampler import Said
from tests.support.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
THOUGHT = "<think>\nCounting is work.\n</think>\n\n"
SUB_TASK = "SUBTASK: say 42"
COUNT, LOOK = "sleep 1; wc -l < notes.txt", "cat notes.txt"
"""The second ends first: agents that send what came first show it."""


@dataclass(frozen=True)
class Habits:
    """An agent, and how its tools are called."""

    variable: str
    pointing: Pointing
    runs: str
    """Tool, and the argument it takes the command by."""
    takes: str
    delegates: tuple[str, dict[str, str]]
    waits: bool = False
    """Whether a sub-agent is waited for by a tool."""
    labels: tuple[CallLabel, ...] = ()
    """Of calls before the main line's."""

    def script(self, request: TurnRequest) -> Said:
        """What the model says to a prompt."""
        text = TOKENIZER.decode(request.prompt_ids)
        if "You are a title generator" in text:
            return Said("Counting lines")
        if TASK not in text:
            return Said(f"{THOUGHT}It is 42.")
        turn = text.count("<|im_start|>assistant\n") - 1
        if turn == 0:
            calls = [written(self.runs, {self.takes: told, **DESCRIBED}) for told in (COUNT, LOOK)]
            return Said(f"{THOUGHT}  Let me see.\n\n{''.join(calls)}")
        if turn == 1:
            return Said(f"{THOUGHT}And ask.\n{written(*self.delegates)}")
        if turn == 2 and self.waits:
            (agent,) = re.findall(r'"agent_id":\s*"([^"]+)"', text)
            return Said(written("wait_agent", {"targets": [agent]}))
        return Said(f"{THOUGHT}\n 3  \n")


DESCRIBED = {"description": "look"}


def written(name: str, arguments: dict[str, Any]) -> str:
    """A call with the spacing of nobody."""
    told = json.dumps(arguments, separators=(" ,", " : "))
    return f'<tool_call>{{"name": "{name}", "arguments": {told}}}</tool_call>'


ASKS = {"description": "say it", "prompt": SUB_TASK}
TITLED = (CallLabel.TITLE,)


def of_opencode(package: str) -> Habits:
    delegates = ("task", {**ASKS, "subagent_type": "general"})
    return Habits("OPENCODE", opencode(package), "bash", "command", delegates, labels=TITLED)


AGENTS = {
    "claude-code": Habits(
        "CLAUDE_CODE",
        claude_code,
        "Bash",
        "command",
        ("Agent", {**ASKS, "subagent_type": "general-purpose"}),
    ),
    "codex": Habits(
        "CODEX", codex, "exec_command", "cmd", ("spawn_agent", {"message": SUB_TASK}), waits=True
    ),
    "opencode-chat": of_opencode("@ai-sdk/openai-compatible"),
    "opencode-messages": of_opencode("@ai-sdk/anthropic"),
    "opencode-responses": of_opencode("@ai-sdk/openai"),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", AGENTS)
def test_a_coding_agent_becomes_a_main_line_and_a_sub_agents_line_of_what_was_sampled(
    tmp_path: Path, name: str
) -> None:
    habits, traffic = AGENTS[name], Traffic()
    program = program_of(habits.variable)

    async def go() -> None:
        async with serving_agents(tmp_path / "journal", habits.script, traffic.watch) as replica:
            replica.sessions.open_slot()
            _, told, _ = await replica.rl("/rl/start_session", task_id="t")
            key = told["api_key"]
            code, said = await asyncio.to_thread(
                play, habits.pointing, program, replica.url, key, tmp_path
            )
            assert code == 0, said
            assert "3" in said.split()
            recorder = replica.sessions.book.sessions[told["session_id"]].recorder
            labels = [turn.label for turn in recorder.outline()]
            await replica.rl("/rl/set_reward", key, reward=1.0)
            await replica.rl("/rl/end_session", key)
            async with asyncio.timeout(30):
                group = await replica.sessions.next_ready()
        calls = sampled_by_call(replica)
        by_label = {
            label: [ids for ids, of in zip(calls, labels, strict=True) if of is label]
            for label in set(labels)
        }
        assert labels.count(CallLabel.SUB_AGENT) == 1
        assert [one for one in labels if one not in (CallLabel.MAIN, CallLabel.SUB_AGENT)] == [
            *habits.labels
        ]
        (lines,) = session_lines(group).values()
        main = [*chain(*by_label[CallLabel.MAIN])]
        assert trained_ids(lines) == [main, *by_label[CallLabel.SUB_AGENT]]
        assert not group.splits
        assert set(recorder.deviations) <= {REASONING_DROPPED}
        in_order(TOKENIZER.decode(lines[0].token_ids))

    asyncio.run(go())
    models = [answer for answer in traffic.statuses if not answer[1].startswith("/rl/")]
    assert {status for _, _, status, _ in traffic.statuses} == {200}, traffic.statuses
    assert {kind for *_, kind in models} == {"text/event-stream; charset=utf-8"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["claude-code", "codex", "opencode-chat"])
def test_a_first_token_that_takes_its_time_is_waited_for_and_sampled_once(
    tmp_path: Path, name: str
) -> None:
    habits, traffic = AGENTS[name], Traffic()
    program = program_of(habits.variable)

    def late(request: TurnRequest) -> Said:
        is_title = "You are a title generator" in TOKENIZER.decode(request.prompt_ids)
        return Said("3", pause_s=0.0 if is_title else 2.5 * CODEX_IDLE_S, chunk_tokens=99)

    async def go() -> None:
        edge = EdgeLimits(keep_alive_s=CODEX_IDLE_S / 4)
        async with serving_agents(tmp_path / "journal", late, traffic.watch, edge) as replica:
            replica.sessions.open_slot()
            _, told, _ = await replica.rl("/rl/start_session", task_id="t")
            code, said = await asyncio.to_thread(
                play, habits.pointing, program, replica.url, told["api_key"], tmp_path
            )
            assert code == 0, said
            assert len(replica.sampler.sampled) == 1 + len(habits.labels)
            assert not replica.sampler.aborted

    asyncio.run(go())


def in_order(line: str) -> None:
    """The results stand in the order of their calls, whichever came first."""
    _, *results = line.split("<|im_start|>tool\n")
    first, second = (result.partition("<|im_end|>")[0] for result in results[:2])
    assert "3" in first.split()
    assert "one" not in first
    assert second.split()[-3:] == ["one", "two", "three"]
