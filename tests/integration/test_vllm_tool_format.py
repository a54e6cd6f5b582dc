"""Tool calls read by vLLM's own parsers."""

from typing import Any

import numpy as np
import pytest

from areal_ray.core.turn import Reply
from areal_ray.errors import RecipeError
from areal_ray.gateway.pieces import TextPiece
from areal_ray.gateway.template import ChatTemplate
from areal_ray.runtime.reply_format import reply_format
from tests.support.needs import needs_vllm
from tests.support.templates import TPL_A, letter_tokenizer

pytestmark = needs_vllm
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
PROMPT = np.zeros(0, np.int32)


def reader(name: str, specials: tuple[str, ...] = ()) -> Any:
    template = ChatTemplate(letter_tokenizer(specials=specials), TPL_A)
    return reply_format(template, f"vllm:{name}", "auto")


def content(reply: Reply) -> Any:
    return reply.text, [(call.name, call.arguments) for call in reply.tool_calls]


def test_calls_are_read_by_vllm_s_parser_and_have_ids_of_ours():
    reply = reader("pythonic").read("[add(a=1), add(a=2)]", TOOLS, PROMPT)
    assert content(reply) == ("", [("add", '{"a": 1}'), ("add", '{"a": 2}')])
    assert all(call.id.startswith("call") and call.id.isalnum() for call in reply.tool_calls)
    assert content(reader("pythonic").read("hi", TOOLS, PROMPT)) == ("hi", [])
    assert content(reader("pythonic").read("[add(a=1)]", None, PROMPT)) == ("[add(a=1)]", [])


def test_text_before_the_first_mark_is_told_as_it_comes():
    parser = reader("hermes").parser(TOOLS, PROMPT)
    assert parser.feed("Let me. <tool") == [TextPiece("Let me.")]
    parser.feed('_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    parser.finish()
    assert content(parser.reply) == ("Let me.", [("add", '{"a": 1}')])


def test_what_vllm_s_parser_cannot_read_stays_text():
    text = '<tool_call>{"name": </tool_call>'
    assert content(reader("hermes").read(text, TOOLS, PROMPT)) == (text, [])


def test_marks_that_are_special_tokens_reach_vllm_s_parser():
    shown = reader("llama3_json", ("<|python_tag|>",))
    ids = shown._template.encode('<|python_tag|>{"name": "add", "parameters": {"a": 1}}<eos>')
    assert content(shown.read(shown.decode(ids), TOOLS, PROMPT)) == ("", [("add", '{"a": 1}')])


@pytest.mark.parametrize(
    ("name", "told"), [("nope", "no parser of that name"), ("mistral", "does not fit the model's")]
)
def test_a_parser_that_vllm_lacks_or_that_fits_no_such_model_is_refused(name, told):
    with pytest.raises(RecipeError, match=rf"agent\.tool_parser: is vllm:{name}.*{told}"):
        reader(name)
