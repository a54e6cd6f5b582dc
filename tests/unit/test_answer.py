"""What a model call becomes: its prompt, what is asked of the sampler, how it is recorded."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.gateway.answer import Answer
from areal_ray.gateway.anthropic import AnthropicMessages
from areal_ray.gateway.call import Call, CallError, CallHints, CallReply, ChoiceEnd, TextDelta
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.openai_chat import OpenAIChat
from areal_ray.gateway.openai_completions import OpenAICompletions
from tests.support.gateway import TOOL, Gateway, ask, make_gateway
from tests.support.scripted_sampler import Said
from tests.support.templates import TPL_A, TPL_E, TPL_J, TPL_S, TPL_X, letter_tokenizer

HELLO = [{"role": "user", "content": "2+3?"}]
CALLED = {
    "id": "call1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2}'},
}


def lettered(chat_template: str = TPL_A, script: Any = None, **options: Any) -> Gateway:
    """A gateway of one token a character."""
    script = script or [Said("5")]
    return make_gateway(
        script, tokenizer=letter_tokenizer(), chat_template=chat_template, **options
    )


async def answered(answer: Answer, *, stream: bool = False, **_: Any) -> None:
    """Sample all of it, in either way, within 10 s."""
    async with asyncio.timeout(10):
        if not stream:
            await answer.whole()
            return
        async for _ in answer.events():
            pass


def read(**body: Any) -> Call:
    """A call as the chat dialect reads it."""
    return OpenAIChat().read({"model": "m", "messages": HELLO, **body}, CallHints())


async def begun(gateway: Gateway, **body: Any) -> Answer:
    """The answer to a chat request, its prompt fixed."""
    return await gateway.service.answers.begin(read(**body), gateway.door.record())


def replied(gateway: Gateway, **body: Any) -> CallReply:
    """A chat request answered whole."""

    async def go() -> CallReply:
        return await (await begun(gateway, **body)).whole()

    return asyncio.run(go())


def prompt(gateway: Gateway, messages: Any, **body: Any) -> str:
    """What the model sees of a conversation that nothing precedes."""
    gateway.door.records.clear()
    replied(gateway, messages=messages, **body)
    ids = gateway.sampler.requests[-1].prompt_ids.tolist()
    return gateway.sampler.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, ""),
        ([], ""),
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "input_text", "text": "a"}], "a"),
    ],
)
@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_content_that_is_null_empty_or_in_parts_is_the_text_it_holds(role, content, said):
    called = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
    message = {"role": role, "content": content, "tool_call_id": "call1"}
    messages = [*HELLO, *([called] if role == "tool" else []), message]
    assert prompt(lettered(), messages).endswith(f"[{role}]{said}[/]\n[assistant]")


@pytest.mark.parametrize("calls", [{"tool_calls": []}, {"tool_calls": None}])
def test_no_tool_calls_are_the_same_as_none_mentioned(calls):
    plain = [*HELLO, {"role": "assistant", "content": "5"}, *HELLO]
    told = [HELLO[0], {"role": "assistant", "content": "5", **calls}, HELLO[0]]
    gateway = lettered()
    assert prompt(gateway, plain) == prompt(gateway, told)


@pytest.mark.parametrize(
    ("chat_template", "shown"), [(TPL_E, "<c add a=2>"), (TPL_J, '<c add {"a": 2}>')]
)
@pytest.mark.parametrize("arguments", ['{"a": 2}', {"a": 2}])
def test_arguments_reach_the_template_as_a_mapping(chat_template, shown, arguments):
    call = {"id": "call1", "function": {"name": "add", "arguments": arguments}}  # and no type
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert f"[assistant]{shown}[/]" in prompt(lettered(chat_template), messages)


def test_one_schema_gives_one_prompt_however_it_is_spelled():
    function = TOOL["function"]
    turned = {
        "function": {name: function[name] for name in reversed(list(function))},
        "type": "function",
    }
    typed = {**TOOL, "function": {**function, "strict": None}}
    strict = {**TOOL, "function": {**function, "strict": False}}
    shows = "{{ tools | tojson if tools else '' }}" + TPL_A
    gateway = lettered(shows)
    first, *others = (
        prompt(gateway, HELLO, tools=[tool]) for tool in (TOOL, turned, typed, strict)
    )
    in_process = gateway.service.answers.template.render(HELLO, [TOOL])
    assert "Adds." in first
    assert {first, *others} == {in_process}


def test_tools_that_are_no_functions_and_unknown_fields_are_passed_over():
    gateway = lettered("{{ tools | length if tools else 0 }}" + TPL_A)
    others = [{"type": "web_search"}, {"type": "namespace", "tools": []}, {"type": "custom"}]
    assert prompt(gateway, HELLO, tools=[*others, TOOL], whatever={"a": 1}).startswith("1")
    assert prompt(gateway, HELLO, tools=[TOOL], tool_choice="none").startswith("0")


def test_a_system_turn_that_the_template_inserts_is_in_the_prompt_as_in_process():
    gateway = lettered(TPL_S)
    assert prompt(gateway, HELLO) == gateway.service.answers.template.render(HELLO)
    assert prompt(gateway, HELLO).startswith("[system]be brief[/]")


def test_a_refused_conversation_is_a_400_that_names_the_message():
    gateway = lettered(TPL_X)
    said = [*HELLO, {"role": "assistant", "content": "5"}, *HELLO, *HELLO]
    with pytest.raises(CallError, match="roles must alternate") as refused:
        asyncio.run(begun(gateway, messages=said))
    assert (refused.value.status, refused.value.param) == (400, "messages[3]")
    with pytest.raises(CallError):
        asyncio.run(gateway.service.answers.count_prompt_tokens(read(messages=said)))


def test_a_developer_is_a_system():
    assert prompt(lettered(), [{"role": "developer", "content": "x"}, *HELLO]).startswith(
        "[system]x[/]"
    )


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 7, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 5),
        ({}, 20),
        ({"max_tokens": None}, 20),
        ({"max_tokens": 128_000}, 20),
    ],
)
def test_the_limits_on_tokens_are_the_smallest_of_those_given_and_the_runs(body, tokens):
    gateway = lettered(script=[Said("5" * 99)], limits=CallLimits(20, 1000))
    reply = replied(gateway, **body)
    assert reply.num_tokens == tokens
    assert reply.choices[0].stop_reason == "length"


def test_what_the_window_does_not_hold_is_not_asked_for_and_a_full_one_is_a_400():
    gateway = lettered(script=[Said("5" * 99)], limits=CallLimits(64, 64))
    overhead = len("[user][/]\n[assistant]")
    fits = [{"role": "user", "content": "x" * (61 - overhead)}]
    assert replied(gateway, messages=fits).num_tokens == 3
    for length in (64, 80):
        full = [{"role": "user", "content": "x" * (length - overhead)}]
        with pytest.raises(CallError) as refused:
            asyncio.run(begun(gateway, messages=full))
        assert refused.value.code == "context_length_exceeded"
        assert "maximum context length is 64 tokens" in str(refused.value)
        assert f"too long: {length} tokens > 63 maximum" in str(refused.value)
    assert len(gateway.sampler.requests) == 1


@pytest.mark.parametrize("length", [64, 100_000])
def test_a_session_knows_whether_its_last_call_was_refused_because_the_window_is_full(length):
    """However far beyond it the prompt was: what is far too long is not even recorded."""
    gateway = lettered(limits=CallLimits(64, 64))
    record = gateway.door.record()
    for content, is_full in (("x", False), ("x" * length, True), ("y", False), ([5], False)):
        messages = [{"role": "user", "content": content}]
        if content == "y" or content == "x":
            replied(gateway, messages=messages)
        else:
            with pytest.raises(CallError):
                asyncio.run(begun(gateway, messages=messages))
        assert record.is_full is is_full


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": ["user"], "content": "x"}]}, "messages[1].role"),
        ({"messages": [*HELLO, {"role": "user", "content": 7}]}, "messages[1].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"n": 99}, "n"),
        ({"n": True}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        *(({"top_logprobs": wrong}, "top_logprobs") for wrong in (21, -1, 1.5, "2", True)),
        ({"model": 5}, "model"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(body, param):
    with pytest.raises(CallError) as refused:
        asyncio.run(begun(lettered(), **body))
    assert (refused.value.status, refused.value.param) == (400, param)
    assert str(refused.value).startswith(param)


@pytest.mark.parametrize("arguments", ['{"a": 2', "[1]", "__import__('os').system('x')"])
def test_arguments_that_are_no_json_object_are_a_400(arguments):
    call = {**CALLED, "function": {"name": "add", "arguments": arguments}}
    with pytest.raises(CallError) as refused:
        asyncio.run(
            begun(lettered(), messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])
        )
    assert (refused.value.status, refused.value.param) == (400, "messages[1].tool_calls")


def test_choices_are_sampled_side_by_side_from_one_prompt_with_seeds_of_their_own():
    gateway = lettered(script=[Said("5"), Said("6"), Said("7")])
    reply = replied(gateway, n=3, seed=1)
    assert [choice.text for choice in reply.choices] == ["5", "6", "7"]
    asked = gateway.sampler.requests
    assert len({request.seed for request in asked}) == 3
    assert len({request.request_id for request in asked}) == 3
    assert len({request.prompt_ids.tobytes() for request in asked}) == 1
    again = lettered(script=[Said("5")])
    replied(again, n=3, seed=1)
    assert [request.seed for request in again.sampler.requests] == [r.seed for r in asked]


def test_a_turn_without_a_seed_has_that_of_its_run_session_and_place():
    gateway = lettered()
    replied(gateway)
    replied(gateway)
    first, second = gateway.sampler.requests
    assert first.seed != second.seed
    again = lettered()
    replied(again)
    assert again.sampler.requests[0].seed == first.seed


@pytest.mark.parametrize("is_trained", [True, False])
def test_only_what_does_not_train_may_be_sampled_otherwise_than_the_run_does(is_trained):
    gateway = lettered(is_trained=is_trained)
    replied(gateway, temperature=0, top_p=0.5)
    request = gateway.sampler.requests[0]
    wanted = (None, None) if is_trained else (0.0, 0.5)
    assert (request.temperature, request.top_p) == wanted


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("dialect", [OpenAIChat(), OpenAICompletions(), AnthropicMessages()])
def test_what_a_client_asks_of_sampling_reaches_the_sampler_or_is_refused(dialect, is_trained):
    gateway = lettered(is_trained=is_trained)
    said = {"messages": [{"role": "user", "content": "2+3?"}], "prompt": "2+3="}

    def ask(**asked: Any) -> Any:
        call = dialect.read({**said, **asked}, CallHints())

        async def answered() -> None:
            await (await gateway.service.begin(call, gateway.door.record())).whole()

        asyncio.run(answered())
        return gateway.sampler.requests[-1].wishes.given()

    penalties = {"presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 1.2}
    asked = {"top_k": 5, "min_p": 0.1, "logit_bias": {"7": -100.0}, **penalties}
    assert ask(**asked) == ({} if is_trained else asked)
    assert ask(top_k=-1, min_p=0) == ({} if is_trained else {"top_k": 0, "min_p": 0.0})
    assert ask(top_k=None, logit_bias={}, min_tokens=0, ignore_eos=False, best_of=1) == {}
    assert ask(chat_template_kwargs={}, add_generation_prompt=True, functions=[]) == {}
    for unserved in (
        *({"min_tokens": 5}, {"ignore_eos": True}, {"guided_choice": ["a", "b"]}),
        *({"chat_template_kwargs": {"enable_thinking": False}}, {"functions": [{"name": "add"}]}),
    ):
        if is_trained:  # an agent's own settings do not keep it from training
            assert ask(**unserved) == {}
            continue
        with pytest.raises(CallError, match=f"^{next(iter(unserved))}: is not served here"):
            ask(**unserved)


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": -2},
        {"top_k": 1.5},
        {"top_k": True},
        {"min_p": 2},
        {"frequency_penalty": 3},
        {"presence_penalty": "1"},
        {"repetition_penalty": 0},
        {"logit_bias": [1]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"7": 101}},
        {"logit_bias": {"7": None}},
    ],
)
def test_a_wish_for_sampling_that_makes_no_sense_is_a_400_that_names_it(asked):
    (name,) = asked
    with pytest.raises(CallError, match=f"^{name}: ") as refused:
        OpenAIChat().read({"messages": [{"role": "user", "content": "x"}], **asked}, CallHints())
    assert (refused.value.status, refused.value.param) == (400, name)


@pytest.mark.parametrize("stream", [True, False])
def test_a_sampler_that_fails_is_a_503_and_the_turn_is_not_recorded(stream):
    gateway = lettered(script=[Said("12345", error="replica 3 died")])

    async def go() -> None:
        answer = await begun(gateway, stream=stream)
        with pytest.raises(CallError, match="replica 3 died") as failed:
            await answered(answer, stream=stream)
        assert (failed.value.status, failed.value.retry_after_s) == (503, 1.0)

    asyncio.run(go())
    assert not any(t.loss_mask.any() for t in trajectories(gateway))


def test_one_choice_that_fails_ends_the_others():
    gateway = lettered(script=[Said(hangs=True), Said(error="no"), Said(hangs=True)])

    async def go() -> None:
        for stream in (True, False):
            answer = await begun(gateway, n=3, stream=stream)
            with pytest.raises(CallError):
                await answered(answer, stream=stream)
            gateway.sampler.requests.clear()
            assert gateway.sampler.num_running == 0

    asyncio.run(go())


def test_a_stream_that_is_closed_aborts_its_turn_and_nothing_of_it_trains():
    gateway = lettered(script=[Said("123456789")])

    async def go() -> None:
        events = (await begun(gateway, stream=True)).events()
        async for batch in events:
            assert batch
            break
        await events.aclose()

    asyncio.run(go())
    assert len(gateway.sampler.aborted) == 1
    assert not any(t.loss_mask.any() for t in trajectories(gateway))


@given(
    text=st.text(st.characters(max_codepoint=127, exclude_characters="<>"), max_size=30),
    size=st.integers(1, 7),
    stop=st.lists(st.text("abc ", min_size=1, max_size=3), max_size=2),
)
def test_what_is_streamed_is_what_is_answered_whole_and_both_are_recorded_alike(text, size, stop):
    whole = lettered(script=[Said(text, chunk_tokens=size)])
    streamed = lettered(script=[Said(text, chunk_tokens=size)])

    async def go() -> str:
        told = ""
        async for events in (await begun(streamed, stop=stop, stream=True)).events():
            for event in events:
                if isinstance(event, TextDelta):
                    told += event.text
                elif isinstance(event, ChoiceEnd):
                    assert event.whole.text == told
        return told

    reply = replied(whole, stop=stop)
    assert asyncio.run(go()) == reply.choices[0].text
    first, second = trajectories(whole)[0], trajectories(streamed)[0]
    assert first.token_ids.tolist() == second.token_ids.tolist()
    assert first.loss_mask.tolist() == second.loss_mask.tolist()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
NAMES = (
    *("model", "messages", "tools", "tool_choice", "max_tokens", "stop", "n", "seed", "user"),
    *("temperature", "top_p", "logprobs", "top_logprobs", "response_format", "metadata"),
    *("stream_options", "parallel_tool_calls", "max_completion_tokens", "prompt_cache_key"),
)
FIELDS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, JSON))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | JSON},
        optional={
            "content": JSON | st.text(max_size=5),
            "tool_calls": JSON
            | st.lists(
                st.fixed_dictionaries(
                    {"function": JSON | st.fixed_dictionaries({"name": JSON, "arguments": JSON})},
                    optional={"id": JSON, "type": JSON},
                ),
                max_size=2,
            ),
            "tool_call_id": JSON,
            "name": JSON,
            "reasoning_content": JSON,
        },
    ),
    max_size=3,
)


@given(fields=FIELDS, messages=MESSAGES, takes_messages=st.booleans())
def test_no_body_is_ever_answered_with_a_500_or_counts_as_a_defect(
    fields, messages, takes_messages
):
    gateway = lettered()
    body = {**fields, **({"messages": messages} if takes_messages else {})}
    answer = asyncio.run(ask(gateway, body))
    assert answer.status in (200, 400), answer
    assert gateway.service.counts.num_defects == 0
    assert ("error" in answer.json()) == (answer.status == 400)


def trajectories(gateway: Gateway) -> Any:
    """All that was recorded of calls without a session."""
    return gateway.recorder.trajectories(task_id="t", group_id="g", episode_id="e")
