"""Anthropic's Messages over a socket: the real SDK, and requests in the shapes of real agents."""

import json
from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic import AsyncAnthropic

from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.limits import EdgeLimits
from tests.support.gateway import Gateway
from tests.support.scripted_sampler import Said
from tests.support.sdk_clients import (
    CALL,
    HELLO,
    SHOWS_ALL,
    THOUGHT,
    check_extends,
    prompt_text,
    run,
)

ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
START = [{"role": "user", "content": HELLO}]
THINKS = {"type": "enabled", "budget_tokens": 1024}
TURN = Said(f"{THOUGHT}  Let me check with a tool.\n\n{CALL}")
FINAL = Said("\n The answer is 42.  \n\n")
PATH = "/v1/messages?beta=true"


def client(gateway: Gateway) -> AsyncAnthropic:
    """The real SDK, pointed here."""
    return AsyncAnthropic(base_url=gateway.url, api_key="key", max_retries=0)


async def whole(gateway: Gateway, **body: Any) -> Any:
    """The message to a call that is not streamed."""
    async with client(gateway) as sdk:
        return await sdk.messages.create(**{"model": "m", "max_tokens": 512, **body})


async def final(gateway: Gateway, **body: Any) -> Any:
    """What the SDK's stream helper makes of a streamed call."""
    async with (
        client(gateway) as sdk,
        sdk.messages.stream(**{"model": "m", "max_tokens": 512, **body}) as stream,
    ):
        return await stream.get_final_message()


async def raw(gateway: Gateway, body: Any, **headers: str) -> list[tuple[str, Any]]:
    """The named events of a streamed call, as Claude Code asks for them."""
    body = {"model": "m", "max_tokens": 128000, "stream": True, **body}
    keys = {"x-api-key": "key", "anthropic-beta": "news-2027-01-01", **headers}
    async with (
        aiohttp.ClientSession(headers=keys) as session,
        session.post(gateway.url + PATH, json=body) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
    events = []
    for event in text.strip().split("\n\n"):
        name, told = event.split("\n")
        content = json.loads(told.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        events.append((content["type"], content))
    return events


def result(call: Any, content: Any, **more: Any) -> dict[str, Any]:
    """The user message that answers a call."""
    block = {"type": "tool_result", "tool_use_id": call.id, "content": content, **more}
    return {"role": "user", "content": [block]}


def test_a_plain_stream_is_one_text_block_and_no_tool_block_whatever_tools_there_are():
    async def test(gateway: Gateway) -> None:
        for more in ({}, {"tools": []}, {"tools": [ADD]}):
            events = await raw(gateway, {"messages": START, **more})
            kinds = [kind for kind, _ in events]
            assert [k for i, k in enumerate(kinds) if k != kinds[i - 1]] == [
                *("message_start", "content_block_start", "content_block_delta"),
                *("content_block_stop", "message_delta", "message_stop"),
            ]
            assert events[1][1]["content_block"] == {"type": "text", "text": "", "citations": None}
            deltas = [told["delta"]["text"] for kind, told in events if "block_delta" in kind]
            assert "".join(deltas) == "hi"
            start, end = events[0][1]["message"], events[-2][1]
            assert start["usage"]["input_tokens"] == end["usage"]["input_tokens"] > 0
            assert end["usage"]["output_tokens"] == 2
            assert end["delta"]["stop_reason"] == "end_turn"
            assert start["id"].startswith("msg_")
            assert start["model"] == "m"

    run([Said("hi")], test)


@pytest.mark.parametrize("chunk_tokens", [1, 99])
def test_a_stream_says_what_a_whole_reply_says(chunk_tokens):
    async def test(gateway: Gateway) -> None:
        body = {"messages": START, "tools": [ADD], "thinking": THINKS, "max_tokens": 2048}
        replies = [await whole(gateway, **body), await final(gateway, **body)]
        for reply in replies:
            thought, said, call = reply.content
            assert (thought.type, thought.thinking) == ("thinking", "17+25.")
            assert len(thought.signature) == 20
            assert said.text == "  Let me check with a tool."
            assert (call.type, call.name, call.input) == ("tool_use", "add", {"a": 17.0})
            assert reply.stop_reason == "tool_use"
            assert reply.usage.input_tokens == len(gateway.sampler.requests[0].prompt_ids)
        assert replies[0].usage.output_tokens == replies[1].usage.output_tokens
        assert replies[0].id != replies[1].id
        assert replies[0].content[2].id != replies[1].content[2].id

    run([Said(TURN.text, chunk_tokens=chunk_tokens)], test, chat_template=SHOWS_ALL)


@pytest.mark.parametrize("ask", [whole, final])
@pytest.mark.parametrize(
    "thinking",
    [THINKS, {"type": "adaptive", "display": "omitted"}, None],
)
def test_the_sdk_appends_its_content_and_extends_the_record_token_by_token(ask, thinking):
    async def test(gateway: Gateway) -> None:
        messages: list[Any] = [*START]
        body = {"tools": [ADD], "system": "be good", "max_tokens": 2048}
        body |= {"thinking": thinking} if thinking else {}
        for _ in range(2):
            reply = await ask(gateway, messages=messages, **body)
            kinds = [block.type for block in reply.content]
            assert kinds == [*(["thinking"] if thinking else []), "text", "tool_use"]
            messages.append({"role": "assistant", "content": reply.content})
            messages.append(result(reply.content[-1], "42"))
        reply = await ask(gateway, messages=messages, **body)
        assert reply.content[-1].text == "\n The answer is 42.  \n\n"
        check_extends(gateway)
        assert bool(gateway.recorder.deviations) is not bool(thinking)

    run([TURN, TURN, FINAL], test, chat_template=SHOWS_ALL)


def claude_code(messages: list[Any], digest: str) -> dict[str, Any]:
    """A body as Claude Code sends it: cache marks on the newest message alone."""
    system = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={digest};"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": {}},
        {"type": "text", "text": "Be brief."},
    ]
    shown = json.loads(json.dumps(messages))
    for message in shown[:-1]:
        if message["role"] != "assistant" and len(message["content"]) == 1:
            (block,) = message["content"]
            if block["type"] == "text":
                message["content"] = block["text"]
            elif block["type"] == "tool_result":
                block["content"] = block["content"][0]["text"]
    if isinstance(shown[-1]["content"], list):
        shown[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    waiting = {"name": "Waiting", "input_schema": {}, "defer_loading": True}
    search = {"type": "web_search_20250305", "name": "web_search"}
    return {
        "system": system,
        "messages": shown,
        "tools": [ADD, waiting, search],
        "thinking": {"type": "adaptive", "display": "omitted"},
        "metadata": {"user_id": '{"session_id": "s"}'},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }


async def content_of(gateway: Gateway, body: Any) -> list[Any]:
    """The blocks of a streamed reply, put together."""
    blocks: list[Any] = []
    for kind, told in await raw(gateway, body):
        if kind == "content_block_start":
            blocks.append(dict(told["content_block"], input_text=""))
        elif kind == "content_block_delta":
            delta, block = told["delta"], blocks[told["index"]]
            block["text"] = block.get("text", "") + delta.get("text", "")
            block["input_text"] += delta.get("partial_json", "")
            block |= {"signature": delta["signature"]} if "signature" in delta else {}
    for block in blocks:
        text = block.pop("input_text")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
        if block["type"] != "text":
            block.pop("text", None)
    return blocks


def test_claude_codes_moving_marks_and_late_system_messages_branch_nothing():
    async def test(gateway: Gateway) -> None:
        reminder = {"type": "text", "text": "<system-reminder>clean</system-reminder>"}
        messages: list[Any] = [
            {"role": "user", "content": [reminder, {"type": "text", "text": HELLO}]},
            {"role": "system", "content": "It is Monday."},
        ]
        for digest in ("ab12", "cd34"):
            content = await content_of(gateway, claude_code(messages, digest))
            block = {"type": "tool_result", "tool_use_id": content[-1]["id"]}
            block["content"] = [{"type": "text", "text": "42"}]
            messages += [
                {"role": "assistant", "content": content},
                {"role": "user", "content": [block]},
                {"role": "system", "content": [{"type": "text", "text": "Agents: none."}]},
            ]
        await content_of(gateway, claude_code(messages, "ef56"))
        check_extends(gateway)
        assert not gateway.recorder.deviations
        text = prompt_text(gateway)
        assert text.count("<|im_start|>system\nAgents: none.") == 2
        assert "Waiting" not in text
        assert "web_search" not in text

    run([TURN, TURN, FINAL], test, chat_template=SHOWS_ALL, limits=CallLimits(512, 4096))


def test_a_tail_that_moves_is_a_branch_and_both_calls_keep_their_own_prompts():
    async def test(gateway: Gateway) -> None:
        tail = {"role": "user", "content": "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"}
        body = {"tools": [ADD], "thinking": THINKS, "max_tokens": 2048}
        reply = await whole(gateway, messages=[*START, tail], **body)
        said = {"role": "assistant", "content": reply.content}
        again = [*START, said, result(reply.content[-1], "42"), tail]
        await whole(gateway, messages=again, **body)
        lines = gateway.recorder.trajectories(task_id="t", group_id="g", episode_id="e")
        trained = [line.token_ids[line.loss_mask].tolist() for line in lines]
        log = [turn.token_ids.tolist() for turn in gateway.sampler.sampled.values()]
        assert sorted(trained) == sorted(log)

    run([TURN, FINAL], test, chat_template=SHOWS_ALL)


def test_results_of_tools_come_before_the_text_beside_them_and_errors_show():
    async def test(gateway: Gateway) -> None:
        reply = await whole(gateway, messages=START, tools=[ADD])
        first, second = reply.content
        blocks = [
            {"type": "text", "text": "And now?"},
            result(first, [{"type": "text", "text": "4"}])["content"][0],
            result(second, "gone", is_error=True)["content"][0],
        ]
        said = {"role": "assistant", "content": reply.content}
        last = [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}]
        await whole(
            gateway,
            messages=[*START, said, {"role": "user", "content": blocks}, *last],
            tools=[ADD],
        )
        check_extends(gateway)
        text = prompt_text(gateway)
        places = [text.index(x) for x in ("tool\n4", "tool\nError: gone", "And now?", "One.")]
        assert places == sorted(places)
        assert text.count("<|im_start|>user") == 4

    run([Said(CALL + CALL), FINAL], test, chat_template=SHOWS_ALL)


def test_a_result_of_no_call_is_a_400_that_names_it():
    async def test(gateway: Gateway) -> None:
        block = {"type": "tool_result", "tool_use_id": "t1", "content": "4"}
        with pytest.raises(anthropic.BadRequestError, match="t1"):
            await whole(gateway, messages=[*START, {"role": "user", "content": [block]}])

    run([FINAL], test)


def test_tokens_are_counted_as_the_model_sees_them():
    async def test(gateway: Gateway) -> None:
        body = {"messages": START, "system": [{"type": "text", "text": "be"}], "tools": [ADD]}
        async with client(gateway) as sdk:
            counted = await sdk.messages.count_tokens(model="m", **body)
            beta = await sdk.beta.messages.count_tokens(model="m", **body)
        reply = await whole(gateway, **body)
        assert counted.input_tokens == beta.input_tokens == reply.usage.input_tokens
        assert len(gateway.sampler.requests) == 1

    run([FINAL], test, chat_template=SHOWS_ALL)


@pytest.mark.parametrize("ask", [whole, final])
def test_why_a_reply_ended_is_told(ask):
    async def test(gateway: Gateway) -> None:
        reply = await ask(gateway, messages=START, stop_sequences=["answer"])
        assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "answer")
        assert reply.content[0].text == "\n The "
        reply = await ask(gateway, messages=START, max_tokens=2)
        assert (reply.stop_reason, reply.stop_sequence) == ("max_tokens", None)

    run([FINAL], test)


def test_a_silent_stream_pings_and_is_sampled_once():
    async def test(gateway: Gateway) -> None:
        kinds = [kind for kind, _ in await raw(gateway, {"messages": START})]
        assert kinds.count("ping") >= 4
        assert (await final(gateway, messages=START)).content[0].text == "hi"
        assert len(gateway.sampler.requests) == 2

    run([Said("hi", pause_s=2.0, chunk_tokens=9)], test, edge=EdgeLimits(keep_alive_s=0.2))


def test_errors_come_in_anthropics_shape_whole_and_streamed():
    async def test(gateway: Gateway) -> None:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await whole(gateway, messages=[{"role": "user", "content": "many words " * 99}])
        error: Any = refused.value.body
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert error["error"]["message"].startswith("prompt is too long: ")
        for ask in (whole, final):
            with pytest.raises(anthropic.APIStatusError, match="replica 3 died"):
                await ask(gateway, messages=START)
        async with aiohttp.ClientSession() as session:
            for path, status, kind in (
                ("/s/over/v1/messages", 410, "invalid_request_error"),
                ("/s/later/v1/messages", 429, "rate_limit_error"),
            ):
                body = {"messages": START}
                async with session.post(gateway.url + path, json=body) as response:
                    assert response.status == status
                    assert (await response.json())["error"]["type"] == kind

    run([Said("half a", error="replica 3 died")], test, limits=CallLimits(64, 128))


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "messages[0].content[0].id",
        ),
        ({"messages": START, "system": 5}, "system"),
        ({"messages": START, "tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"messages": START, "stop_sequences": 5}, "stop_sequences"),
        ({"messages": START, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_read_is_a_400_that_names_the_field(body, where):
    async def test(gateway: Gateway) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(gateway.url + PATH, json=body) as response,
        ):
            assert response.status == 400
            assert (await response.json())["error"]["message"].startswith(f"{where}: ")

    run([FINAL], test)
