"""The calculator recipe: its tool, its tasks and its model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.gateway.template import ChatTemplate
from recipes.arithmetic import tasks as arithmetic
from recipes.calculator import openai_agent, tasks
from recipes.calculator.agent import calculate
from recipes.calculator.model import VOCABULARY, make_tokenizer


@given(a=st.integers(-99, 999), b=st.integers(-99, 999), op=st.sampled_from("+-*"))
def test_the_calculator_agrees_with_python_on_sums_and_products(a, b, op):
    expression = f"{a} {op} {b}"
    assert calculate(expression) == str(eval(expression))


@given(a=st.integers(0, 999), b=st.integers(0, 999), op=st.sampled_from("+-*"))
def test_the_program_on_openais_sdk_has_the_same_calculator(a, b, op):
    assert openai_agent.calculate(f" {a}{op} {b}") == calculate(f"{a}{op}{b}")
    assert openai_agent.calculate(f"{a}{op}{b}{op}") == "error"


@pytest.mark.parametrize(
    ("expression", "value"), [("2*(3+4)-5", "9"), ("--3", "3"), ("2+3*4", "14"), (" 7 ", "7")]
)
def test_the_calculator_knows_brackets_signs_and_precedence(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        *("", "17+", "(1+2", "1 2", "1+2)", "9**9", "1/0", "x+1", "1e3", "+".join("9" * 99)),
        "__import__('os').system('touch pwned')",
        "(" * 60,
    ],
)
def test_what_is_no_sum_is_an_error_and_never_runs(expression, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert calculate(expression) == "error"
    assert not list(tmp_path.iterdir())


def test_held_out_sums_never_occur_in_tasks_or_demonstrations():
    held_out = {task.fields["expression"] for task in tasks.held_out()}
    shown = {task.fields["expression"] for task in tasks.train(4096)}
    called = {
        conversation[1]["content"].removeprefix("<tool>").removesuffix("</tool>")
        for conversation in tasks.demonstrations(4096, 1.0)
    }
    assert len(held_out) > 200
    assert not held_out & shown
    assert not held_out & called
    probed = {c[1]["content"][6:-7] for c in tasks.held_out_calls()}
    assert not probed & (shown | called)


def test_tasks_are_the_same_every_time_and_have_ids_of_their_own():
    made = tasks.train(500)
    assert made == tasks.train(500)
    assert len({task.id for task in made}) == 500
    for task in made:
        assert task.answer == str(eval(task.fields["expression"]))


@given(share=st.sampled_from([0.0, 0.3, 1.0]))
def test_the_share_of_demonstrations_with_the_tool_is_the_one_asked_for(share):
    made = list(tasks.demonstrations(2000, share))
    assert abs(sum(len(c) == 4 for c in made) / 2000 - share) < 0.04


def test_the_tokenizer_keeps_digits_apart_and_tool_marks_whole_and_readable():
    template = ChatTemplate(make_tokenizer())
    ids = template.encode("<tool>17+25</tool><|im_end|>")
    pieces = ["<tool>", "1", "7", "+", "2", "5", "</tool>", "<|im_end|>"]
    assert [template.token_text(i) for i in ids] == pieces
    assert template.decode(ids) == "<tool>17+25</tool>"
    assert max(ids) < VOCABULARY


def test_arithmetic_keeps_its_held_out_sums_out_of_training():
    held_out = {task.id for task in arithmetic.held_out()}
    assert len(held_out) == 40
    assert not held_out & {task.id for task in arithmetic.train(num_tasks=2000)}
