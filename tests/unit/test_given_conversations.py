"""Given conversations become the tokens that the same messages have in a rollout."""

from typing import Any

import numpy as np
import pytest

from areal_ray.errors import DataError
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.template import ChatTemplate
from areal_ray.runtime.pair_source import tokenize_pair
from areal_ray.runtime.sft_source import tokenize
from tests.support.templates import (
    EOS,
    TPL_A,
    TPL_B,
    TPL_E,
    TPL_J,
    TPL_S,
    TPL_X,
    ScriptedTurn,
    letter_tokenizer,
)

ASKED = [{"role": "user", "content": "2+3?"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(letter_tokenizer(), source)


def text_of(made: ChatTemplate, ids: Any) -> str:
    return "".join(made.token_text(int(i)) for i in ids)


def rolled_out(made: ChatTemplate, messages: list[Any], *replies: str) -> np.ndarray:
    """Ids of a rollout in which the model says just that, the last turn's close left out."""
    recorder, history = Recorder(made), list(messages)
    for reply in replies:
        turn = recorder.open_turn(history)
        recorder.close_turn(turn, ScriptedTurn(made.encode(reply)))
        history += [{"role": "assistant", "content": reply}, {"role": "user", "content": "more"}]
    (line,) = recorder.trajectories(task_id="t", group_id="g", episode_id="e")
    return line.token_ids


@pytest.mark.parametrize("source", [TPL_A, TPL_S, TPL_E, TPL_X], ids=["A", "S", "E", "X"])
def test_a_conversation_has_the_ids_of_a_rollout_that_says_the_same(source):
    made = template(source)
    said = [*ASKED, {"role": "assistant", "content": "5"}, {"role": "user", "content": "more"}]
    said.append({"role": "assistant", "content": "6"})
    example = tokenize(made, said, "row 0")
    expected = rolled_out(made, ASKED, "5", "6")
    np.testing.assert_array_equal(example.token_ids[: len(expected)], expected)
    assert text_of(made, example.token_ids[len(expected) :]) == made.turn_close
    assert text_of(made, example.token_ids[example.loss_mask]) == f"5{made.turn_close}6[/]\n"


def test_a_default_system_turn_is_written_once_and_not_learned():
    example = tokenize(template(TPL_S), [*ASKED, {"role": "assistant", "content": "5"}], "row 0")
    shown = text_of(template(TPL_S), example.token_ids)
    assert shown == "[system]be brief[/]\n[user]2+3?[/]\n[assistant]5[/]\n"


@pytest.mark.parametrize("is_written", [True, False])
def test_a_first_token_stands_once_where_the_template_writes_it_and_else_not(is_written):
    """Though the tokenizer would put one before whatever it encodes."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = letter_tokenizer(specials=("<bos>",))
    bos = tokenizer.convert_tokens_to_ids("<bos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    assert tokenizer.encode("a")[0] == bos
    made = ChatTemplate(tokenizer, "<bos>" * is_written + TPL_A)
    expected = rolled_out(made, ASKED, "5", "6")
    assert expected.tolist().count(bos) == is_written
    assert made.count_prompt_tokens(ASKED) == len("[user]2+3?[/]_[assistant]") + is_written
    said = [*ASKED, {"role": "assistant", "content": "5"}]
    example = tokenize(made, said, "row 0")
    assert example.token_ids.tolist().count(bos) == is_written
    pair = tokenize_pair(made, (ASKED, "5", "6"), "row 0")
    assert pair.chosen.token_ids.tolist().count(bos) == is_written


def test_only_what_the_assistant_says_and_its_end_is_learned():
    made = template(TPL_A.replace("[/]\n", EOS + "\n"))
    example = tokenize(made, [*ASKED, {"role": "assistant", "content": "5"}], "row 0")
    assert text_of(made, example.token_ids[example.loss_mask]) == f"5{EOS}"


@pytest.mark.parametrize(
    ("source", "written"), [(TPL_E, "<c add a=2>"), (TPL_J, '<c add {"a": 2}>')]
)
@pytest.mark.parametrize("arguments", ['{"a": 2}', {"a": 2}])
def test_tool_calls_of_a_data_set_are_written_as_in_a_rollout(source, written, arguments):
    made = template(source)
    function = {"name": "add", "arguments": arguments}
    said = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "5"},
    ]
    example = tokenize(made, said, "row 0")
    assert text_of(made, example.token_ids) == (
        f"[user]2+3?[/]\n[assistant]{written}[/]\n[tool]5[/]\n[assistant]5[/]\n"
    )
    assert text_of(made, example.token_ids[example.loss_mask]) == f"{written}[/]\n5[/]\n"


TWICE = [*ASKED, *ASKED, {"role": "assistant", "content": "5"}]


@pytest.mark.parametrize(
    ("source", "said", "told"),
    [
        (TPL_X, TWICE, "user, user.*must alternate"),
        (TPL_B, [*ASKED, {"role": "assistant", "content": "<t>x</t>5"}] * 2, "rewrites earlier"),
        (TPL_A, ASKED, "has no assistant message"),
        (TPL_A, [], "has no assistant message"),
        (TPL_A, "hello", "is a str; must be a list of messages"),
        (TPL_A, [{"content": "x"}], r"messages\[0\]\.role"),
        (TPL_A, [*ASKED, {"role": "assistant", "content": 5}], r"messages\[1\]\.content"),
        (
            TPL_A,
            [*ASKED, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "not JSON",
        ),
    ],
)
def test_a_conversation_that_cannot_be_used_is_told_by_row(source, said, told):
    with pytest.raises(DataError, match=f"row 7: .*{told}"):
        tokenize(template(source), said, "row 7")


def test_a_pair_has_the_prompt_of_a_rollout_and_is_told_by_row_where_it_has_none():
    made = template(TPL_S)
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
    pair = tokenize_pair(made, (parts, "5", "6"), "row 7")
    expected = rolled_out(made, ASKED, "5")
    np.testing.assert_array_equal(pair.chosen.token_ids[: len(expected)], expected)
    with pytest.raises(DataError, match=r"row 7: .*must alternate"):
        tokenize_pair(template(TPL_X), ([*ASKED, *ASKED], "5", "6"), "row 7")
    with pytest.raises(DataError, match=r"row 7: messages\[0\]\.role"):
        tokenize_pair(made, ([{"content": "x"}], "5", "6"), "row 7")
