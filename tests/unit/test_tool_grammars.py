"""Grammars of replies: what a model samples under them is read as the calls that were asked for."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken

from areal_ray.core.grammars import Grammars, Matcher
from areal_ray.gateway.call import Call, CallError
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.structured import StructuredOutput
from areal_ray.gateway.template import ChatTemplate
from tests.support.generation import Served, request, serving
from tests.support.tiny_models import CHATML, tiny_tokenizer, write_tiny_model

FORMATS = ("hermes", "qwen3_coder", "llama3", "mistral")
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>", "</think>")
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"$ref": "#/$defs/side"},
        "note": {"enum": ["x", "y z"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"side": {"type": "boolean"}},
}
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 5}},
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """As a call has it."""
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("add", ADD), tool("look", LOOK)]


def call_of(**fields: Any) -> Call:
    """A call with the tools."""
    return Call(**{"model": "m", "messages": [{"role": "user", "content": "?"}], **fields})


def chat_template(*, marks: str, reasons: bool = False) -> ChatTemplate:
    """A template whose tokenizer writes its marks as text, as added or as special tokens."""
    tokenizer = tiny_tokenizer()
    if marks != "text":
        is_special = marks == "special"
        tokenizer.add_tokens(
            [AddedToken(one, special=is_special, normalized=False) for one in MARKS],
            special_tokens=is_special,
        )
    return ChatTemplate(tokenizer, CHATML + ("{# <think></think> #}" if reasons else ""))


def reader(template: ChatTemplate, name: str) -> ReplyFormat:
    """Of a format."""
    return ReplyFormat(template, name)


def whole(template: ChatTemplate, reply: ReplyFormat, call: Call, prompt: str = "") -> str:
    """The grammar that a call's turn is held to after a prompt."""
    made = StructuredOutput(template, reply, mode="on")
    held = asyncio.run(made.constrained(call, is_trained=False))
    assert held.grammar
    return reply.whole_grammar(held.grammar, template.encode_array(prompt))


def matcher_of(template: ChatTemplate, grammar: str) -> Matcher:
    """At the grammar's beginning."""
    found = Grammars(template.tokenizer_json, 0, sorted(template.end_ids)).compile(grammar)
    assert isinstance(found, Matcher), found
    return found


def follows(template: ChatTemplate, grammar: str, text: str) -> bool:
    """Whether a whole reply is what the grammar allows."""
    matcher = matcher_of(template, grammar)
    for token in template.tokenizer.encode(text, add_special_tokens=False):
        if not matcher.mask[token // 32] >> (token % 32) & 1:
            return False
        matcher.take(token)
    return matcher.is_complete


@pytest.fixture(scope="module", params=["text", "added", "special"])
def marked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ChatTemplate, Served]]:
    """A tiny model, whose marks are of one kind, and its engine."""
    template = chat_template(marks=request.param)
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), vocab_size=400)
    template.tokenizer.save_pretrained(folder)
    with serving(folder, max_slots=12) as served:
        yield template, served


def sampled(
    marked: tuple[ChatTemplate, Served], name: str, call: Call, count: int = 12
) -> list[Any]:
    """Replies of the tiny model to a call, each with its text."""
    template, served = marked
    reply = reader(template, name)
    grammar = whole(template, reply, call)
    first = len(served.results)
    turns = [
        replace(
            request(f"{first}-{seed}", [5, 6, 7], seed=seed, max_new_tokens=700), grammar=grammar
        )
        for seed in range(count)
    ]
    replies = []
    for result in served.run(turns):
        assert result.error == ""
        ids = result.token_ids.tolist()
        if ids[-1] not in template.end_ids:  # a random model may call for ever
            continue
        text = reply.decode(ids[:-1])
        replies.append((reply.read(text, list(call.tools), [5, 6, 7], "k"), text))
    assert replies
    return replies


def check(calls: Any, schemas: dict[str, Any] | None = None) -> None:
    """Each fits the schema of its tool."""
    schemas = schemas or {"add": ADD, "look": LOOK}
    for one in calls:
        jsonschema.validate(json.loads(one.arguments), schemas[one.name])


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_is_one_whose_arguments_fit_the_tools_schema(marked, name):
    if name == "qwen3_coder":  # which writes texts as they are, however long
        tools = [tool("add", ADD | {"properties": ADD["properties"] | {"b": {"type": "boolean"}}})]
    else:
        tools = TOOLS
    for reply, text in sampled(marked, name, call_of(tools=tools, tool_choice="required")):
        assert reply.tool_calls, text
        assert reply.text == ""
        check(reply.tool_calls)


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_call_is_the_only_one_where_parallel_calls_are_off(marked, name):
    call = call_of(tools=TOOLS, tool_choice="look", parallel_tool_calls=False)
    schema = {"type": "object", "properties": {"place": {"enum": ["u", "v w"]}}}
    call = replace(call, tools=[TOOLS[0], tool("look", {**schema, "additionalProperties": False})])
    for reply, text in sampled(marked, name, call, count=6):
        (one,) = reply.tool_calls
        assert one.name == "look", text
        check([one])


@pytest.mark.parametrize("name", FORMATS)
def test_where_a_call_is_free_what_is_said_and_what_is_called_are_both_allowed(marked, name):
    template, _ = marked
    reply = reader(template, name)
    grammar = whole(template, reply, call_of(tools=TOOLS, strict_tools=frozenset({"add"})))
    good, bad = _written(name, '{"a": 1, "b": true}', "true"), _written(name, '{"a": 1}', None)
    assert follows(template, grammar, "")
    assert follows(template, grammar, "Hello <there>, (x) [1].")
    assert follows(template, grammar, good)
    assert not follows(template, grammar, bad)
    (read,) = reply.read(good, TOOLS, []).tool_calls
    assert read.name == "add"
    if name in ("hermes", "qwen3_coder"):
        assert follows(template, grammar, f"I add. {good}\nAnd {good} done.")
        assert not follows(template, grammar, f"I add. {bad}")
    if name == "mistral":
        assert follows(template, grammar, f"I add. {good}")


def _written(name: str, arguments: str, side: str | None) -> str:
    """A call of add, as the models of a format write it."""
    if name == "hermes":
        return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    if name == "mistral":
        return f'[TOOL_CALLS][{{"name": "add", "arguments": {arguments}}}]'
    if name == "llama3":
        return f'{{"name": "add", "parameters": {arguments}}}'
    more = "" if side is None else f"<parameter=b>\n{side}\n</parameter>\n"
    inside = f"<parameter=a>\n1\n</parameter>\n{more}"
    return f"<tool_call>\n<function=add>\n{inside}</function>\n</tool_call>"


def test_calls_of_mistral_with_a_token_for_arguments_are_written_by_name():
    template = chat_template(marks="special")
    template.tokenizer.add_special_tokens({"additional_special_tokens": ["[ARGS]"]})
    template = ChatTemplate(template.tokenizer, CHATML)
    reply = reader(template, "mistral")
    grammar = whole(template, reply, call_of(tools=TOOLS, tool_choice="required"))
    text = '[TOOL_CALLS]look[ARGS]{"place": "ab"}[TOOL_CALLS]add[ARGS]{"a": 1, "b": true}'
    assert follows(template, grammar, text)
    assert [one.name for one in reply.read(text, TOOLS, []).tool_calls] == ["look", "add"]
    assert not follows(template, grammar, '[TOOL_CALLS]look{"place": "ab"}')


@pytest.mark.parametrize("marks", ["text", "added", "special"])
def test_what_is_thought_is_free_and_the_reply_after_it_held(marks):
    template = chat_template(marks=marks, reasons=True)
    reply = reader(template, "hermes")
    call = call_of(json_schema={"enum": [1, 2]})
    closed = whole(template, reply, call)
    for text in ("1", "<think>\nIs it 3?\n</think>\n\n2", "<think></think>1"):
        assert follows(template, closed, text)
    assert not follows(template, closed, "<think>3</think>3")
    assert not follows(template, closed, "<think>3")
    is_open = whole(template, reply, call, "<|im_start|>assistant\n<think>\n")
    assert follows(template, is_open, "Is it 3?\n</think>\n\n2")
    assert not follows(template, is_open, "2")
    over = whole(template, reply, call, "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert follows(template, over, "2")
    assert not follows(template, over, "<think>3</think>2")


def test_beside_a_schema_tools_may_still_be_called():
    template = chat_template(marks="added")
    reply = reader(template, "hermes")
    grammar = whole(template, reply, call_of(tools=TOOLS, json_schema={"enum": ["done"]}))
    assert follows(template, grammar, '"done"')
    assert follows(template, grammar, _written("hermes", '{"a": 1, "b": true}', None))
    none = call_of(tools=TOOLS, json_schema={"enum": ["done"]}, tool_choice="none")
    alone = whole(template, reply, none)
    assert not follows(template, alone, _written("hermes", '{"a": 1, "b": true}', None))


def refused(call: Call, name: str = "hermes", **options: Any) -> CallError:
    """What a call is told."""
    template = chat_template(marks="text")
    made = StructuredOutput(template, reader(template, name), mode="on", **options)
    with pytest.raises(CallError) as told:
        asyncio.run(made.constrained(call, is_trained=False))
    return told.value


def test_what_cannot_be_kept_is_a_400_that_names_its_field():
    schema = {"type": "array", "uniqueItems": True}
    strict = call_of(json_schema=schema, is_strict=True, schema_field="response_format")
    told = refused(strict)
    assert (told.status, told.param) == (400, "response_format")
    assert "uniqueItems" in told.message
    needed = call_of(
        tools=[tool("add", {"properties": {"a": schema}})],
        tool_choice="required",
        strict_tools=frozenset({"add"}),
    )
    assert (refused(needed).status, refused(needed).param) == (400, "tools")
    unknown = call_of(tools=TOOLS, tool_choice="sub")
    assert "sub" in refused(unknown).message
    assert refused(unknown).param == "tool_choice"


def test_keywords_that_cannot_be_kept_are_passed_over_where_nothing_is_strict():
    template = chat_template(marks="text")
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": [1]}}
    grammar = whole(template, reader(template, "hermes"), call_of(json_schema=schema))
    assert follows(template, grammar, "[1, 1]")
    assert not follows(template, grammar, "[2]")


@pytest.mark.parametrize(
    ("fields", "is_needed"),
    [
        ({"json_schema": {}}, False),
        ({"json_schema": {}, "is_strict": True}, True),
        ({"tools": TOOLS, "tool_choice": "required"}, True),
        ({"tools": TOOLS, "tool_choice": "add"}, True),
        ({"tools": TOOLS, "strict_tools": frozenset({"add"})}, False),
    ],
)
def test_an_engine_that_cannot_is_told_only_to_who_cannot_do_without(fields, is_needed):
    call = call_of(**fields)
    if is_needed:
        told = refused(call, why_not="the engine is of stone")
        assert (told.status, told.code) == (400, "unsupported_value")
        assert "of stone" in told.message
    else:
        template = chat_template(marks="text")
        made = StructuredOutput(template, reader(template, "hermes"), why_not="of stone")
        assert asyncio.run(made.constrained(call, is_trained=False)) == call


@pytest.mark.parametrize(
    ("mode", "is_trained", "is_held"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("on", True, True),
        ("on", False, True),
        ("off", False, False),
    ],
)
def test_the_recipe_says_whose_replies_are_held(mode, is_trained, is_held):
    template = chat_template(marks="text")
    made = StructuredOutput(template, reader(template, "hermes"), mode=mode)
    call = call_of(tools=TOOLS, tool_choice="required")
    assert bool(asyncio.run(made.constrained(call, is_trained=is_trained)).grammar) is is_held
    plain = call_of(tools=TOOLS)
    assert asyncio.run(made.constrained(plain, is_trained=is_trained)) is plain


def test_calls_that_a_parser_of_others_reads_cannot_be_required():
    call = call_of(tools=TOOLS, tool_choice="required")
    assert refused(call, "none").code == "unsupported_value"
