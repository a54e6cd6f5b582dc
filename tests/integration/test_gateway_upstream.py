"""Sessions that another provider serves, over sockets: our own server, and ones that misbehave."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from areal_ray.core.turn import SamplingWishes
from areal_ray.gateway.upstream_chat import Gathered
from areal_ray.gateway.upstream_config import UpstreamConfig
from tests.support.gateway import TOOL, Gateway, serving
from tests.support.providers import answering, refusal, stream_of
from tests.support.scripted_sampler import Said
from tests.support.sessions import ADMIN_KEY, HELLO, Replica, serve_replica, serving_sessions
from tests.support.tiny_models import tiny_tokenizer

KEY = "the-key-of-the-provider"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 17}}</tool_call>'
ENDLESS = "and so on " * 40
AGAIN = {"role": "user", "content": "sure?"}


def run(
    folder: Path, script: Any, test: Callable[[Replica, Gateway], Awaitable[None]], **options: Any
) -> None:
    """Serve the script as a provider, and a gateway with sessions that may use it."""

    async def go() -> None:
        async with asyncio.timeout(120), serving(script) as provider:
            upstreams = {"big": UpstreamConfig(url=provider.url + "/v1", model="big-1")}
            options.update(upstreams=upstreams, upstream_keys={"big": KEY})
            async with serving_sessions(folder, [Said("never")], **options) as replica:
                await test(replica, provider)

    asyncio.run(go())


async def started(replica: Replica, **body: Any) -> Any:
    """A session of the provider's; training has no slot for it and it needs none."""
    status, told, _ = await replica.rl("/rl/start_session", task_id="t", model="big", **body)
    assert status == 200, told
    return told


async def asked(replica: Replica, key: str, messages: Any = HELLO, **options: Any) -> Any:
    """One call with the SDK; of a stream all chunks."""
    async with replica.client(key) as client:
        told = await client.chat.completions.create(model="m", messages=messages, **options)
        return [chunk async for chunk in told] if options.get("stream") else told


async def exported(replica: Replica, told: Any, **body: Any) -> Any:
    """The one session, after its end."""
    body = {"session_id": told["session_id"], **body}
    status, found, _ = await replica.rl("/export_trajectories", **body)
    assert status == 200, found
    return found["sessions"][0]


def test_every_dialect_reaches_the_provider_and_is_recorded_as_text(tmp_path):
    async def test(replica: Replica, provider: Gateway) -> None:
        told = await started(replica)
        key = told["api_key"]
        wishes = {"presence_penalty": 0.5, "extra_body": {"top_k": 7}}
        whole = await asked(replica, key, temperature=0.25, tools=[TOOL], **wishes)
        (call,) = whole.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 17})
        assert whole.usage.completion_tokens > 1
        result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        history = [*HELLO, whole.choices[0].message, result]
        chunks = await asked(replica, key, history, stream=True, tools=[TOOL])
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(pieces) == "It is 42."
        assert len([piece for piece in pieces if piece]) > 1
        async with (
            anthropic.AsyncAnthropic(base_url=replica.url, api_key=key, max_retries=0) as client,
            client.messages.stream(model="m", max_tokens=32, messages=HELLO) as stream,
        ):
            said = await stream.get_final_message()
        assert said.content[0].text == "Hello there"
        async with replica.client(key) as client:
            response = await client.responses.create(model="m", input="What?", stream=False)
        assert response.output_text == "Nothing."
        assert provider.door.keys == [KEY] * 4
        sampled = provider.sampler.requests[0]
        assert sampled.temperature == 0.25
        assert sampled.wishes == SamplingWishes(top_k=7, presence_penalty=0.5)

        assert (await replica.rl("/rl/set_reward", key, reward=0.5))[0] == 200
        assert (await replica.rl("/rl/end_session", key))[1]["interaction_count"] == 4
        found = await exported(replica, told)
        assert (found["upstream"], found["reward"], found["state"]) == ("big", 0.5, "sealed")
        first, second, third, _ = found["turns"]
        assert first["reply"]["tool_calls"][0]["function"]["arguments"] == {"a": 17}
        assert second["messages"][:2] == [*HELLO, first["reply"]]
        assert second["reply"] == {"role": "assistant", "content": "It is 42."}
        assert (third["model"], third["stop_reason"]) == ("big-1", "stop")
        assert third["num_prompt"] > 0
        assert "token_ids" not in json.dumps(found)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(replica.sessions.next_ready(), 0.1)
        assert KEY.encode() not in b"".join(path.read_bytes() for path in tmp_path.glob("*.seg"))

    run(tmp_path, [Said(CALL), Said("It is 42."), Said("Hello there"), Said("Nothing.")], test)


def test_logprobs_of_the_provider_are_passed_on(tmp_path):
    encoded = tiny_tokenizer().encode("4\u20ac")
    likely = [[(100, -0.5), (token, -1.25), (101, -2.0)] for token in encoded]

    async def test(replica: Replica, provider: Gateway) -> None:
        told = await started(replica)
        body = {"logprobs": True, "top_logprobs": 2}
        whole = await asked(replica, told["api_key"], **body)
        content = whole.choices[0].logprobs.content
        assert bytes(byte for token in content for byte in token.bytes).decode() == "4\u20ac"
        for token in content:
            assert [one.logprob for one in token.top_logprobs] == [-0.5, -1.25]
            assert token.top_logprobs[1].bytes == token.bytes
        chunks = await asked(replica, told["api_key"], stream=True, **body)
        parts = [c.logprobs.content for x in chunks for c in x.choices if c.logprobs]
        assert [token for part in parts for token in part] == content
        plain = await asked(replica, told["api_key"])
        assert plain.choices[0].logprobs is None
        asked_for = [request.top_logprobs for request in provider.sampler.requests]
        assert asked_for == [2, 2, 0]

    run(tmp_path, [Said(ids=encoded, likely=likely)], test)


@pytest.mark.parametrize(
    "content",
    [
        *(7, [7], [{}], [{"token": "a"}], [{"token": "a", "logprob": "b"}]),
        *([{"token": "a", "logprob": float("nan")}], [{"token": "a", "logprob": 1, "bytes": 9}]),
        *([{"token": "a", "logprob": 1, "bytes": [256]}],),
        *([{"token": "a", "logprob": 1, "top_logprobs": 7}],),
    ],
)
def test_logprobs_that_are_none_are_refused_where_they_were_asked_for(content):
    chunk = {"delta": {}, "logprobs": {"content": content}}
    with pytest.raises(ValueError, match=r"in it|no list"):
        Gathered(0, wants_logprobs=True).feed(chunk)
    assert Gathered(0).feed(chunk) == []


def test_a_session_goes_on_after_a_restart_and_messages_are_written_once(tmp_path):
    async def test(replica: Replica, provider: Gateway) -> None:
        told = await started(replica)
        first = await asked(replica, told["api_key"])
        await replica.stop()
        upstreams = {"big": UpstreamConfig(url=provider.url, model="big-1")}
        again = await serve_replica(tmp_path, [Said("never")], upstreams=upstreams)
        try:
            history = [*HELLO, first.choices[0].message, AGAIN]
            await asked(again, told["api_key"], history, n=2)
            assert (await again.rl("/rl/end_session", told["api_key"]))[0] == 200
            turns = (await exported(again, told))["turns"]
        finally:
            await again.stop()
        assert [turn["reply"]["content"] for turn in turns] == ["a", "b", "b"]
        assert [len(turn["messages"]) for turn in turns] == [1, 3, 3]
        written = b"".join(path.read_bytes() for path in tmp_path.glob("*.seg"))
        assert written.count(HELLO[0]["content"].encode()) == 1

    run(tmp_path, [Said("a"), Said("b")], test)


def test_only_providers_of_the_recipe_are_asked(tmp_path):
    async def test(replica: Replica, provider: Gateway) -> None:
        for model in ("http://127.0.0.1:1/v1", "other"):
            status, told, _ = await replica.rl("/rl/start_session", task_id="t", model=model)
            assert (status, told["error"]["param"]) == (400, "model")
            assert "must be one of big" in told["error"]["message"]
        status, _, _ = await replica.rl("/rl/start_session", task_id="t")
        assert status == 429  # of the policy there is none without a slot, as ever
        told = await started(replica)
        with pytest.raises(openai.BadRequestError) as error:
            await asked(replica, told["api_key"], [{"role": "user", "content": "long " * 3000}])
        assert "upstream big: " in str(error.value)
        assert not provider.sampler.requests
        assert (await replica.rl("/rl/end_session", told["api_key"]))[0] == 200

    run(tmp_path, [Said("a")], test)


def test_a_client_that_leaves_ends_the_call_at_the_provider(tmp_path):
    async def test(replica: Replica, provider: Gateway) -> None:
        told = await started(replica)
        async with replica.client(told["api_key"]) as client:
            asked = client.chat.completions.create(model="m", messages=HELLO, stream=True)
            async for chunk in await asked:
                if chunk.choices[0].delta.content:
                    break
        async with asyncio.timeout(30):
            await provider.until_idle()
        assert provider.sampler.aborted
        assert (await replica.rl("/rl/end_session", told["api_key"], request_id="e"))[0] == 200
        (turn,) = (await exported(replica, told))["turns"]
        assert turn["stop_reason"] == "abort"
        assert turn["abort_reason"]
        assert ENDLESS.startswith(turn["reply"]["content"] or "nothing came")

    run(tmp_path, [Said(ENDLESS, pause_s=0.01, hangs=True)], test)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("reply", "status", "says"),
    [
        (refusal("302 Found", "elsewhere", "location: http://127.0.0.1:1/"), 503, "302"),
        (refusal("401 No", f"bad key {KEY}"), 503, "does not take our key"),
        (refusal("429 Slow", f"slow down {KEY}", "retry-after: 7"), 429, "slow down ***"),
        (refusal("500 No", "broken"), 503, "broken (500)"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", 503, "broke off"),
        (b"nonsense\r\n\r\n", 503, "upstream odd"),
        (stream_of(b'{"choices": [{"delta": {"content": "a"}}]}'), 503, "broke off"),
        (stream_of(b"{"), 503, "upstream odd"),
        (stream_of(b"[]"), 503, "no object"),
        (stream_of(b'{"choices": [{"index": 7}]}'), 503, "not asked for"),
        (stream_of(b'{"choices": 7}'), 503, "upstream odd"),
        (stream_of(b'{"choices": [7]}'), 503, "upstream odd"),
        (stream_of(b'{"choices": [{"delta": {"tool_calls": [{}]}}]}'), 503, "no function"),
        (stream_of(b'{"error": {"message": "overloaded"}}'), 503, "overloaded"),
    ],
)
def test_what_providers_do_wrong_is_told_and_no_defect(tmp_path, reply, status, says, is_streamed):
    async def go() -> None:
        async with asyncio.timeout(60), answering(reply) as url:
            upstreams = {"odd": UpstreamConfig(url=url, model="m")}
            options = {"upstreams": upstreams, "upstream_keys": {"odd": KEY}}
            async with serving_sessions(tmp_path, [Said("never")], **options) as replica:
                _, told, _ = await replica.rl("/rl/start_session", task_id="t", model="odd")
                with pytest.raises(openai.APIError) as error:
                    await asked(replica, told["api_key"], stream=is_streamed)
                assert says in str(error.value)
                assert KEY not in str(error.value)
                if not is_streamed:
                    assert error.value.status_code == status
                    if status == 429:
                        assert error.value.response.headers["retry-after"] == "7"

    asyncio.run(go())


def test_a_session_is_forgotten_once_it_was_kept_long_enough(tmp_path):
    async def test(replica: Replica, provider: Gateway) -> None:
        told = await started(replica)
        await asked(replica, told["api_key"])
        assert (await replica.rl("/rl/end_session", told["api_key"]))[0] == 200
        async with asyncio.timeout(30):
            while replica.sessions.counts().rejected != {"not_kept": 1}:
                await asyncio.sleep(0.1)
                replica.sessions.rules.sweep()
        body = {"session_id": told["session_id"], "key": ADMIN_KEY}
        assert (await replica.rl("/export_trajectories", **body))[0] == 410

    run(tmp_path, [Said("a")], test, text_kept_s=0.5)
