"""OpenAI's Responses over a socket: the real SDK, and requests in the shapes of real agents."""

import json
from typing import Any

import aiohttp
import openai
import pytest

from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.limits import EdgeLimits
from areal_ray.gateway.reply_store import ReplyStore
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
from tests.support.tiny_models import tiny_tokenizer

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
TURN = Said(f"{THOUGHT}  Let me check with a tool.\n\n{CALL}")
FINAL = Said("\n The answer is 42.  \n\n")
ODD = '{"a" :  17.0}'


async def whole(gateway: Gateway, **body: Any) -> Any:
    """The response to a call that is not streamed."""
    async with gateway.client() as client:
        return await client.responses.create(model="m", **body)


async def events(gateway: Gateway, **body: Any) -> list[Any]:
    """All events of a streamed call."""
    async with gateway.client() as client:
        stream = await client.responses.create(model="m", stream=True, **body)
        return [event async for event in stream]


async def final(gateway: Gateway, **body: Any) -> Any:
    """What the SDK's stream helper makes of a streamed call."""
    async with gateway.client() as client, client.responses.stream(model="m", **body) as stream:
        return await stream.get_final_response()


@pytest.mark.parametrize("chunk_tokens", [1, 99])
def test_a_stream_climbs_the_whole_ladder_and_says_what_a_whole_reply_says(chunk_tokens):
    async def test(gateway: Gateway) -> None:
        reply = await whole(gateway, input=HELLO, tools=[ADD])
        come = await events(gateway, input=HELLO, tools=[ADD])
        assert [event.sequence_number for event in come] == list(range(len(come)))
        kinds = [event.type.removeprefix("response.") for event in come]
        assert [k for i, k in enumerate(kinds) if k not in kinds[:i] or "item" in k] == [
            *("created", "in_progress"),
            *("output_item.added", "reasoning_summary_part.added"),
            *("reasoning_summary_text.delta", "reasoning_summary_text.done"),
            *("reasoning_summary_part.done", "output_item.done"),
            *("output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done", "completed"),
        ]
        done = [event.item for event in come if event.type == "response.output_item.done"]
        assert come[-1].response.output == done
        thought, said, call = reply.output
        assert (thought.summary[0].text, said.content[0].text) == (
            "17+25.",
            "  Let me check with a tool.",
        )
        assert (call.name, call.arguments, call.status) == ("add", ODD, "completed")
        assert call.call_id.isalnum()
        for ours, theirs in zip(reply.output, done, strict=True):
            assert ours.type == theirs.type
            assert ours.id != theirs.id
        assert done[1].content == said.content
        assert done[0].encrypted_content != thought.encrypted_content
        assert reply.usage == come[-1].response.usage
        assert reply.usage.input_tokens == len(gateway.sampler.requests[0].prompt_ids)
        log = gateway.sampler.sampled[gateway.sampler.requests[0].request_id]
        assert reply.usage.output_tokens == len(log.token_ids)
        assert 0 < reply.usage.output_tokens_details.reasoning_tokens < len(log.token_ids)
        assert (reply.model, reply.status, reply.tools[0].name) == ("m", "completed", "add")

    script = [Said(TURN.text, chunk_tokens=chunk_tokens)]
    run(script, test, chat_template=SHOWS_ALL)


@pytest.mark.parametrize("ask", [whole, final])
def test_the_sdk_appends_its_output_and_extends_the_record_token_by_token(ask):
    async def test(gateway: Gateway) -> None:
        given: list[Any] = [{"role": "user", "content": HELLO}]
        for _ in range(2):
            reply = await ask(gateway, input=given, tools=[ADD], instructions="be good")
            call = reply.output[-1]
            given += reply.output
            given.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
        reply = await ask(gateway, input=given, tools=[ADD], instructions="be good")
        assert reply.output_text == "\n The answer is 42.  \n\n"
        check_extends(gateway)
        assert not gateway.recorder.deviations

    run([TURN, TURN, FINAL], test, chat_template=SHOWS_ALL)


CODEX = {
    "model": "m",
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "prompt_cache_key": "thread-1",
    "client_metadata": {"x-codex-turn-metadata": "{}"},
    "tools": [
        ADD,
        {"type": "namespace", "name": "agents_v1", "tools": [{**ADD, "name": "spawn"}]},
        {"type": "namespace", "name": "other", "tools": [ADD]},
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
    ],
}
CODEX_HEADERS = {
    "thread-id": "thread-1",
    "x-codex-turn-metadata": json.dumps({"request_kind": "turn"}),
    "Authorization": "Bearer key",
}
CODEX_START = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "one"}]},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "two"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": HELLO}]},
]


async def codex(gateway: Gateway, items: Any) -> list[Any]:
    """One call as Codex makes it: the items that were done, which is all it looks at."""
    done, ended = [], False
    async with (
        aiohttp.ClientSession(headers=CODEX_HEADERS) as session,
        session.post(gateway.url + "/v1/responses", json={**CODEX, "input": items}) as response,
    ):
        assert response.status == 200
        for event in (await response.text()).strip().split("\n\n"):
            name, told = event.split("\n")
            content = json.loads(told.removeprefix("data: "))
            assert name == f"event: {content['type']}"
            if content["type"] == "response.output_item.done":
                done.append(content["item"])
            ended = content["type"] == "response.completed" and content["response"]["id"]
    assert ended
    return done


def as_codex(item: dict[str, Any]) -> dict[str, Any]:
    """Item as Codex sends it again."""
    return {**item, "content": None} if item["type"] == "reasoning" else item


def as_opencode(item: dict[str, Any]) -> dict[str, Any]:
    """Ids, status and annotations dropped, arguments compacted."""
    kept = {name: item[name] for name in item if name not in ("id", "status")}
    if item["type"] == "function_call":
        kept["arguments"] = json.dumps(json.loads(item["arguments"]), separators=(",", ":"))
    if item["type"] == "message":
        text = {"type": "output_text", "text": item["content"][0]["text"]}
        kept = {"role": "assistant", "content": [text]}
    return kept


def as_openclaw(item: dict[str, Any]) -> dict[str, Any]:
    """As opencode's, and ids of calls get item and hash appended."""
    kept = as_opencode(item)
    if "call_id" in kept:
        kept["call_id"] += f"_{item['id']}_a1b2c3"
    return kept


def as_pydantic(item: dict[str, Any]) -> dict[str, Any]:
    """Reasoning as text of its own."""
    kept = as_opencode(item)
    if item["type"] != "reasoning":
        return kept
    return {"role": "assistant", "content": f"<think>\n{item['summary'][0]['text']}\n</think>"}


@pytest.mark.parametrize("resent", [as_codex, as_opencode, as_openclaw])
def test_the_items_of_a_turn_extend_the_record_however_a_client_spells_them(resent):
    async def test(gateway: Gateway) -> None:
        items: list[Any] = [*CODEX_START]
        for _ in range(2):
            done = [resent(item) for item in await codex(gateway, items)]
            call_id = done[-1]["call_id"]
            items += done
            output = {"type": "function_call_output", "call_id": call_id, "output": "42"}
            items.append({"id": "fco_1", **output})
        await codex(gateway, items)
        check_extends(gateway)
        assert "spawn" in prompt_text(gateway)
        assert "patch" not in prompt_text(gateway)
        assert prompt_text(gateway).count("other__add") == 1

    run([TURN, TURN, FINAL], test, chat_template=SHOWS_ALL)


def test_a_tool_of_a_namespace_is_called_by_its_own_name_in_it():
    call = '<tool_call>{"name": "other__add", "arguments": {}}</tool_call>'

    async def test(gateway: Gateway) -> None:
        (told,) = await codex(gateway, CODEX_START)
        assert (told["name"], told["namespace"]) == ("add", "other")
        output = {"type": "function_call_output", "call_id": told["call_id"], "output": "42"}
        await codex(gateway, [*CODEX_START, told, output])
        check_extends(gateway)

    run([Said(call), FINAL], test, chat_template=SHOWS_ALL)


def test_a_half_turn_that_stays_in_the_history_is_no_part_of_the_next():
    async def test(gateway: Gateway) -> None:
        first = await codex(gateway, CODEX_START)
        half, turn = first[:2], await codex(gateway, CODEX_START)
        output = {"type": "function_call_output", "call_id": turn[-1]["call_id"], "output": "42"}
        await codex(gateway, [*CODEX_START, *half, *turn, output])
        assert prompt_text(gateway).count("<|im_start|>assistant") == 3
        assert prompt_text(gateway).count("<tool_call>") == 1

    run([TURN, TURN, FINAL], test, chat_template=SHOWS_ALL)


def test_parallel_calls_whose_outputs_come_between_them_are_one_turn():
    async def test(gateway: Gateway) -> None:
        reply = await whole(gateway, input=HELLO, tools=[ADD])
        given: list[Any] = [{"role": "user", "content": HELLO}]
        for index, item in enumerate(reply.output):
            given.append(item)
            output = {"type": "function_call_output", "call_id": item.call_id, "output": f"{index}"}
            given.append(output)
        await whole(gateway, input=given, tools=[ADD])
        check_extends(gateway)

    run([Said(CALL + CALL), FINAL], test, chat_template=SHOWS_ALL)


@pytest.mark.parametrize("ask", [whole, final])
def test_a_reply_that_is_named_is_gone_on_from_without_sending_it_again(ask):
    async def test(gateway: Gateway) -> None:
        first = await ask(gateway, input=HELLO, tools=[ADD], instructions="be good")
        output = [
            {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "42"}
        ]
        more = {"tools": [ADD], "instructions": "be good"}
        second = await ask(gateway, input=output, previous_response_id=first.id, **more)
        assert second.previous_response_id == first.id
        await ask(gateway, input="And twice?", previous_response_id=second.id, **more)
        check_extends(gateway)
        assert prompt_text(gateway).count("be good") == 1

    run([TURN, FINAL], test, chat_template=SHOWS_ALL)


def test_a_reply_is_named_by_who_got_it_and_if_it_was_stored():
    async def test(gateway: Gateway) -> None:
        stored = await whole(gateway, input=HELLO)
        unstored = await whole(gateway, input=HELLO, store=False)
        for name in (unstored.id, "resp_none"):
            with pytest.raises(openai.BadRequestError) as refused:
                await whole(gateway, input="so?", previous_response_id=name)
            assert refused.value.code == "previous_response_not_found"
        for path, key in (("/s/other/v1", "key"), ("/v1", "other")):
            async with gateway.client(path, api_key=key) as client:
                with pytest.raises(openai.BadRequestError, match="no reply"):
                    await client.responses.create(
                        model="m", input="so?", previous_response_id=stored.id
                    )
        await whole(gateway, input="so?", previous_response_id=stored.id)

    run([FINAL], test)


def test_the_store_is_bounded():
    async def test(gateway: Gateway) -> None:
        first = await whole(gateway, input=HELLO)
        for _ in range(3):
            await whole(gateway, input=HELLO)
        with pytest.raises(openai.BadRequestError):
            await whole(gateway, input="so?", previous_response_id=first.id)
        assert len(gateway.service.replies) == 3
        await whole(gateway, input="long " * 150)
        assert len(gateway.service.replies) == 0

    run([FINAL], test, replies=ReplyStore(max_replies=3, max_characters=500))


def test_a_silent_stream_shows_events_and_is_sampled_once():
    async def test(gateway: Gateway) -> None:
        come = await events(gateway, input=HELLO)
        assert sum(event.type == "response.in_progress" for event in come) >= 4
        assert [event.sequence_number for event in come] == list(range(len(come)))
        assert (await final(gateway, input=HELLO)).output_text == "hi"
        assert len(gateway.sampler.requests) == 2

    run([Said("hi", pause_s=2.0, chunk_tokens=9)], test, edge=EdgeLimits(keep_alive_s=0.2))


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_that_is_cut_off_is_incomplete(stream):
    async def test(gateway: Gateway) -> None:
        body = {"input": HELLO, "max_output_tokens": 2}
        if stream:
            last = (await events(gateway, **body))[-1]
            assert last.type == "response.incomplete"
            reply = last.response
        else:
            reply = await whole(gateway, **body)
        assert reply.status == reply.output[-1].status == "incomplete"
        assert reply.incomplete_details.reason == "max_output_tokens"

    run([FINAL], test)


def test_a_sampler_that_fails_ends_the_stream_as_failed():
    async def test(gateway: Gateway) -> None:
        last = (await events(gateway, input=HELLO))[-1]
        assert last.type == "response.failed"
        assert "replica 3 died" in last.response.error.message
        with pytest.raises(openai.InternalServerError, match="replica 3 died"):
            await whole(gateway, input=HELLO)

    run([Said("half a", error="replica 3 died")], test)


def test_logprobs_are_those_of_the_sampled_tokens():
    async def test(gateway: Gateway) -> None:
        body = {"input": HELLO, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
        told = (await whole(gateway, **body)).output[0].content[0].logprobs
        turn = next(iter(gateway.sampler.sampled.values()))
        assert [token.logprob for token in told] == turn.logprobs.tolist()[:-1]
        come = await events(gateway, **body)
        deltas = [e.logprobs for e in come if e.type == "response.output_text.delta"]
        assert len([token for logprobs in deltas for token in logprobs]) == len(told)
        assert come[-1].response.output[0].content[0].logprobs == told

    run([Said("hi there")], test)


def test_top_logprobs_are_the_likeliest_tokens():
    encoded = tiny_tokenizer().encode("hi\u20ac")
    likely = [[(100 + place, -0.5), (token, -1.25)] for place, token in enumerate(encoded)]

    async def test(gateway: Gateway) -> None:
        body = {"input": HELLO, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        reply = await whole(gateway, **body)
        told = reply.output[0].content[0].logprobs
        assert bytes(byte for token in told for byte in token.bytes).decode() == "hi\u20ac"
        for place, token in enumerate(told):
            first, second = token.top_logprobs
            assert (first.token, first.logprob) == (tiny_tokenizer().decode([100 + place]), -0.5)
            assert (second.bytes, second.logprob) == (token.bytes, -1.25)
        come = await events(gateway, **body)
        deltas = [e.logprobs for e in come if e.type == "response.output_text.delta"]
        tops = [[one.token for one in token.top_logprobs] for part in deltas for token in part]
        assert tops == [[one.token for one in token.top_logprobs] for token in told]
        assert come[-1].response.output[0].content[0].logprobs == told
        with pytest.raises(openai.BadRequestError) as refused:
            await whole(gateway, **{**body, "top_logprobs": 21})
        assert refused.value.param == "top_logprobs"

    run([Said(ids=encoded, likely=likely)], test)


def test_input_tokens_are_counted_as_the_model_sees_them():
    async def test(gateway: Gateway) -> None:
        body = {"input": HELLO, "instructions": "be good", "tools": [ADD]}
        async with aiohttp.ClientSession() as session:
            url = f"{gateway.url}/v1/responses/input_tokens"
            async with session.post(url, json=body) as response:
                counted = (await response.json())["input_tokens"]
        assert counted == (await whole(gateway, **body)).usage.input_tokens

    run([FINAL], test, chat_template=SHOWS_ALL)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "king", "content": ""}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 5}]},
            "input[0].arguments",
        ),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "tools": 5}, "tools"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "store": "no"}, "store"),
    ],
)
def test_what_cannot_be_read_is_a_400_that_names_the_field(body, param):
    async def test(gateway: Gateway) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(gateway.url + "/v1/responses", json=body) as response,
        ):
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param

    run([FINAL], test)


def test_what_is_not_known_is_passed_over_and_a_full_context_is_told():
    async def test(gateway: Gateway) -> None:
        items = [
            {"type": "item_reference", "id": "x"},
            {"type": "web_search_call", "id": "x", "action": {}},
            {"role": "user", "content": [{"type": "new"}, {"type": "input_text", "text": HELLO}]},
            {"type": "message", "role": "assistant", "content": []},
            {"role": "system", "content": "late"},
        ]
        wanted = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
        more = {"max_output_tokens": 128000, "text": wanted, "tool_choice": "required"}
        reply = await whole(gateway, input=items, extra_body={"news": 1}, **more)
        assert reply.output_text == "\n The answer is 42.  \n\n"
        for stream in (True, False):
            with pytest.raises(openai.BadRequestError) as refused:
                await whole(gateway, input="many words " * 99, stream=stream)
            assert refused.value.code == "context_length_exceeded"

    run([FINAL], test, limits=CallLimits(64, 256))
