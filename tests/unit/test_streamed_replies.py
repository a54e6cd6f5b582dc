"""Ids told while they are sampled and recorded whole: one reply, and every id in the record."""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.core.turn import Reply
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.text_stream import TextStream
from tests.support.pieces import joined
from tests.support.templates import EOS, PAD, TPL_A, ScriptedTurn, letter_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
NAMES = {"task_id": "t", "group_id": "g", "episode_id": "e"}
SOURCES = {
    "hermes": TPL_A + "{# <tool_call> </think> #}",
    "qwen3_coder": TPL_A + "{# <tool_call> <function= </think> #}",
    "llama3": TPL_A + "{# <|python_tag|> </think> #}",
    "mistral": TPL_A + "{# [TOOL_CALLS] [/THINK] #}",
}
SPECIALS = ("[TOOL_CALLS]", "<|python_tag|>", "<hidden>")
CALLS = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a" :  1 }}</tool_call>',
    "qwen3_coder": "<tool_call><function=add></function></tool_call>",
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a":1}}',
    "mistral": '[TOOL_CALLS]add{"a":1}',
}
SCRAPS = ["<think>", "</think>", "hi ", "STOP", "<tool_call>", "{", EOS, "<hidden>", "\n"]


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(letter_tokenizer(specials=SPECIALS), SOURCES[name])


def streamed(reader: ReplyFormat, ids: list[int], prompt_ids: Any, key: str = "") -> Reply:
    """The reply as a client puts it together, one token at a time."""
    stream, parser = TextStream(reader.decode, ("STOP",)), reader.parser(TOOLS, prompt_ids, key)
    pieces = [piece for i in ids for piece in parser.feed(stream.feed([i]))]
    pieces += parser.feed(stream.finish()) + parser.finish()
    return joined(pieces)


def content(reply: Reply) -> Any:
    return reply.text, reply.reasoning, [(call.name, call.arguments) for call in reply.tool_calls]


@given(st.sampled_from(sorted(SOURCES)), st.data())
def test_what_is_streamed_is_what_is_recorded_and_every_sampled_id_stays(name, data):
    scraps = data.draw(st.lists(st.sampled_from([*SCRAPS, CALLS[name]]), max_size=8))
    shown = template(name)
    ids = shown.encode("".join(scraps))
    recorder = Recorder(shown)
    turn = recorder.open_turn([{"role": "user", "content": "q"}], TOOLS)
    reply = recorder.close_turn(turn, ScriptedTurn(ids), stop=("STOP",))
    assert content(streamed(ReplyFormat(shown), ids, turn.prompt_ids)) == content(reply)
    (line,) = recorder.trajectories(**NAMES)
    assert line.token_ids[line.loss_mask].tolist() == ids
    assert np.isfinite(line.behaviour_logprobs).all()


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_streamed_call_behind_text_takes_no_id_from_the_record(name):
    text = "" if name == "llama3" else "Let me.\n"
    shown = template(name)
    ids = shown.encode(f"{text}{CALLS[name]}{EOS}")
    recorder = Recorder(shown)
    turn = recorder.open_turn([{"role": "user", "content": "q"}], TOOLS)
    reply = recorder.close_turn(turn, ScriptedTurn(ids))
    assert [call.name for call in reply.tool_calls] == ["add"]
    assert reply.text == text.strip()
    (line,) = recorder.trajectories(**NAMES)
    assert line.token_ids.tolist() == [*turn.prompt_ids, *ids]


def test_the_ids_of_calls_are_the_same_streamed_and_whole():
    shown = template("hermes")
    ids = shown.encode(CALLS["hermes"] * 2)
    reader = ReplyFormat(shown)
    whole = reader.read(reader.decode(ids), TOOLS, [], key="turn")
    assert streamed(reader, ids, [], key="turn") == whole


def test_the_end_of_turn_and_padding_are_never_told():
    shown = template("hermes")
    ids = shown.encode(f"hi{EOS}{PAD}{PAD}")
    assert streamed(ReplyFormat(shown), ids, []) == Reply("hi")
