"""Tool calls as they are written, over a socket: by the streaming helpers of the public SDKs."""

import asyncio
import json
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from areal_ray.gateway.call_limits import CallLimits
from tests.support.gateway import Gateway
from tests.support.scripted_sampler import Said
from tests.support.sdk_clients import HELLO, SHOWS_ALL, check_extends, run

MESSAGES = [{"role": "user", "content": HELLO}]
ARGUMENTS = '{"a" :  17, "note": "caf\u00e9 \\"} </tool_call>", "list": [1, {"b": null}]}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call>'
BEGUN = '<tool_call>\n{"name": "add", "arguments": {"a" :  17, "note": "caf'
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}
OPTIONS = {"chat_template": SHOWS_ALL}


class Told:
    """What a helper told of calls, and what it made of all in the end."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        """Id and name."""
        self.parts: list[str] = []
        """Of the arguments of all calls."""
        self.text = ""
        self.calls: list[tuple[str, str, Any]] = []
        """Id, name and arguments at the end."""
        self.ending: Any = None


async def chat(gateway: Gateway, told: Told) -> None:
    tool = {"type": "function", "function": FUNCTION}
    helper = gateway.client().chat.completions.stream
    async with helper(model="m", messages=MESSAGES, tools=[tool]) as stream:
        async for event in stream:
            if event.type == "chunk":
                for call in event.chunk.choices[0].delta.tool_calls or []:
                    if call.id:
                        told.begun.append((call.id, call.function.name))
            if event.type == "tool_calls.function.arguments.delta" and event.arguments_delta:
                told.parts.append(event.arguments_delta)
        final = (await stream.get_final_completion()).choices[0]
    told.text = final.message.content or ""
    told.ending = final.finish_reason
    told.calls = [
        (call.id, call.function.name, call.function.arguments)
        for call in final.message.tool_calls or []
    ]


async def responses(gateway: Gateway, told: Told) -> None:
    tool = {"type": "function", **FUNCTION}
    helper = gateway.client().responses.stream
    async with helper(model="m", input=HELLO, tools=[tool]) as stream:
        async for event in stream:
            if event.type == "response.output_item.added" and event.item.type == "function_call":
                assert event.item.arguments == ""
                told.begun.append((event.item.call_id, event.item.name))
            if event.type == "response.function_call_arguments.delta":
                told.parts.append(event.delta)
        final = await stream.get_final_response()
    told.text = final.output_text
    told.ending = [item.status for item in final.output]
    told.calls = [
        (item.call_id, item.name, item.arguments)
        for item in final.output
        if item.type == "function_call"
    ]


async def messages(gateway: Gateway, told: Told) -> None:
    client = AsyncAnthropic(base_url=gateway.url, api_key="key", max_retries=0)
    tool = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    helper = client.messages.stream
    async with helper(model="m", max_tokens=512, messages=MESSAGES, tools=[tool]) as stream:
        async for event in stream:
            if event.type == "content_block_start" and event.content_block.type == "tool_use":
                assert event.content_block.input == {}
                told.begun.append((event.content_block.id, event.content_block.name))
            if event.type == "input_json":
                told.parts.append(event.partial_json)
        final = await stream.get_final_message()
    told.text = "".join(block.text for block in final.content if block.type == "text")
    told.ending = final.stop_reason
    told.calls = [
        (block.id, block.name, json.dumps(block.input))
        for block in final.content
        if block.type == "tool_use"
    ]


HELPERS = pytest.mark.parametrize("helper", [chat, responses, messages])


@HELPERS
@pytest.mark.parametrize("chunk_tokens", [1, 7, 999])
def test_a_call_comes_as_its_id_and_name_then_its_arguments_and_is_the_one_recorded(
    helper: Any, chunk_tokens: int
) -> None:
    async def test(gateway: Gateway) -> None:
        told = Told()
        await helper(gateway, told)
        ((call_id, name, arguments),) = told.calls
        assert told.begun == [(call_id, name)] == [(call_id, "add")]
        assert "".join(told.parts) == ARGUMENTS
        assert len(told.parts) > 20 or chunk_tokens > 1
        assert json.loads(arguments) == json.loads(ARGUMENTS)
        assert told.text.strip() == "Let me."
        assert told.ending in ("tool_calls", "tool_use", ["completed", "completed"])

    run([Said(f"Let me.\n{CALL}", chunk_tokens=chunk_tokens)], test, **OPTIONS)


def test_the_call_that_was_streamed_is_the_one_in_the_record() -> None:
    async def test(gateway: Gateway) -> None:
        told = Told()
        await chat(gateway, told)
        ((call_id, name, arguments),) = told.calls
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        spoken = {"role": "assistant", "content": told.text, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call_id, "content": "42"}
        tools = [{"type": "function", "function": FUNCTION}]
        asked = [*MESSAGES, spoken, result]
        create = gateway.client().chat.completions.create
        await create(model="m", messages=asked, tools=tools)
        check_extends(gateway)

    run([Said(f"Let me.\n{CALL}"), Said("42")], test, **OPTIONS)


@HELPERS
def test_calls_side_by_side_have_ids_and_arguments_of_their_own(helper: Any) -> None:
    async def test(gateway: Gateway) -> None:
        told = Told()
        await helper(gateway, told)
        assert [name for _, name in told.begun] == ["add", "sub"]
        assert [call_id for call_id, _ in told.begun] == [call_id for call_id, *_ in told.calls]
        assert [json.loads(text) for *_, text in told.calls] == [json.loads(ARGUMENTS), {"b": 2}]

    other = '<tool_call>{"arguments": {"b": 2}, "name": "sub"}</tool_call>'  # told when whole
    run([Said(f"{CALL}\n{other}")], test, **OPTIONS)


@HELPERS
def test_arguments_are_there_while_the_model_still_writes(helper: Any) -> None:
    async def test(gateway: Gateway) -> None:
        told = Told()
        asking = asyncio.create_task(helper(gateway, told))
        while "".join(told.parts) != '{"a" :  17, "note": "caf':
            await asyncio.sleep(0.01)
            assert not asking.done()
        assert [name for _, name in told.begun] == ["add"]
        asking.cancel()
        await gateway.until_idle()

    run([Said(BEGUN, hangs=True, is_stopped=False)], test, **OPTIONS)


@pytest.mark.parametrize("helper", [responses, messages])
@pytest.mark.parametrize("text", [BEGUN, f'{BEGUN}" 3}}}}</tool_call>'])
def test_a_call_that_was_none_breaks_no_helper_lacks_its_end_and_is_followed_by_its_text(
    helper: Any, text: str
) -> None:
    async def test(gateway: Gateway) -> None:
        told = Told()
        await helper(gateway, told)
        assert [name for _, name in told.begun] == ["add"]
        with pytest.raises(ValueError, match="column"):
            json.loads("".join(told.parts))
        assert told.text == text
        assert told.ending in ("end_turn", ["completed"])
        assert not told.calls or helper is messages

    run([Said(text)], test, **OPTIONS)


@pytest.mark.parametrize(("most", "reason"), [(None, "stop"), (len(BEGUN), "length")])
def test_a_chat_stream_of_a_call_that_was_none_ends_as_the_whole_reply_does(
    most: int | None, reason: str
) -> None:
    async def test(gateway: Gateway) -> None:
        create = gateway.client().chat.completions.create
        tools = [{"type": "function", "function": FUNCTION}]
        asked = {"model": "m", "messages": MESSAGES, "tools": tools, "max_tokens": most}
        whole = (await create(**asked)).choices[0]
        chunks = [chunk async for chunk in await create(**asked, stream=True)]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert (calls[0].index, calls[0].function.name) == (0, "add")
        with pytest.raises(ValueError, match="column"):
            json.loads("".join(call.function.arguments or "" for call in calls))
        assert "".join(delta.content or "" for delta in deltas) == whole.message.content
        assert whole.message.tool_calls is None
        assert chunks[-1].choices[0].finish_reason == whole.finish_reason == reason

    run([Said(f'{BEGUN}" 3}}}}</tool_call>')], test, limits=CallLimits(512, 4096), **OPTIONS)
