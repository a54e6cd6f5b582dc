"""Structured output as SDKs ask for it: real clients and sockets, a real engine of a tiny model."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import jsonschema
import numpy as np
import openai
import pytest
from pydantic import BaseModel, Field

from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.template import ChatTemplate
from tests.support.engine_sampler import EngineSampler
from tests.support.gateway import Gateway, serving
from tests.support.tiny_models import write_tiny_model

SHOWS_TOOLS = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Knows no reasoning, which a random model would never end."""
HELLO: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
ASKED: dict[str, Any] = {"model": "m", "messages": HELLO}


class Sum(BaseModel):
    """What replies are parsed into."""

    a: int = Field(ge=0, le=99)
    side: Literal["left", "right"]
    is_sure: bool


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "word": {"enum": ["one", "two"]},
    },
    "required": ["a", "word"],
    "additionalProperties": False,
}
UNKEPT: dict[str, Any] = {"type": "array", "uniqueItems": True}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": ADD}]


def named(schema: dict[str, Any], *, strict: bool = True) -> Any:
    """A response_format."""
    wanted = {"name": "x", "schema": schema, "strict": strict}
    return {"type": "json_schema", "json_schema": wanted}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), seed=4)
    (folder / "chat_template.jinja").write_text(SHOWS_TOOLS)
    return folder


@pytest.fixture
def engine(model: Path) -> Iterator[TorchGenerationEngine]:
    made = TorchGenerationEngine(model, TorchGenerationConfig(max_slots=16))
    yield made
    made.close()


@pytest.fixture
def run(model: Path, engine: TorchGenerationEngine) -> Callable[..., None]:
    """Serves the engine and lets a test at it."""

    def serve(test: Callable[[Gateway], Awaitable[None]], **options: Any) -> None:
        async def go() -> None:
            sampler = EngineSampler(engine)
            tokenizer = ChatTemplate.from_folder(model).tokenizer
            ways = {"structured_output": "auto", "limits": CallLimits(400, 1000), **options}
            async with (
                asyncio.timeout(100),
                serving([], sampler=sampler, tokenizer=tokenizer, **ways) as gateway,
            ):
                await test(gateway)

        asyncio.run(go())

    return serve


def test_chat_replies_parse_into_the_class_they_are_asked_for_in(run):
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            for seed in range(4):
                done = await client.chat.completions.parse(
                    **ASKED, response_format=Sum, seed=seed, n=2
                )
                for choice in done.choices:
                    assert isinstance(choice.message.parsed, Sum)
                    assert choice.finish_reason == "stop"

    run(test)


def test_a_streamed_reply_is_held_as_a_whole_one_is(run):
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            options = {**ASKED, "response_format": named(SCHEMA), "seed": 3}
            whole = await client.chat.completions.create(**options)
            stream = await client.chat.completions.create(**options, stream=True)
            chunks = [chunk async for chunk in stream]
            text = "".join(one.choices[0].delta.content or "" for one in chunks)
            jsonschema.validate(json.loads(text), SCHEMA)
            assert text == whole.choices[0].message.content
            assert chunks[-1].choices[0].finish_reason == "stop"
            assert len(chunks) > 5
            async with client.chat.completions.stream(**ASKED, response_format=Sum) as events:
                final = await events.get_final_completion()
            assert isinstance(final.choices[0].message.parsed, Sum)

    run(test)


def test_json_mode_gives_an_object_or_is_cut_off(run):
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            wanted: Any = {"type": "json_object"}
            for seed in range(6):
                done = await client.chat.completions.create(
                    **ASKED, response_format=wanted, seed=seed
                )
                (choice,) = done.choices
                assert choice.message.content is not None
                assert choice.message.content.startswith("{")
                if choice.finish_reason == "stop":
                    assert type(json.loads(choice.message.content)) is dict
                else:
                    assert choice.finish_reason == "length"

    run(test)


def test_responses_parse_into_the_class_they_are_asked_for_in(run):
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            done = await client.responses.parse(model="m", input="12+30?", text_format=Sum)
            assert isinstance(done.output_parsed, Sum)
            assert done.status == "completed"
            async with client.responses.stream(
                model="m", input="12+30?", text_format=Sum
            ) as stream:
                final = await stream.get_final_response()
            assert isinstance(final.output_parsed, Sum)
            tools: Any = [{"type": "function", "strict": True, **ADD}]
            called = await client.responses.create(
                model="m", input="12+30?", tools=tools, tool_choice="required"
            )
            for item in called.output:
                assert item.type == "function_call"
                jsonschema.validate(json.loads(item.arguments), SCHEMA)

    run(test, limits=CallLimits(700, 1000))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_chat_requires_comes_and_fits_its_schema(run, choice):
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            options: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
            for seed in range(4):
                done = await client.chat.completions.create(**ASKED, **options, seed=seed)
                (one,) = done.choices
                assert one.finish_reason == "tool_calls"
                assert one.message.content is None
                (call,) = one.message.tool_calls or ()
                jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
            stream = await client.chat.completions.create(**ASKED, **options, stream=True)
            chunks = [chunk async for chunk in stream]
            deltas = [
                c.choices[0].delta.tool_calls[0] for c in chunks if c.choices[0].delta.tool_calls
            ]
            assert len({delta.index for delta in deltas}) == 1
            told = "".join(delta.function.arguments or "" for delta in deltas)
            jsonschema.validate(json.loads(told), SCHEMA)
            assert chunks[-1].choices[0].finish_reason == "tool_calls"

    run(test)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_call_that_messages_require_comes_and_fits_its_schema(run, choice):
    async def test(gateway: Gateway) -> None:
        async with anthropic.AsyncAnthropic(
            base_url=gateway.url, api_key="key", max_retries=0
        ) as client:
            asked: Any = {
                **ASKED,
                "max_tokens": 300,
                "tools": [{"name": "add", "input_schema": SCHEMA}],
                "tool_choice": {**choice, "disable_parallel_tool_use": True},
            }
            done = await client.messages.create(**asked)
            (block,) = done.content
            assert block.type == "tool_use"
            jsonschema.validate(block.input, SCHEMA)
            assert done.stop_reason == "tool_use"
            async with client.messages.stream(**asked) as stream:
                final = await stream.get_final_message()
            assert final.content[0].type == "tool_use"
            jsonschema.validate(final.content[0].input, SCHEMA)
            titled = await client.messages.create(
                **ASKED,
                max_tokens=300,
                output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
            )
            assert titled.content[0].type == "text"
            jsonschema.validate(json.loads(titled.content[0].text), SCHEMA)

    run(test)


def test_what_cannot_be_kept_is_a_400_in_each_dialects_shape_and_others_go_on(run):
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            beside = asyncio.create_task(client.chat.completions.create(**ASKED, max_tokens=30))
            with pytest.raises(openai.BadRequestError) as chat:
                await client.chat.completions.create(**ASKED, response_format=named(UNKEPT))
            assert chat.value.param == "response_format"
            assert "uniqueItems" in chat.value.message
            large = {f"p{i}": {"type": "string"} for i in range(4000)}
            begin = time.monotonic()
            with pytest.raises(openai.BadRequestError) as responses:
                await client.responses.create(
                    model="m",
                    input="?",
                    text={
                        "format": {
                            "type": "json_schema",
                            "name": "x",
                            "strict": True,
                            "schema": {"type": "object", "properties": large},
                        }
                    },
                )
            assert time.monotonic() - begin < 15
            assert responses.value.param == "text.format"
            with pytest.raises(openai.BadRequestError) as unknown:
                await client.chat.completions.create(
                    **ASKED,
                    tools=TOOLS,
                    tool_choice={"type": "function", "function": {"name": "sub"}},
                )
            assert unknown.value.param == "tool_choice"
            async with anthropic.AsyncAnthropic(
                base_url=gateway.url, api_key="key", max_retries=0
            ) as other:
                with pytest.raises(anthropic.BadRequestError) as messages:
                    await other.messages.create(
                        **ASKED,
                        max_tokens=9,
                        tools=[{"name": "a", "input_schema": {"type": "object", "$ref": "#/x"}}],
                        tool_choice={"type": "any"},
                    )
            told: Any = messages.value.body
            assert told["error"]["type"] == "invalid_request_error"
            assert (await beside).choices[0].finish_reason in ("stop", "length")

    run(test)


def test_a_seeded_reply_is_the_same_whatever_is_held_beside_it(run):
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:

            async def plain() -> str:
                done = await client.chat.completions.create(**ASKED, seed=11, max_tokens=40)
                return done.choices[0].message.content or ""

            async def held(seed: int) -> None:
                await client.chat.completions.create(
                    **ASKED, seed=seed, response_format=named(SCHEMA)
                )

            alone = await plain()
            among = await asyncio.gather(plain(), *(held(seed) for seed in range(8)), plain())
            assert among[0] == among[-1] == alone

    run(test)


def test_in_sessions_that_train_it_is_passed_over_unless_the_recipe_says_on(run):
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            await client.chat.completions.create(
                **ASKED, response_format=named(UNKEPT), tools=TOOLS, tool_choice="required"
            )
        assert [request.grammar for request in gateway.sampler.requests] == [""]

    run(test, is_trained=True)


def test_a_held_turn_is_recorded_as_the_policy_tells_it_and_carries_no_loss(run):
    async def test(gateway: Gateway) -> None:
        messages: Any = list(HELLO)
        async with gateway.client() as client:
            for wanted in ({}, {"response_format": named(SCHEMA)}, {}):
                done = await client.chat.completions.create(
                    model="m", messages=messages, max_tokens=60, **wanted
                )
                messages += [
                    {"role": "assistant", "content": done.choices[0].message.content},
                    {"role": "user", "content": "And?"},
                ]
        recorder, log = gateway.recorder, list(gateway.sampler.results.values())
        assert [turn.left_out for turn in recorder.outline()] == ["", "held_to_a_grammar", ""]
        (line,) = recorder.trajectories(task_id="t", group_id="g", episode_id="e")
        trained = [token for turn in (log[0], log[2]) for token in turn.token_ids.tolist()]
        assert line.token_ids[line.loss_mask].tolist() == trained
        held = log[1].token_ids.tolist()
        place = line.token_ids.tolist().index(held[0], len(log[0].token_ids))
        assert any(
            line.token_ids[at : at + len(held)].tolist() == held
            for at in range(place, len(line.token_ids))
        )
        np.testing.assert_array_equal(line.versions[~line.loss_mask], -1)
        np.testing.assert_array_equal(line.behaviour_logprobs[~line.loss_mask], 0.0)
        # Turns that are held and end the conversation are left away, those alone train nothing.
        replayed = [recorder.turn_record(turn) for turn in range(3)]
        assert [record.facts["is_held"] for record in replayed] == [False, True, False]

    run(test, is_trained=True, structured_output="on")


def test_an_engine_that_cannot_refuses_only_who_cannot_do_without(run):
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            for wanted in (
                {"response_format": named(SCHEMA, strict=False)},
                {"response_format": {"type": "json_object"}},
                {"tools": [{"type": "function", "function": {**ADD, "strict": True}}]},
            ):
                await client.chat.completions.create(**ASKED, max_tokens=5, **wanted)
            for needed in (
                {"response_format": named(SCHEMA)},
                {"tools": TOOLS, "tool_choice": "required"},
            ):
                with pytest.raises(openai.BadRequestError, match="of stone"):
                    await client.chat.completions.create(**ASKED, max_tokens=5, **needed)

    run(test, why_unconstrained="the engine is of stone")
