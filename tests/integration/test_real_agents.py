"""Agents of other projects play scripted episodes with tools: what they did is what trains."""

import asyncio
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from areal_ray.core.turn import TurnRequest
from recipes.calculator.tasks import train
from tests.support.real_agents import (
    needs_agent,
    play,
    sampled_by_call,
    serving_agents,
    session_lines,
    trained_ids,
)
from tests.support.scripted_sampler import Said
from tests.support.tiny_models import tiny_tokenizer

ADDS = Said('I will add.<tool_call>{"name": "add", "arguments": {"a" :  17, "b": 25}}</tool_call>')
HANDS_OVER = Said('<tool_call>{"name": "transfer_to_accountant", "arguments": {}}</tool_call>')
COUNTS = Said(
    'Let me see.\n<tool_call>{"name": "terminal", "arguments": {"command" :  "wc -l < notes.txt"}}'
    "</tool_call>"
)


def played(folder: Path, program: str, script: Any, *options: str) -> tuple[Any, Any]:
    """The group that training gets of a program's attempts, and the gateway that served them."""

    async def go() -> tuple[Any, Any]:
        async with serving_agents(folder, script) as replica:
            await play(replica, program, *options)
            async with asyncio.timeout(30):
                return await replica.sessions.next_ready(), replica

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("program", "package", "script"),
    [
        ("langgraph_agent", "langgraph", [ADDS, Said("42"), ADDS, Said("41")]),
        ("hermes_agent", "hermes_cli", [COUNTS, Said("3"), COUNTS, Said("4")]),
    ],
)
def test_an_agent_with_tools_becomes_one_line_of_what_was_sampled(
    tmp_path, program, package, script
):
    needs_agent(package)
    group, replica = played(tmp_path, program, script)
    calls = sampled_by_call(replica)
    assert len(calls) == len(script)
    assert [t.reward for t in group.trajectories] == [1.0, 0.0]
    assert trained_ids(group.trajectories) == [calls[0] + calls[1], calls[2] + calls[3]]
    assert not group.splits


def test_a_hand_off_is_a_second_line_of_the_same_session_and_all_of_it_trains(tmp_path):
    needs_agent("agents")
    good, circling = [HANDS_OVER, ADDS, Said("42")], [HANDS_OVER, *[ADDS] * 8]
    group, replica = played(tmp_path, "handoff_agent", [*good, *circling])
    calls = sampled_by_call(replica)
    assert len(calls) == 3 + 8, "max_turns ends the second attempt"
    first, second = session_lines(group).values()
    assert trained_ids(first) == [calls[0], calls[1] + calls[2]]
    assert trained_ids(second) == [calls[3], list(chain(*calls[4:]))]
    assert {line.reward for line in first} == {1.0}
    assert {line.reward for line in second} == {0.0}


def test_an_agent_of_anthropics_sdk_is_recorded_and_rewarded_as_it_played(tmp_path):
    needs_agent("anthropic")
    tokenizer = tiny_tokenizer()

    def adds_always(request: TurnRequest) -> Said:
        prompt = tokenizer.decode(request.prompt_ids)
        result = re.search(r"<\|im_start\|>tool\n(.*?)<", prompt)
        first, second = re.findall(r"\d+", prompt)[:2]
        return Said(result[1] if result else f"<tool>{first}+{second}</tool>")

    group, replica = played(tmp_path, "anthropic_agent", adds_always, "--tasks", "1")
    calls = sampled_by_call(replica)
    (task,) = train()[:1]
    assert (group.task_id, len(calls)) == (task.id, 16)
    expected = [a + b for a, b in zip(calls[::2], calls[1::2], strict=True)]
    assert trained_ids(group.trajectories) == expected
    reward = float("+" in task.fields["expression"])
    assert [t.reward for t in group.trajectories] == [reward] * 8
