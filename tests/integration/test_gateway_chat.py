"""Chat Completions over a socket, by the real SDK: what agents rely on, streamed and whole."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from areal_ray.gateway.call_limits import CallLimits
from tests.support.gateway import TOOL, Gateway, serving
from tests.support.scripted_sampler import Said
from tests.support.tiny_models import tiny_tokenizer

HELLO = [{"role": "user", "content": "What is 12 plus 30?"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a" :  1}}</tool_call>'
SHOWS_CALLS = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def run(script: Any, test: Callable[[Gateway], Awaitable[None]], **options: Any) -> None:
    """Serve the script and let the test at it."""

    async def go() -> None:
        async with asyncio.timeout(60), serving(script, **options) as gateway:
            await test(gateway)

    asyncio.run(go())


async def streamed(gateway: Gateway, **body: Any) -> list[Any]:
    """All chunks of a streamed call."""
    async with gateway.client() as client:
        stream = await client.chat.completions.create(model="m", stream=True, **body)
        return [chunk async for chunk in stream]


async def whole(gateway: Gateway, path: str = "/v1", **body: Any) -> Any:
    """The reply to a call that is not streamed."""
    async with gateway.client(path) as client:
        return await client.chat.completions.create(model="m", **body)


def joined(chunks: list[Any], choice: int = 0) -> str:
    """The text of a choice's deltas."""
    deltas = [c.delta for chunk in chunks for c in chunk.choices if c.index == choice]
    return "".join(delta.content or "" for delta in deltas)


def trajectories(gateway: Gateway) -> Any:
    """All that was recorded of calls without a session."""
    return gateway.recorder.trajectories(task_id="t", group_id="g", episode_id="e")


@pytest.mark.parametrize("chunk_tokens", [1, 3, 99])
def test_a_stream_says_what_a_whole_reply_says_token_by_token_and_is_recorded_alike(chunk_tokens):
    text = "  The answer\n is 42, caf\u00e9 \U0001f600.\n\n"

    async def test(gateway: Gateway) -> None:
        reply = await whole(gateway, messages=HELLO)
        chunks = await streamed(gateway, messages=HELLO)
        assert joined(chunks) == reply.choices[0].message.content == text
        assert len([c for c in chunks if joined([c])]) > 1 or chunk_tokens == 99
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].id != reply.id
        assert all(chunk.model == "m" and chunk.created for chunk in chunks)
        assert all(chunk.usage is None for chunk in chunks)
        first, second = gateway.sampler.sampled.values()
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert reply.usage.completion_tokens == len(first.token_ids)
        assert reply.usage.prompt_tokens == len(gateway.sampler.requests[0].prompt_ids)
        assert gateway.recorder.num_turns == 2

    run([Said(text, chunk_tokens=chunk_tokens)], test)


def test_the_bytes_of_a_stream_are_events_that_end_with_done():
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            made = client.chat.completions.with_streaming_response.create
            async with made(model="m", messages=HELLO, stream=True) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                body = (await response.read()).decode()
        events = body.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])

    run([Said("hi")], test)


def test_usage_comes_last_where_it_is_asked_for_and_choices_come_side_by_side():
    async def test(gateway: Gateway) -> None:
        options = {"include_usage": True}
        chunks = await streamed(gateway, messages=HELLO, n=2, stream_options=options)
        assert [joined(chunks, choice) for choice in (0, 1)] == ["one", "two"]
        assert chunks[-1].choices == []
        assert all(chunk.usage is None for chunk in chunks[:-1])
        sampled = sum(len(turn.token_ids) for turn in gateway.sampler.sampled.values())
        assert chunks[-1].usage.completion_tokens == sampled
        ends = [(c.index, c.finish_reason) for x in chunks for c in x.choices if c.finish_reason]
        assert sorted(ends) == [(0, "stop"), (1, "stop")]

    run([Said("one", pause_s=0.01), Said("two", pause_s=0.01)], test)


def test_a_plain_reply_has_no_tool_calls_at_all():
    async def test(gateway: Gateway) -> None:
        reply = await whole(gateway, messages=HELLO, tools=[TOOL])
        assert reply.choices[0].message.tool_calls is None
        assert "tool_calls" not in reply.choices[0].message.model_fields_set
        assert reply.choices[0].finish_reason == "stop"
        for chunk in await streamed(gateway, messages=HELLO, tools=[TOOL]):
            assert not chunk.choices or chunk.choices[0].delta.tool_calls is None

    run([Said("hi")], test)


def test_a_tool_call_comes_alike_streamed_and_whole_with_ids_that_never_repeat():
    async def test(gateway: Gateway) -> None:
        reply = (await whole(gateway, messages=HELLO, tools=[TOOL])).choices[0]
        chunks = await streamed(gateway, messages=HELLO, tools=[TOOL])
        told = [c for x in chunks for c in x.choices[0].delta.tool_calls or []]
        arguments = "".join(call.function.arguments or "" for call in told)
        assert reply.finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"
        assert (told[0].index, told[0].type, told[0].function.name) == (0, "function", "add")
        assert json.loads(arguments) == {"a": 1}
        assert arguments == reply.message.tool_calls[0].function.arguments
        ids = {reply.message.tool_calls[0].id, told[0].id}
        assert len(ids) == 2
        assert all(i.isalnum() and i.startswith("call") and len(i) < 40 for i in ids)
        assert joined(chunks).strip() == (reply.message.content or "").strip() == "Let me add."

    run([Said(f"Let me add.\n{CALL}")], test, chat_template=SHOWS_CALLS)


def test_the_next_turn_of_an_sdk_agent_extends_the_tokens_that_were_sampled():
    async def test(gateway: Gateway) -> None:
        messages: list[Any] = [*HELLO]
        for _ in range(2):
            message = (await whole(gateway, messages=messages, tools=[TOOL])).choices[0].message
            call = message.tool_calls[0]
            assert call.function.arguments == '{"a" :  1}'
            dumped = json.loads(json.dumps(message.model_dump(), sort_keys=True))
            result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
            messages += [dumped, result]
        await whole(gateway, messages=messages, tools=[TOOL])
        first, second, third = gateway.sampler.requests
        log = [*gateway.sampler.sampled.values()]
        for before, after, turn in ((first, second, log[0]), (second, third, log[1])):
            seen = [*before.prompt_ids.tolist(), *turn.token_ids.tolist()]
            assert after.prompt_ids.tolist()[: len(seen)] == seen
        (trajectory,) = trajectories(gateway)
        trained = trajectory.token_ids[trajectory.loss_mask].tolist()
        assert trained == [i for turn in log for i in turn.token_ids.tolist()]

    run([Said(f"Let me add.\n{CALL}")], test, chat_template=SHOWS_CALLS)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name":"add","arguments":{"a":1}} }</tool_call>',
        '<tool_call>{"name":"add","arguments":{"a":1}}{"name":"add"}</tool_call>',
        '<tool_call>{"name":"add","arguments":{"a":1}',
        '<tool_call>{"name":"add","arguments":"rm"}</tool_call>',
        "<tool_call></tool_call></tool_call>",
    ],
)
def test_a_malformed_call_is_told_somehow_and_recorded_whole(text):
    async def test(gateway: Gateway) -> None:
        reply = (await whole(gateway, messages=HELLO, tools=[TOOL])).choices[0]
        chunks = await streamed(gateway, messages=HELLO, tools=[TOOL])
        told = [c for x in chunks for c in x.choices[0].delta.tool_calls or []]
        assert joined(chunks) == (reply.message.content or "")
        calls = reply.message.tool_calls or []
        if told and not calls:  # it began, and nobody can take it for a whole one
            with pytest.raises(ValueError, match="column"):
                json.loads("".join(call.function.arguments or "" for call in told))
        assert len({call.index for call in told}) >= len(calls)
        assert reply.message.content or reply.message.tool_calls
        sampled = [turn.token_ids.tolist() for turn in gateway.sampler.sampled.values()]
        assert sampled[0] == sampled[1]
        recorded = [t.token_ids[t.loss_mask].tolist() for t in trajectories(gateway)]
        assert recorded == [sampled[1]]  # the other is the same call's first try

    run([Said(text)], test, chat_template=SHOWS_CALLS)


def test_reasoning_comes_apart_from_the_text_streamed_and_whole_and_is_counted():
    async def test(gateway: Gateway) -> None:
        reply = await whole(gateway, messages=HELLO)
        options = {"include_usage": True}
        chunks = await streamed(gateway, messages=HELLO, stream_options=options)
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert thought.strip() == "17 and 25."
        assert reply.choices[0].message.reasoning_content == thought
        assert joined(chunks) == reply.choices[0].message.content
        assert reply.choices[0].message.content.strip() == "42"
        counted = reply.usage.completion_tokens_details.reasoning_tokens
        assert 0 < counted < reply.usage.completion_tokens
        assert chunks[-1].usage == reply.usage
        answer = {"role": "assistant", "content": "42"}  # stripped, the reasoning dropped
        await whole(gateway, messages=[*HELLO, answer, *HELLO])
        second, third = gateway.sampler.requests[1:]
        turn = gateway.sampler.sampled[second.request_id]
        seen = [*second.prompt_ids.tolist(), *turn.token_ids.tolist()]
        assert third.prompt_ids.tolist()[: len(seen)] == seen

    thought = "<think>\n{{ m.reasoning_content | trim }}\n</think>\n\n"
    thought = f"{{% if m.reasoning_content %}}{thought}{{% endif %}}"
    thinks = SHOWS_CALLS.replace("{{ m.content }}", thought + "{{ m.content }}")
    run([Said("<think>\n17 and 25.\n</think>\n\n42")], test, chat_template=thinks)


def test_one_call_alone_is_told_where_parallel_ones_are_not_wanted():
    async def test(gateway: Gateway) -> None:
        body = {"messages": HELLO, "tools": [TOOL], "parallel_tool_calls": False}
        assert len((await whole(gateway, **body)).choices[0].message.tool_calls) == 1
        told = [
            c for x in await streamed(gateway, **body) for c in x.choices[0].delta.tool_calls or []
        ]
        assert {call.index for call in told} == {0}

    run([Said(CALL + CALL)], test, chat_template=SHOWS_CALLS)


def test_logprobs_are_those_of_the_sampled_tokens():
    async def test(gateway: Gateway) -> None:
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
        reply = await whole(gateway, **body)
        content = reply.choices[0].logprobs.content
        assert "".join(token.token for token in content) == "hi there"
        turn = next(iter(gateway.sampler.sampled.values()))
        assert [token.logprob for token in content] == turn.logprobs.tolist()[:-1]
        assert content[0].top_logprobs[0].token == content[0].token
        chunks = await streamed(gateway, **body)
        parts = [c.logprobs.content for x in chunks for c in x.choices if c.logprobs]
        assert [token for part in parts for token in part] == content

    run([Said("hi there")], test)


def test_top_logprobs_are_the_likeliest_tokens_with_the_bytes_of_half_characters():
    encoded = tiny_tokenizer().encode("\u20acx")  # the first character is three tokens
    end, other = tiny_tokenizer().eos_token_id, 100
    likely = [[(end, -0.5), (token, -1.25), (other, -2.0)] for token in encoded]

    async def test(gateway: Gateway) -> None:
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2}
        content = (await whole(gateway, **body)).choices[0].logprobs.content
        assert [token.bytes for token in content] == [[0xE2], [0x82], [0xAC], [0x78]]
        assert [token.token for token in content] == ["\ufffd"] * 3 + ["x"]
        for token in content:
            first, second = token.top_logprobs
            assert (first.token, first.logprob) == ("<|im_end|>", -0.5)
            assert (second.token, second.bytes, second.logprob) == (token.token, token.bytes, -1.25)
        chunks = await streamed(gateway, **body)
        parts = [c.logprobs.content for x in chunks for c in x.choices if c.logprobs]
        assert [token for part in parts for token in part] == content
        with pytest.raises(
            openai.BadRequestError, match="top_logprobs: is 2, and logprobs is not true"
        ):
            await whole(gateway, messages=HELLO, top_logprobs=2)
        without = await whole(gateway, messages=HELLO, logprobs=True, top_logprobs=0)
        assert all(not token.top_logprobs for token in without.choices[0].logprobs.content)
        assert [request.top_logprobs for request in gateway.sampler.requests] == [2, 2, 0]

    run([Said(ids=encoded, likely=likely)], test)


def test_a_stop_string_ends_the_reply_before_it_and_stays_in_the_record():
    async def test(gateway: Gateway) -> None:
        stop = ["Observation:", "</code>"]
        reply = await whole(gateway, messages=HELLO, stop=stop)
        chunks = await streamed(gateway, messages=HELLO, stop=stop)
        assert reply.choices[0].message.content == joined(chunks) == "Thought: 4\n"
        assert reply.choices[0].finish_reason == "stop"
        turn = next(iter(gateway.sampler.sampled.values()))
        assert "Observation:" in tiny_tokenizer().decode(turn.token_ids)
        recorded = trajectories(gateway)[0]
        assert recorded.token_ids[recorded.loss_mask].tolist() == turn.token_ids.tolist()

    run([Said("Thought: 4\nObservation: 5 and so on")], test)


def test_a_full_context_and_other_refusals_reach_the_sdk_as_its_own_errors():
    async def test(gateway: Gateway) -> None:
        long = [{"role": "user", "content": "many words " * 99}]
        for stream in (True, False):
            async with gateway.client(max_retries=2) as client:
                with pytest.raises(openai.BadRequestError) as refused:
                    await client.chat.completions.create(model="m", messages=long, stream=stream)
            assert refused.value.code == "context_length_exceeded"
        assert gateway.service.counts.num_calls == 2  # nothing was tried again
        for path, kind in (
            ("/s/over/v1", openai.APIStatusError),
            ("/s/later", openai.RateLimitError),
        ):
            with pytest.raises(kind):
                await whole(gateway, path, messages=HELLO)
        assert not gateway.sampler.requests

    run([Said("hi")], test, limits=CallLimits(64, 64))


@pytest.mark.parametrize("stream", [True, False])
def test_a_sampler_that_fails_is_an_error_of_the_sdk_and_the_next_try_is_answered(stream):
    async def test(gateway: Gateway) -> None:
        ask = streamed if stream else whole
        with pytest.raises(openai.APIError, match="replica 3 died"):
            await ask(gateway, messages=HELLO)
        await ask(gateway, messages=HELLO)
        assert gateway.service.counts.num_failed == 1
        recorded = [t.token_ids[t.loss_mask].tolist() for t in trajectories(gateway)]
        (answered,) = gateway.sampler.sampled.values()
        assert recorded == [answered.token_ids.tolist()]

    run([Said("half a", error="replica 3 died"), Said("whole")], test)


def test_retries_after_a_503_are_the_sdks_and_end_in_one_recorded_turn():
    async def test(gateway: Gateway) -> None:
        async with gateway.client(max_retries=2) as client:
            reply = await client.chat.completions.create(model="m", messages=HELLO)
        assert reply.choices[0].message.content == "well"
        assert len(gateway.sampler.requests) == 2
        assert len(trajectories(gateway)) == 1

    run([Said(error="busy"), Said("well")], test)


def test_sessions_in_the_path_are_kept_apart_whatever_v1_a_client_adds_or_drops():
    async def test(gateway: Gateway) -> None:
        for path in ("/s/a", "/s/a/v1", "/s/a/v1/v1", "/s/b/v1", "", "/v1", "/v1/v1"):
            await whole(gateway, path, messages=HELLO)
        turns = {name: r.recorder.num_turns for name, r in gateway.door.records.items()}
        assert turns == {"a": 3, "b": 1, "": 3}
        assert set(gateway.door.keys) == {"key"}

    run([Said("hi")], test)


def test_the_models_are_listed_and_any_name_is_one():
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            (model,) = (await client.models.list()).data
            other = await client.models.retrieve("Some/Model-7B")
        assert (model.id, model.max_model_len) == ("policy", 1024)  # type: ignore[attr-defined]
        assert other.id == "Some/Model-7B"

    run([Said("hi")], test)
