"""Sessions in the manners of coding agents over a socket, in the shapes that were seen of them."""

import asyncio
import json
import signal
import sys
from typing import Any

import aiohttp
import pytest

from areal_ray.gateway.record_policy import CallLabel
from areal_ray.gateway.turn_matching import BROKEN_OFF
from tests.support.gateway import Answered, Gateway, ask
from tests.support.request_bodies import ANTHROPIC_ADD, DIALECTS, SCHEMA, Spoken
from tests.support.scripted_sampler import Said
from tests.support.sdk_clients import SHOWS_ALL, check_extends, prompt_text, run
from tests.support.tiny_models import tiny_tokenizer

ADDS = '<tool_call>{"name": "add", "arguments": {"a" :  1}}</tool_call>'
SEES = '<tool_call>{"name": "add", "arguments": {"a" :  2}}</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
FINAL = Said("\n 3  \n")
LONG = "and so on " * 400
TASK = "Count the lines."
TEXTS = ("one", "two")
TITLE = [{"type": "text", "text": "You are naming a coding session. Say a title."}]
TITLE_FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}
TOKENIZER = tiny_tokenizer()
COMPACT = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. Sum up."


@pytest.mark.parametrize("spoken", DIALECTS.values(), ids=DIALECTS)
def test_results_of_parallel_calls_stand_in_the_order_of_the_calls_whichever_came_first(spoken):
    """As Claude Code sends them; a template shows no ids, so that the order alone tells."""

    async def test(gateway: Gateway) -> None:
        first = await ask(gateway, spoken.start, path=spoken.path)
        history = [*spoken.start[spoken.history], *spoken.turn(first.json())]
        for items in results(spoken, first):
            history += items
        second = await ask(gateway, {**spoken.start, spoken.history: history}, path=spoken.path)
        assert second.status == 200
        assert "tool\none<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>" in prompt_text(gateway)
        history += spoken.turn(second.json())
        history.append({"role": "user", "content": "And?"})
        await ask(gateway, {**spoken.start, spoken.history: history}, path=spoken.path)
        check_extends(gateway)

    run([Said(f"See:{ADDS}{SEES}"), FINAL], test, chat_template=SHOWS_ALL)


def results(spoken: Spoken, answer: Answered) -> list[list[Any]]:
    """The results of two calls, the second's first."""
    told = spoken.results(answer.json())
    if len(told) == 1:  # all in one message
        blocks = told[0]["content"]
        named = [{**block, "content": text} for block, text in zip(blocks, TEXTS, strict=True)]
        return [[{**told[0], "content": named[::-1]}]]
    name = "output" if "output" in told[0] else "content"
    return [[{**one, name: text}] for one, text in zip(told, TEXTS, strict=True)][::-1]


def claude_code(agent: str, messages: list[Any], tools: Any, **more: Any) -> dict[str, Any]:
    """A body of Claude Code's, of its main line or of a sub-agent."""
    mark = " cc_is_subagent=true;" if agent else ""
    head = f"x-anthropic-billing-header: cc_version=2.1.332.27e; cc_entrypoint=cli;{mark}"
    system = [head, "You are a Claude agent.", f"You are working with {agent or 'the user'}."]
    return {
        "model": "m",
        "max_tokens": 32000,
        "system": [{"type": "text", "text": text} for text in system],
        "messages": messages,
        "tools": tools,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "metadata": {"user_id": '{"device_id": "d", "account_uuid": "", "session_id": "s"}'},
        **more,
    }


def user(text: str) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def test_claude_codes_title_main_line_sub_agent_and_compaction_under_one_key_are_told_apart():
    async def test(gateway: Gateway) -> None:
        async with aiohttp.ClientSession() as session:

            async def call(body: Any, agent: str = "") -> list[Any]:
                headers = {"x-claude-code-session-id": "s", "x-api-key": "key"}
                headers |= {"x-claude-code-agent-id": agent} if agent else {}
                url = f"{gateway.url}/v1/messages?beta=true"
                async with session.post(url, json=body, headers=headers) as answer:
                    assert answer.status == 200
                    content: list[Any] = (await answer.json())["content"]
                    return content

            title = claude_code("", [user(TASK)], [], system=TITLE, output_config=TITLE_FORMAT)
            main = [user(TASK), {"role": "system", "content": "It is Monday."}]
            tools = [ANTHROPIC_ADD, {"name": "Agent", "input_schema": SCHEMA}]
            _, said = await asyncio.gather(call(title), call(claude_code("", main, tools)))
            block = {"type": "tool_result", "tool_use_id": said[-1]["id"], "content": "launched"}
            main += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": [block]},
            ]
            sub = claude_code("a1", [user("SUBTASK: say 42")], [ANTHROPIC_ADD])
            _, said = await asyncio.gather(call(sub, "a1"), call(claude_code("", main, tools)))
            main += [{"role": "assistant", "content": said}, user("[SYSTEM NOTIFICATION] done")]
            main.append({"role": "assistant", "content": await call(claude_code("", main, tools))})
            shortened = [
                {**m, "content": [b for b in m["content"] if b.get("type") != "thinking"]}
                if m["role"] == "assistant"
                else m
                for m in main
            ]
            await call(claude_code("", [*shortened, user(COMPACT)], tools))
            await call(claude_code("", [user("So far: 3"), user("Go on.")], tools))
        labelled = {
            label: [turn.turn_id for turn in gateway.recorder.outline() if turn.label is label]
            for label in CallLabel
        }
        one = (CallLabel.TITLE, CallLabel.SUB_AGENT, CallLabel.COMPACTION)
        assert [len(labelled[label]) for label in one] == [1, 1, 1]
        assert gateway.recorder.left_out == {"title": 1, "compaction": 1}
        assert not gateway.recorder.splits
        lines = gateway.recorder.trajectories(task_id="t", group_id="g", episode_id="e")
        trained = [line.token_ids[line.loss_mask].tolist() for line in lines]
        by_turn = {
            turn.turn_id: gateway.sampler.sampled[request.request_id].token_ids.tolist()
            for turn, request in zip(
                gateway.recorder.outline(), gateway.sampler.requests, strict=True
            )
        }
        *going, last = labelled[CallLabel.MAIN]
        assert trained == [
            [token for turn in going for token in by_turn[turn]],
            by_turn[last],
            by_turn[labelled[CallLabel.SUB_AGENT][0]],
        ]

    def script(request: Any) -> Said:
        text = TOKENIZER.decode(request.prompt_ids)
        if "naming a coding session" in text:
            return Said('{"title": "Lines"}')
        if COMPACT in text:
            return Said("<summary>3</summary>")
        if TASK in text and "<|im_start|>assistant\n<" not in text:
            return Said(THOUGHT + '<tool_call>{"name": "Agent", "arguments": {}}</tool_call>')
        return Said(f"{THOUGHT}It is {len(text)}.")

    run(script, test, chat_template=SHOWS_ALL)


STREAMS = """
import json, signal, sys, urllib.request
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
body = json.loads(sys.argv[2])
request = urllib.request.Request(sys.argv[1], json.dumps(body).encode(), {"x-api-key": "key"})
for line in urllib.request.urlopen(request):
    print(line.decode().strip(), flush=True)
"""
"""A client in a process of its own."""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("spoken", DIALECTS.values(), ids=DIALECTS)
def test_an_agent_killed_in_mid_stream_leaves_an_aborted_turn_with_the_tokens_so_far(spoken, how):
    async def test(gateway: Gateway) -> None:
        body = json.dumps({**spoken.start, "stream": True})
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", STREAMS, gateway.url + spoken.path, body),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert agent.stdout is not None
        num_deltas = 0
        while num_deltas < 5:
            num_deltas += b"delta" in await agent.stdout.readline()
        agent.send_signal(how)
        await agent.wait()
        await gateway.until_idle()
        (request,) = gateway.sampler.requests
        assert gateway.sampler.aborted == [request.request_id]
        assert gateway.service.counts.num_gone == 1
        (turn,) = gateway.recorder.outline()
        assert turn.abort_reason
        kept = gateway.recorder.turn_record(turn.turn_id).token_ids.tolist()
        whole = gateway.sampler.tokenizer.encode(LONG, add_special_tokens=False)
        assert 0 < len(kept) < len(whole)
        assert kept == whole[: len(kept)]
        (line,) = gateway.recorder.trajectories(task_id="t", group_id="g", episode_id="e")
        assert not line.loss_mask.any()

    run([Said(LONG, pause_s=0.02, hangs=True)], test)


@pytest.mark.parametrize("partial", ["", "and so"])
@pytest.mark.parametrize("spoken", DIALECTS.values(), ids=DIALECTS)
def test_an_answer_that_was_cut_and_is_to_go_on_is_another_branch(spoken, partial):
    """As Claude Code, hermes and Codex go on: with what came through, or nothing of it."""

    async def test(gateway: Gateway) -> None:
        cut = await ask(gateway, {**spoken.start, "stream": True}, path=spoken.path)
        assert cut.status == 200
        assert "replica 3 died" in cut.text
        goes_on = {"role": "user", "content": "Continue."}
        history = [
            *spoken.start[spoken.history],
            {"role": "assistant", "content": partial},
            goes_on,
        ]
        body = {**spoken.start, spoken.history: history}
        first = await ask(gateway, body, path=spoken.path)
        more = [*history, *spoken.turn(first.json()), goes_on]
        await ask(gateway, {**body, spoken.history: more}, path=spoken.path)
        assert gateway.recorder.splits == {BROKEN_OFF: 1}
        assert gateway.recorder.left_out == {"aborted": 1}
        (line,) = gateway.recorder.trajectories(task_id="t", group_id="g", episode_id="e")
        answers = [turn.token_ids.tolist() for turn in gateway.sampler.sampled.values()]
        assert line.token_ids[line.loss_mask].tolist() == [*answers[0], *answers[1]]
        seen = prompt_text(gateway)
        assert seen.count("and so on") == 0

    run([Said("and so on", error="replica 3 died"), Said("well"), FINAL], test)
