"""What clients send otherwise than most do, in every dialect: the same comes of it."""

import asyncio
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from areal_ray.gateway.call import CallHints
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.openai_chat import OpenAIChat
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.tool_formats import TOOL_FORMATS
from tests.support.gateway import Answered, Gateway, ask, make_gateway
from tests.support.request_bodies import DIALECTS
from tests.support.scripted_sampler import Said
from tests.support.templates import TPL_A, TPL_X, letter_tokenizer

PATHS = {name: spoken.path for name, spoken in DIALECTS.items()}
FIELDS = {name: spoken.history for name, spoken in DIALECTS.items()}
USER = {"role": "user", "content": "q"}
RESULT = {
    "chat": {"role": "tool", "tool_call_id": "t1", "content": "5"},
    "responses": {"type": "function_call_output", "call_id": "t1", "output": "5"},
    "messages": {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "5"}],
    },
}
LINE_ENDS = "\x85\u2028\u2029"


def asked(
    dialect: str, history: Any, chat_template: str = TPL_A, said: str = "hi", **fields: Any
) -> tuple[Gateway, Answered]:
    """A gateway, and what it answers to a conversation."""
    gateway = make_gateway([Said(said)], tokenizer=letter_tokenizer(), chat_template=chat_template)
    body = {FIELDS[dialect]: history, **fields}
    return gateway, asyncio.run(ask(gateway, body, path=PATHS[dialect]))


def prompt(gateway: Gateway) -> str:
    """What the model saw last."""
    return str(gateway.sampler.tokenizer.decode(gateway.sampler.requests[-1].prompt_ids))


def told(dialect: str, answer: Answered) -> str:
    """Of an error in the dialect's own shape."""
    return str(DIALECTS[dialect].error(answer.json())["message"])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "refusal", "refusal": "no"}, "no"),
        ({"type": "text", "text": None}, ""),
        ({"type": "output_text", "text": "yes"}, "yes"),
    ],
)
def test_a_refusal_was_said_and_null_is_no_text(dialect, part, said):
    history = [USER, {"role": "assistant", "content": [part]}, USER]
    gateway, answer = asked(dialect, history)
    assert answer.status == 200
    assert prompt(gateway) == f"[user]q[/]\n[assistant]{said}[/]\n[user]q[/]\n[assistant]"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_text_that_is_none_is_a_400_that_names_the_part_and_is_not_left_out(dialect):
    part = {"type": "text", "text": 5}
    _, answer = asked(dialect, [USER, {"role": "user", "content": ["x", part]}])
    assert answer.status == 400
    assert told(dialect, answer).startswith(f"{FIELDS[dialect]}[1].content[1].text: is ")


def test_what_chat_says_in_fields_of_their_own_is_said():
    history = [
        USER,
        {"role": "assistant", "content": None, "refusal": "never"},
        USER,
        {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "function", "name": "add", "content": "5"},
    ]
    gateway, _ = asked("chat", history)
    assert prompt(gateway) == (
        "[user]q[/]\n[assistant]never[/]\n[user]q[/]\n[assistant]<c add>[/]\n[tool]5[/]\n"
        "[assistant]"
    )
    broken = [USER, {"role": "assistant", "function_call": {"name": 5}}]
    assert told("chat", asked("chat", broken)[1]).startswith("messages[1].tool_calls[0].")


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_result_without_its_call_is_a_400_that_names_both(dialect):
    _, answer = asked(dialect, [USER, RESULT[dialect]])
    assert answer.status == 400
    assert told(dialect, answer).startswith(f"{FIELDS[dialect]}[1]")
    assert "t1" in told(dialect, answer)


def test_a_result_with_an_empty_id_is_of_a_call_that_the_model_wrote_as_text():
    result = {"type": "tool_result", "tool_use_id": "", "content": "5"}
    history = [USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": [result]}]
    gateway, answer = asked("messages", history)
    assert answer.status == 200
    assert "5" in prompt(gateway)


@pytest.mark.parametrize("dialect", ["responses", "messages"])
def test_a_turn_without_a_call_before_it_makes_no_result_of_one(dialect):
    """In chat it may: agents there read calls out of the text themselves."""
    history = [USER, {"role": "assistant", "content": "x"}, RESULT[dialect]]
    _, answer = asked(dialect, history, instructions="s", system="s")
    assert answer.status == 400
    assert told(dialect, answer).startswith(f"{FIELDS[dialect]}[2]: 't1'")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refused_conversation_is_a_400_that_names_the_place_in_the_clients_own_body(
    dialect, stream
):
    """Instructions beside the conversation are a message to the template, and none to the client;
    what the client sends as one may be several, and several one."""
    lead = [{"role": "developer", "content": "s"}] if dialect == "chat" else []
    turns = {
        "chat": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "t1", "function": {"name": "add", "arguments": "{}"}}],
            },
            RESULT["chat"],
        ],
        "responses": [
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "t1", "name": "add", "arguments": "{}"},
            RESULT["responses"],
        ],
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {}}],
            },
            {
                "role": "user",
                "content": [*RESULT["messages"]["content"], {"type": "text", "text": "and?"}],
            },
        ],
    }
    history = [*lead, USER, *turns[dialect], USER, USER]
    wrong = len(history) - (2 if dialect == "messages" else 1)
    _, answer = asked(
        dialect, history, TPL_X, stream=stream, instructions="s", system="s", max_tokens=5
    )
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert told(dialect, answer).startswith(f"{FIELDS[dialect]}[{wrong}]: the chat template")


def test_places_are_those_of_the_body_also_where_a_reply_is_gone_on_from():
    async def go() -> None:
        gateway = make_gateway([Said("hi")], tokenizer=letter_tokenizer(), chat_template=TPL_X)
        reply = await ask(gateway, {"input": "q", "instructions": "s"}, path=PATHS["responses"])
        named = {"previous_response_id": reply.json()["id"], "instructions": "s"}
        for items, wrong in (([USER, USER], "input[1]"), ("q", "")):
            answer = await ask(gateway, {**named, "input": items}, path=PATHS["responses"])
            assert answer.status == (400 if wrong else 200)
            if wrong:
                assert told("responses", answer).startswith(f"{wrong}: ")

    asyncio.run(go())


@pytest.mark.parametrize("dialect", [*DIALECTS, "completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_line_ends_of_its_format_alone(dialect, stream):
    """Python's own splitlines knows more of them, and clients use it."""
    gateway = make_gateway([Said(f"a{LINE_ENDS}b")], tokenizer=None)
    history = {"prompt": "q"} if dialect == "completions" else {FIELDS[dialect]: [USER]}
    path = PATHS.get(dialect, "/v1/completions")
    answer = asyncio.run(ask(gateway, {**history, "stream": stream, "model": "m"}, path=path))
    assert answer.status == 200
    assert not set(answer.text) & set(LINE_ENDS)
    assert all(f"\\u{ord(mark):04x}" in answer.text for mark in LINE_ENDS)
    lines = answer.text.splitlines() if stream else [answer.text]
    for line in lines:
        kind, _, content = line.partition(": ")
        if stream and kind == "data" and content != "[DONE]":
            json.loads(content)
        assert not stream or kind in ("", "data", "event")


class Add(BaseModel):
    """Adds."""

    a: int
    b: int | None = None


def test_a_typed_tool_is_shown_alike_in_every_dialect_and_in_process():
    shows = "{{ tools | tojson if tools else '' }}" + TPL_A
    typed: Any = pydantic_function_tool(Add)
    function = json.loads(json.dumps(typed["function"]))
    assert function["strict"] is True
    anthropic = {"name": function["name"], "input_schema": function["parameters"]}
    spelled = {
        "chat": typed,
        "responses": {"type": "function", **function},
        "messages": {**anthropic, "description": function["description"], "type": "custom"},
    }
    shown = set()
    for dialect, tool in spelled.items():
        gateway, answer = asked(dialect, [USER], shows, tools=[tool])
        assert answer.status == 200
        shown.add(prompt(gateway))
    template = gateway.service.answers.template
    ids = Recorder(template).open_turn([USER], [typed]).prompt_ids.tolist()
    shown.add(gateway.sampler.tokenizer.decode(ids))
    assert len(shown) == 1
    assert "Adds." in shown.pop()


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_list_of_allowed_tools_asks_for_a_call_where_it_says_so(mode):
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "add"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    call = OpenAIChat().read({"messages": [USER], "tool_choice": choice}, CallHints())
    assert call.tool_choice == mode


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_another_method_is_a_405_with_those_there_are_in_the_dialects_shape(dialect, method):
    gateway = make_gateway([Said("hi")])
    answer = asyncio.run(ask(gateway, b"", method=method, path=PATHS[dialect]))
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert told(dialect, answer) == f"method: is {method}; must be POST"


def test_what_is_not_there_is_a_404_in_the_shape_of_the_dialect_that_it_looks_like():
    gateway = make_gateway([Said("hi")])
    for dialect in DIALECTS:
        answer = asyncio.run(ask(gateway, {}, path=f"{PATHS[dialect]}/batches"))
        assert answer.status == 404
        assert f"{PATHS[dialect]}/batches" in told(dialect, answer)
    for path in ("/health", "/v1/models"):
        answer = asyncio.run(ask(gateway, {}, path=path))
        assert (answer.status, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path", ["//v1/chat/completions", "/v1//chat/completions/", "/s/x//v1/models"]
)
def test_a_base_url_that_ends_with_a_slash_is_the_same(path):
    gateway = make_gateway([Said("hi")])
    method = "GET" if path.endswith("models") else "POST"
    body: Any = b"" if method == "GET" else {"messages": [USER]}
    assert asyncio.run(ask(gateway, body, method=method, path=path)).status == 200
    assert asyncio.run(ask(gateway, b"", method="GET", path="//health")).status == 200


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("encoding", [b"", b"gzip"])
def test_nothing_that_is_sent_is_unpickled_or_run(tmp_path, encoding):
    made = tmp_path / "made"
    body = pickle.dumps(Trap(made))
    pickle.loads(body)
    assert made.exists()
    made.unlink()
    gateway = make_gateway([Said("hi")])
    headers = [(b"content-type", b"application/octet-stream")]
    if encoding:
        headers.append((b"content-encoding", encoding))
        body = gzip.compress(body)
    for path in (
        *PATHS.values(),
        *("/v1/completions", "/v1/messages/count_tokens", "/rl/set_reward", "/update_weights"),
        *("/update_weights_from_tensor", "/collective_rpc", "/health", "/v1/models"),
    ):
        answer = asyncio.run(ask(gateway, body, path=path, headers=headers))
        assert answer.status in (400, 404, 405)
    assert not made.exists()


def test_arguments_that_are_a_program_are_text_or_refused_and_never_run(tmp_path):
    made = tmp_path / "made"
    program = f"__import__('pathlib').Path({str(made)!r}).touch()"
    calls = {
        "chat": {"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]},
        "responses": {"type": "function_call", "call_id": "t1", "name": "a"},
        "messages": {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "a"}],
        },
    }
    calls["chat"]["tool_calls"][0]["function"]["arguments"] = program
    calls["responses"]["arguments"] = program
    calls["messages"]["content"][0]["input"] = program
    for dialect, call in calls.items():
        _, answer = asked(dialect, [USER, call])
        assert answer.status == 400
        assert told(dialect, answer).startswith(f"{FIELDS[dialect]}[1]")
    tool = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    for said in (
        f'<tool_call>{{"name": "a", "arguments": {program}}}</tool_call>',
        f"<tool_call><function=a><parameter=x>{program}</parameter></function></tool_call>",
    ):
        for parser in TOOL_FORMATS:
            reply = ReplyFormat(ChatTemplate(letter_tokenizer(), TPL_A), parser).read(
                said, [tool], []
            )
            assert reply.text == said or json.loads(reply.tool_calls[0].arguments) == {"x": program}
    assert not made.exists()


@pytest.mark.parametrize("levels", [150, 190, 250, 900, 970, 2000])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_arguments_however_deep_are_read_or_refused_and_what_was_told_can_be_sent_again(
    dialect, levels
):
    """Between what can be read and what can be compared there is no depth that is a defect."""
    arguments = '{"a": ' + "[" * levels + "]" * levels + "}"
    said = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    spoken = DIALECTS[dialect]

    async def go() -> None:
        limits = CallLimits(10_000, 100_000)
        gateway = make_gateway(
            [Said(said), Said("ok")],
            tokenizer=letter_tokenizer(),
            chat_template=TPL_A,
            limits=limits,
        )
        first = await ask(gateway, spoken.start, path=spoken.path)
        assert first.status == 200
        is_call = "<tool_call>" not in first.text
        assert is_call == (levels < 200)
        if is_call:
            again = await ask(gateway, spoken.next(spoken.start, first), path=spoken.path)
            assert again.status == 200
        else:
            call = {
                "chat": [{"role": "assistant", "tool_calls": [{"id": "t1", "function": {}}]}],
                "responses": [{"type": "function_call", "call_id": "t1"}],
            }[dialect]
            function: Any = (
                call[0] if dialect == "responses" else call[0]["tool_calls"][0]["function"]
            )
            function |= {"name": "add", "arguments": arguments}
            history = [USER, *call, RESULT[dialect]]
            answer = await ask(gateway, {spoken.history: history}, path=spoken.path)
            assert answer.status == 400
            assert "deeper than 200 levels" in told(dialect, answer) or levels > 800
        assert gateway.service.counts.num_defects == 0

    asyncio.run(go())


@pytest.mark.parametrize("said", ["<think>ab", "<think>ab</think>", "<think>ab</think>cd", "cd"])
@pytest.mark.parametrize("max_tokens", [9, 100])
def test_items_that_were_streamed_are_those_of_the_whole_reply_wherever_it_is_cut(said, max_tokens):
    def bare(response: Any) -> Any:
        named = ("id", "encrypted_content")
        return [
            {name: value for name, value in item.items() if name not in named}
            for item in response["output"]
        ]

    thinks = TPL_A + "{# <think></think> #}"
    asks = {"include": ["message.output_text.logprobs"], "max_output_tokens": max_tokens}
    _, whole = asked("responses", [USER], thinks, said, **asks)
    _, streamed = asked("responses", [USER], thinks, said, stream=True, **asks)
    last = streamed.events()[-1]["response"]
    assert bare(last) == bare(whole.json())
    assert (last["status"], last["usage"]) == (whole.json()["status"], whole.json()["usage"])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_line_that_counts_requests_in_the_system_text_breaks_no_line_in_any_dialect(dialect):
    spoken = DIALECTS[dialect]

    def body(mark: str, history: list[Any]) -> dict[str, Any]:
        line = f"x-billing: cch={mark};"
        text = f"{line}\nBe good."
        if dialect == "messages":
            blocks = [{"type": "text", "text": one} for one in (line, "Be good.")]
            return {"system": blocks, "max_tokens": 9, "messages": history}
        if dialect == "responses":
            return {"instructions": text, "input": history}
        return {"messages": [{"role": "system", "content": text}, *history]}

    async def go() -> None:
        gateway = make_gateway([Said("hi")], tokenizer=letter_tokenizer(), chat_template=TPL_A)
        first = await ask(gateway, body("ab12", [USER]), path=spoken.path)
        history = [USER, *spoken.turn(first.json()), USER]
        assert (await ask(gateway, body("cd34", history), path=spoken.path)).status == 200
        one, two = (request.prompt_ids.tolist() for request in gateway.sampler.requests)
        said = next(iter(gateway.sampler.sampled.values())).token_ids.tolist()
        assert two[: len(one) + len(said)] == [*one, *said]
        (line,) = gateway.recorder.trajectories(task_id="t", group_id="g", episode_id="e")
        assert len(set(line.turn_ids[line.loss_mask].tolist())) == 2

    asyncio.run(go())
