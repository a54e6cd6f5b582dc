"""Replies read back from sampled text: reasoning, what is said, tool calls; in any chunks."""

import json
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jiter import from_json

from areal_ray.agents.episode import AgentConfig
from areal_ray.core.turn import Reply
from areal_ray.gateway.pieces import CallPiece, Piece, ReasoningPiece, TextPiece, call_id
from areal_ray.gateway.reply_parser import REASONING_MARKS, ReplyFormat, ReplyParser
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.tool_formats import TOOL_FORMATS, guess_tool_format
from tests.support.pieces import joined, unfinished
from tests.support.templates import TPL_A, letter_tokenizer

PARAMETERS = {
    "a": {"type": "integer"},
    "s": {"type": "string"},
    "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "flag": {"type": "boolean"},
    "list": {"type": ["array", "null"]},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": PARAMETERS}},
    }
]
OUTSIDE = np.zeros(0, np.int32)
THINK = TPL_A + "{# <think> </think> #}"
THINK_OPEN = THINK.replace("[assistant]{%", "[assistant]<think>\n{%")


@cache
def template(source: str = THINK, specials: tuple[str, ...] = ()) -> ChatTemplate:
    return ChatTemplate(letter_tokenizer(specials=specials), source)


def replies(tool_parser: str = "hermes", source: str = THINK) -> ReplyFormat:
    return ReplyFormat(template(source), tool_parser)


def said(reply: Reply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.reasoning, reply.text, [(call.name, call.arguments) for call in reply.tool_calls]


def read(text: str, tool_parser: str = "hermes", tools: Any = TOOLS) -> Any:
    return said(replies(tool_parser).read(text, tools, OUTSIDE))


CALL = '<tool_call>\n{"name": "add", "arguments": {"a" :  1 }}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n 2\n\n"
    "</parameter>\n</function>\n</tool_call>"
)


# -- tool calls ------------------------------------------------------------------------------------


def test_arguments_keep_the_json_text_that_was_sampled():
    assert read(f"  Let me check with a tool.\n\n{CALL}") == (
        "", "  Let me check with a tool.", [("add", '{"a" :  1 }')],
    )  # fmt: skip


def test_calls_side_by_side_come_in_their_order_with_ids_of_their_own():
    reply = replies().read(f"{CALL}\n{CALL.replace('1', '2')}", TOOLS, OUTSIDE)
    assert said(reply) == ("", "", [("add", '{"a" :  1 }'), ("add", '{"a" :  2 }')])
    assert len({call.id for call in reply.tool_calls}) == 2


def test_arguments_that_a_model_calls_parameters_are_not_lost():
    text = '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>'
    assert read(text) == ("", "", [("add", '{"a": 1}')])
    both = '<tool_call>{"parameters": {"a": 2}, "name": "add", "arguments": {"a": 1}}</tool_call>'
    assert read(both) == ("", "", [("add", '{"a": 1}')])


def test_the_end_mark_inside_a_string_ends_no_call():
    arguments = '{"s": "a </tool_call> b \\" </tool_call>"}'
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert read(text) == ("", "", [("add", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name":"add","arguments":{"a":1}} }</tool_call>',
        '<tool_call>{"name":"add","arguments":{"a":1}}{"name":"add"}</tool_call>',
        '<tool_call>{"name":"add","arguments":{"a":1}}',
        '<tool_call>{"name":"add","arguments":"{}"}</tool_call>',
        '<tool_call>{"name":"","arguments":{}}</tool_call>',
        '<tool_call>{"name":3}</tool_call>',
        '<tool_call>{"name":"add","arguments":{"a":NaN}}</tool_call>',
        '<tool_call>{"name":"add","arguments":{"s":"\\ud800"}}</tool_call>',
        '<tool_call>{"name":"add","arguments":' + '{"a":' * 10**5 + "</tool_call>",
        '<tool_call>{"name":"add","arguments":{"a":' + "1" * 5000 + "}}</tool_call>",
        CALL.replace(" 1 ", "[" * 210 + "]" * 210),
        "<tool_call>{'name': __import__('os')}</tool_call>",
        "<tool_call>[1]</tool_call>",
        "<tool_call></tool_call>",
        "</tool_call> <tool_call",
        '{"name": "add", "arguments": {"a": 1}}',
    ],
)
def test_what_is_no_well_formed_call_stays_text_as_it_was_sampled(text):
    assert read(text) == ("", text, [])


def test_a_call_behind_a_malformed_one_is_read():
    assert read(f'<tool_call>{{"s": "open {CALL}') == (
        "", '<tool_call>{"s": "open', [("add", '{"a" :  1 }')],
    )  # fmt: skip


@pytest.mark.parametrize("tool_parser", ["hermes", "qwen3_coder", "llama3", "mistral"])
@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_nothing_is_a_call(tool_parser, tools):
    for text in (CALL, CODER, '{"name": "add", "parameters": {}}', "[TOOL_CALLS]add{}"):
        assert read(text, tool_parser, tools) == ("", text, [])


def test_no_calls_are_an_empty_tuple_and_blanks_around_text_stay():
    assert replies().read(" hi \n", TOOLS, OUTSIDE) == Reply(" hi \n", ())


def test_values_of_the_xml_form_are_typed_by_the_schema_of_the_tool():
    values = {"a": "1", "s": "1", "maybe": "null", "flag": "True", "list": "[1]", "new": "1"}
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    text = f"ok\n<tool_call>\n<function=add>\n{inside}</function>\n</tool_call>"
    _, shown, [(name, arguments)] = read(text, "qwen3_coder")
    assert (shown, name) == ("ok", "add")
    typed = {"a": 1, "s": "1", "maybe": None, "flag": True, "list": [1], "new": "1"}
    assert json.loads(arguments) == typed


@pytest.mark.parametrize("value", [" 2\n", "</tool_call>", "x </tool_call>\n<function=", "{", ""])
def test_a_value_of_the_xml_form_is_text_to_its_own_end_mark(value):
    text = CODER.replace(" 2\n", value)
    _, _, [(_, arguments)] = read(text, "qwen3_coder")
    assert json.loads(arguments) == {"a": 1, "s": value}


def test_a_value_that_is_not_of_its_schema_s_type_stays_text():
    _, _, [(_, arguments)] = read(CODER.replace("1", "one"), "qwen3_coder")
    assert json.loads(arguments)["a"] == "one"


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        "<tool_call><function=add></tool_call>",
        "<tool_call><function=add>x</function></tool_call>",
        "<tool_call><function=></function></tool_call>",
        CODER.removesuffix("</tool_call>"),
    ],
)
def test_malformed_xml_stays_text(text):
    assert read(text, "qwen3_coder") == ("", text, [])


ADD = '{"name": "add", "parameters": {"a":  1}}'


@pytest.mark.parametrize(
    ("text", "num_calls"),
    [
        (ADD, 1),
        (f" {ADD}\n", 1),
        (f"<|python_tag|>{ADD}", 1),
        (f"{ADD}; {ADD}", 2),
        (ADD.replace("parameters", "arguments"), 1),
        (ADD.replace('{"name', '{"type": "function", "name'), 1),
    ],
)
def test_llama_calls_are_the_whole_turn(text, num_calls):
    assert read(text, "llama3") == ("", "", [("add", '{"a":  1}')] * num_calls)


@pytest.mark.parametrize(
    "text",
    [
        f"so: {ADD}",
        f"{ADD} so",
        ADD.replace("add", "unknown"),
        '{"a": 1}',
        "{x}",
        "<|python_tag|>print(1)",
    ],
)
def test_json_that_calls_no_offered_tool_is_a_llama_s_text(text):
    assert read(text, "llama3") == ("", text, [])


@pytest.mark.parametrize(
    "calls",
    [
        ' [{"name": "add", "arguments": {"a":  1}}, {"arguments": {"a":  1}, "name": "add"}]',
        'add{"a":  1}[TOOL_CALLS]add{"a":  1}',
        ' add[ARGS]{"a":  1}[TOOL_CALLS] add[CALL_ID]x1[ARGS] {"a":  1}\n',
    ],
)
def test_mistral_calls_are_a_list_or_one_by_one(calls):
    two = [("add", '{"a":  1}')] * 2
    assert read(f"Let me. [TOOL_CALLS]{calls}", "mistral") == ("", "Let me.", two)


@pytest.mark.parametrize("calls", ["", "[]", "[{}", '[{"name": "add"}', 'add{"a"', "add{} so"])
def test_malformed_mistral_calls_stay_text(calls):
    assert read(f"[TOOL_CALLS]{calls}", "mistral") == ("", f"[TOOL_CALLS]{calls}", [])


def test_with_parallel_calls_off_the_first_alone_is_told():
    parser = replies().parser(TOOLS, OUTSIDE, max_calls=1)
    pieces = parser.feed(f"x{CALL}{CALL}") + parser.finish()
    assert [piece.index for piece in pieces if isinstance(piece, CallPiece)] == [0]
    assert joined(pieces) == parser.reply
    assert parser.reply.text == "x"


# -- ids -------------------------------------------------------------------------------------------


def test_ids_of_calls_are_letters_and_digits_below_forty_and_the_same_for_the_same_turn():
    ids = [call_id("turn", index) for index in range(200)]
    assert all(one.isalnum() and one.isascii() and one.startswith("call") for one in ids)
    assert {len(one) for one in ids} == {36}
    assert len(set(ids)) == 200
    first, again = (replies().read(CALL, TOOLS, OUTSIDE, key="turn") for _ in range(2))
    assert first.tool_calls[0].id == again.tool_calls[0].id == ids[0]


def test_without_a_key_no_id_ever_comes_twice():
    ids = {replies().read(CALL, TOOLS, OUTSIDE).tool_calls[0].id for _ in range(50)}
    assert len(ids) == 50


# -- reasoning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<think>\nhm\n\n</think>\n\nhi", ("hm", "hi")),
        ("\n<think>hm</think>hi\n", ("hm", "hi\n")),
        ("<think>\n\n</think>\n\nhi", ("", "hi")),
        ("<think>\nhm\n", ("hm", "")),
        ("<think>a\n\nb</think>", ("a\n\nb", "")),
        ("hi <think>hm</think>", ("", "hi <think>hm</think>")),
        ("hm</think>hi", ("", "hm</think>hi")),
        (" <thin", ("", " <thin")),
        ("<think>a</think>b<think>c</think>", ("a", "b<think>c</think>")),
    ],
)
def test_reasoning_stands_before_what_is_said(text, told):
    assert read(text)[:2] == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hm\n</think>\n\nhi", ("hm", "hi")),
        ("<think>\nhm\n</think>hi", ("hm", "hi")),
        ("hm", ("hm", "")),
        ("</think>hi", ("", "hi")),
        ("\n\n", ("", "")),
    ],
)
def test_where_the_prompt_opens_the_reasoning_the_reply_begins_inside_it(text, told):
    opened = template(THINK_OPEN)
    prompt = opened.encode_array(opened.render([{"role": "user", "content": "q"}]))
    assert said(ReplyFormat(opened).read(text, TOOLS, prompt))[:2] == told


def test_a_prompt_that_opens_and_closes_the_reasoning_begins_outside():
    closed = template(THINK_OPEN.replace("<think>\n", "<think>\n\n</think>\n\n"))
    prompt = closed.encode_array(closed.render([{"role": "user", "content": "<think>"}]))
    assert said(ReplyFormat(closed).read("hi", TOOLS, prompt))[:2] == ("", "hi")


def test_a_call_in_the_reasoning_is_no_call_and_one_behind_it_is():
    thought = f"maybe {CALL}"
    assert read(f"<think>{thought}</think>{CALL}") == (thought, "", [("add", '{"a" :  1 }')])


def test_a_template_without_reasoning_leaves_the_marks_in_the_text():
    text = "<think>hm</think>hi"
    assert said(replies(source=TPL_A).read(text, TOOLS, OUTSIDE)) == ("", text, [])


@pytest.mark.parametrize(
    ("text", "count"),
    [("<think>hm</think>hi", 17), ("<think>hm", 9), ("hi", 0), ("x<think>hm</think>", 0)],
)
def test_tokens_of_the_reasoning_are_counted_with_its_marks(text, count):
    shown = template()
    assert ReplyFormat(shown).count_reasoning_tokens(shown.encode(text), OUTSIDE) == count


# -- which parser ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x [TOOL_CALLS] y", "mistral"),
        ("<tool_call>\n<function=a>", "qwen3_coder"),
        ('<tool_call>\n{"name": ', "hermes"),
        ("<|python_tag|>", "llama3"),
        ("Environment: ipython", "llama3"),
        ("plain", "hermes"),
    ],
)
def test_the_template_shows_how_its_model_writes_calls(source, name):
    assert guess_tool_format(source) == name


def test_none_turns_both_parsers_off():
    off = ReplyFormat(template(), "none", "none")
    text = f"<think>hm</think>{CALL}"
    assert said(off.read(text, TOOLS, OUTSIDE)) == ("", text, [])


@pytest.mark.parametrize(
    ("parsers", "told"),
    [
        (("hermez", "auto"), r"agent\.tool_parser: is 'hermez'; must be one of auto, none, hermes"),
        (("auto", "thin"), r"agent\.reasoning_parser: is 'thin'; must be one of auto, none, think"),
    ],
)
def test_an_unknown_parser_is_refused_with_those_there_are(parsers, told):
    with pytest.raises(ValueError, match=told):
        ReplyFormat(template(), *parsers)


def test_marks_that_are_special_tokens_are_read_and_the_others_stay_hidden():
    shown = template("{# [TOOL_CALLS] [THINK] [/THINK] #}" + TPL_A, ("[TOOL_CALLS]", "[THINK]",
        "[/THINK]", "<hidden>"))  # fmt: skip
    reader = ReplyFormat(shown)
    sampled = shown.encode('[THINK]hm[/THINK]<hidden>hi[TOOL_CALLS]add{"a": 1}<eos>')
    text = reader.decode(sampled)
    assert text == '[THINK]hm[/THINK]hi[TOOL_CALLS]add{"a": 1}'
    assert said(reader.read(text, TOOLS, OUTSIDE)) == ("hm", "hi", [("add", '{"a": 1}')])


# -- chunks ----------------------------------------------------------------------------------------

SCRAPS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"),
    *("\n", " ", "hi", "{", "}", '"', "\\", "<", "[", "]", ";", "add", "</function>"),
    *("<function=add>", "<parameter=a>1</parameter>", CALL, CODER, ADD, '{"a": 1}', "<thi"),
]
PARSERS = st.sampled_from(["hermes", "qwen3_coder", "llama3", "mistral", "none"])


@given(st.lists(st.sampled_from(SCRAPS), max_size=12), PARSERS, st.booleans(), st.data())
def test_in_whatever_chunks_a_reply_comes_it_says_the_same(scraps, tool_parser, is_open, data):
    text = "".join(scraps)
    reader = replies(tool_parser)
    prompt = template().encode_array("<think>\n") if is_open else OUTSIDE
    whole = reader.read(text, TOOLS, prompt, key="turn")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parser = reader.parser(TOOLS, prompt, key="turn")
    pieces = in_cuts(parser, text, cuts)
    assert joined(pieces) == parser.reply == whole
    assert all(not isinstance(piece, TextPiece | ReasoningPiece) or piece.text for piece in pieces)


def in_cuts(parser: ReplyParser, text: str, cuts: list[int]) -> list[Piece]:
    """All that a parser tells of a text that comes in these parts."""
    pieces: list[Piece] = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += parser.feed(text[start:end])
    return pieces + parser.finish()


def is_beginning(text: str) -> bool:
    """Whether a text is the beginning of a JSON object and not the whole of one, as the parser of
    Anthropic's and OpenAI's SDKs has it, which raises for what is none."""
    read = from_json(text.encode(), partial_mode=True) if text else {}
    with pytest.raises(ValueError, match="column"):
        json.loads(text)
    return isinstance(read, dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)
WRITTEN = {
    "hermes": '<tool_call>\n{{"x": [1], "name": "add", "arguments": {}}}\n</tool_call>',
    "llama3": '{{"type": "function", "name": "add", "parameters": {}}}',
    "mistral": "[TOOL_CALLS]add{}",
}


@given(st.sampled_from(sorted(WRITTEN)), ARGUMENTS, st.booleans(), st.sampled_from([None, 2]),
       st.data())  # fmt: skip
def test_arguments_are_told_as_they_come_and_are_those_of_the_whole_call(
    tool_parser, arguments, is_ascii, indent, data
):
    written = json.dumps(arguments, ensure_ascii=is_ascii, indent=indent)
    text = WRITTEN[tool_parser].format(written)
    whole = replies(tool_parser).read(text, TOOLS, OUTSIDE, key="turn")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parser = replies(tool_parser).parser(TOOLS, OUTSIDE, key="turn")
    pieces = in_cuts(parser, text, cuts)
    assert joined(pieces) == parser.reply == whole
    assert [call.arguments for call in whole.tool_calls] == [written]
    assert not unfinished(pieces)


@given(st.sampled_from(sorted(WRITTEN)), ARGUMENTS, st.data())
def test_a_call_that_turns_out_to_be_none_stays_unfinished_and_its_text_is_told(
    tool_parser, arguments, data
):
    """Cut off, or with something in it that does not belong there."""
    text = WRITTEN[tool_parser].format(json.dumps(arguments))
    end = data.draw(st.integers(0, len(text) - 1))
    text = text[:end] + data.draw(st.sampled_from(["", "}", '"', "x", "\\", "\x00", "{", ": 1,"]))
    text += data.draw(st.sampled_from(["", text[end:], CALL]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    parser = replies(tool_parser).parser(TOOLS, OUTSIDE, key="turn")
    pieces = in_cuts(parser, text, cuts)
    whole = replies(tool_parser).read(text, TOOLS, OUTSIDE, key="turn")
    assert joined(pieces) == parser.reply == whole
    assert all(is_beginning(call.arguments) for call in unfinished(pieces))


def told_by_letters(text: str, tool_parser: str = "hermes") -> list[str]:
    """Names and arguments of calls as they come, a letter at a time; the end last."""
    parser = replies(tool_parser).parser(TOOLS, OUTSIDE)
    pieces = [piece for letter in text for piece in parser.feed(letter)]
    return [
        piece.name or piece.arguments or "unfinished"
        for piece in [*pieces, *parser.finish()]
        if isinstance(piece, CallPiece)
    ]


def test_a_call_begins_with_its_name_once_its_arguments_do_and_ends_with_the_last_brace():
    assert told_by_letters('<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>') == [
        *("add", "{", '"', "a", '"', ":", " ", "12", "}"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        # What the model rewrote after it was told: nobody may run the first.
        (
            '{"name": "add", "arguments": {"a": 1}, "name": "sub"}',
            ["add", '{"a":1', "unfinished", 'sub{"a": 1}'],
        ),
        ('{"arguments": {"a": 1}, "name": "add"}', ['add{"a": 1}']),
        ('{"name": "add", "arguments": "{}"}', []),
        ('{"name": "add", "arguments": {"a": 1 1}}', ["add", '{"a":1', "unfinished"]),
        ('{"name": "add", "arguments": {"a": NaN}}', ["add", '{"a":', "unfinished"]),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', ["add", '{"a":"', "unfinished"]),
        ('{"name": "add", "arguments": {"a": 1}} }', ["add", '{"a":1', "unfinished"]),
    ],
)
def test_what_is_told_of_a_call_that_goes_wrong_is_no_whole_call(text, told):
    parser = replies().parser(TOOLS, OUTSIDE)
    text = f"<tool_call>{text}</tool_call>"
    pieces = [piece for letter in text for piece in parser.feed(letter)] + parser.finish()
    shown: list[str] = []
    for piece in pieces:
        if isinstance(piece, CallPiece) and (piece.name or piece.is_unfinished):
            shown.append((piece.name or "unfinished") + piece.arguments)
            if piece.name and not piece.arguments:
                shown.append("")
        elif isinstance(piece, CallPiece):
            shown[-1] += piece.arguments.strip()
    assert shown == told
    assert joined(pieces) == parser.reply


@given(st.text(), PARSERS)
def test_no_text_breaks_a_parser_and_without_tools_all_of_it_is_shown(text, tool_parser):
    reader = replies(tool_parser, TPL_A)
    reader.read(text, TOOLS, OUTSIDE)
    assert reader.read(text, None, OUTSIDE) == Reply(text)


def test_text_is_told_at_once_where_nothing_can_begin():
    parser = replies().parser(TOOLS, OUTSIDE)
    told = [[getattr(piece, "text", None) for piece in parser.feed(c)] for c in "hi <b"]
    assert told == [["h"], ["i"], [], [], [" <b"]]


def test_a_recipe_may_name_every_parser_there_is_and_no_other():
    for name in ("auto", "none", *TOOL_FORMATS, "vllm:deepseek_v3"):
        assert AgentConfig(tool_parser=name).tool_parser == name
    for name in ("auto", "none", *REASONING_MARKS):
        assert AgentConfig(reasoning_parser=name).reasoning_parser == name
    for wrong in ({"tool_parser": "hermez"}, {"reasoning_parser": "thin"}):
        with pytest.raises(ValueError, match="parser"):
            AgentConfig(**wrong)


@pytest.mark.parametrize("call", [CALL, CODER])
def test_one_character_at_a_time_is_the_same_as_all_at_once(call):
    reader = replies("hermes" if call == CALL else "qwen3_coder")
    text = f"<think>\na </thin b\n</think>\n\nhi <tool {call}\n{call}"
    parser = reader.parser(TOOLS, OUTSIDE, key="turn")
    pieces = [piece for letter in text for piece in parser.feed(letter)] + parser.finish()
    assert joined(pieces) == reader.read(text, TOOLS, OUTSIDE, key="turn")
    assert said(joined(pieces))[:2] == ("a </thin b", "hi <tool")


def test_a_model_that_repeats_the_end_mark_inside_a_string_costs_no_more_than_reading_it():
    """Each token must not have all end marks before it tried anew: the loop has other streams."""
    parser = replies().parser(TOOLS, OUTSIDE)
    text = CALL[:-13].rstrip().removesuffix("}}") + ', "s": "' + "</tool_call>" * 1500
    began = time.process_time()
    pieces = [piece for at in range(0, len(text), 8) for piece in parser.feed(text[at : at + 8])]
    assert time.process_time() - began < 4.0
    assert not [piece for piece in pieces if isinstance(piece, TextPiece)]
    pieces += [*parser.feed('"}}</tool_call>'), *parser.finish()]
    (told,) = parser.reply.tool_calls
    assert json.loads(told.arguments)["s"] == "</tool_call>" * 1500
