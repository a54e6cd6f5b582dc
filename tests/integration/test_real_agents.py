"""Agents of other projects play scripted episodes with tools: what they did is what trains."""

import asyncio
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from areal_ray import launch
from areal_ray.core.turn import TurnRequest
from areal_ray.run_listing import read_lineage
from areal_ray.telemetry.rows import read_rows
from areal_ray.telemetry.sinks import METRICS_FILE
from recipes.calculator.tasks import train
from tests.support.online import program_at, sessions_trained
from tests.support.real_agents import (
    AGENT_PYTHON,
    needs_agent,
    output_of,
    play,
    sampled_by_call,
    serving_agents,
    session_lines,
    trained_ids,
)
from tests.support.scripted_sampler import Said
from tests.support.tiny_models import tiny_tokenizer
from tests.support.whole_runs import ROOT, Runs, episodes_of

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
        ("hermes_agent", "hermes_cli", [COUNTS, Said("3"), COUNTS, Said("none")]),
    ],
)
def test_an_agent_with_tools_becomes_one_line_of_what_was_sampled(
    tmp_path, program, package, script
):
    needs_agent(package)
    group, replica = played(tmp_path, program, script)
    calls = sampled_by_call(replica)
    assert len(calls) == len(script)
    good, bad = [t.reward for t in group.trajectories]
    assert good == 1.0
    assert 0.0 <= bad < 0.1
    assert trained_ids(group.trajectories) == [calls[0] + calls[1], calls[2] + calls[3]]
    assert not group.splits


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_what_hermes_does_is_trained_on_and_lineage_names_its_sessions(runs: Runs) -> None:
    """By a model that writes nonsense: what it wrote in hermes' own calls is what trains."""
    needs_agent("hermes_cli")
    handle = launch(
        ROOT / "recipes/online/hermes.yaml",
        [
            f"cluster.fileroot={runs.folder}",
            "steps=1",
            "telemetry={console: 'off', dump_every_steps: 1, dump_groups: 1}",
        ],
    )
    log = runs.folder / "hermes"
    options = ("--groups", "1", "--toolsets", "terminal")
    with program_at(handle, log, "hermes_agent", *options, python=AGENT_PYTHON):
        summary = handle.wait(800)
    assert (summary.outcome, summary.steps, summary.version) == ("finished", 1, 1)
    taken = sessions_trained(handle.folder)
    assert len(set(taken)) == len(taken) == 2
    shaped = read_lineage(handle.folder, 1).record
    assert list(shaped.sessions) == taken
    (group,) = shaped.groups
    assert all(0.0 <= reward <= 1.0 for reward in group.rewards)
    (row,) = [r for r in read_rows(handle.folder / METRICS_FILE) if r["kind"] == "step"]
    episodes = episodes_of(handle.folder)
    assert len(episodes) >= 2
    sampled = sum(token["mask"] for episode in episodes for token in episode["tokens"])
    assert row["learner/trained_tokens"] == sampled > 0
    for episode in episodes:
        prompt = "".join(token["text"] for token in episode["tokens"] if not token["mask"])
        assert "Count the lines of notes.txt" in prompt


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
    needs_agent("numpy")  # the program uses parts of areal_ray
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


@pytest.mark.parametrize("stream", ["", "stream"])
@pytest.mark.parametrize(
    ("client", "package"),
    [
        ("smolagents", "smolagents"),
        ("pydantic_ai_chat", "pydantic_ai"),
        ("pydantic_ai_responses", "pydantic_ai"),
        ("pydantic_ai_messages", "pydantic_ai"),
        ("litellm_chat", "litellm"),
        ("litellm_messages", "litellm"),
    ],
)
def test_clients_that_stumble_over_missing_fields_come_to_their_answer(
    tmp_path, client, package, stream
):
    needs_agent(package)
    final = '<tool_call>{"name": "final_answer", "arguments": {"answer": "42"}}</tool_call>'
    script = [ADDS, Said(final if client == "smolagents" else "42")]

    async def go() -> tuple[str, Any]:
        async with serving_agents(tmp_path, script) as replica:
            replica.sessions.open_slot()
            _, told, _ = await replica.rl("/rl/start_session", task_id="t")
            program = str(ROOT / "tests/support/strict_clients.py")
            asked = [client, replica.url, told["api_key"], *filter(None, [stream])]
            return await output_of(program, *asked), replica

    said, replica = asyncio.run(go())
    assert said.splitlines()[-1] == "ANSWER 42"
    assert len(replica.sampler.requests) == 2
    counts = replica.service.counts
    assert counts.num_refused == counts.num_failed == counts.num_gone == 0
