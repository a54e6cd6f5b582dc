"""Data sources of the recipes, on rows of the form their data sets have."""

import json

import pytest

from areal_ray.errors import DataError
from recipes.gsm8k.tasks import load, worked
from recipes.hh_rlhf.pairs import load as load_pairs
from recipes.hh_rlhf.pairs import messages

ROW = {
    "question": "Natalia sold 48 clips in April, half as many in May. How many in all?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nIn all 48+24 = <<48+24=72>>72.\n#### 72",
}


def jsonl(folder, *rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_a_worked_answer_has_no_marks_of_the_calculator_and_ends_with_the_number_in_a_box(tmp_path):
    path = jsonl(tmp_path, ROW)
    (conversation,) = worked(path)
    assert [m["role"] for m in conversation] == ["system", "user", "assistant"]
    assert conversation[:2] == list(load(path)[0].messages)
    said = conversation[-1]["content"]
    assert said == ("She sold 48/2 = 24 in May.\nIn all 48+24 = 72.\nThe answer is \\boxed{72}.")


def transcript(*turns):
    who = ("Human", "Assistant")
    return "".join(f"\n\n{who[n % 2]}: {turn}" for n, turn in enumerate(turns))


def test_two_transcripts_become_a_prompt_and_two_answers(tmp_path):
    same = ("How do I boil an egg?", "Do you have a pan?", "Yes.")
    row = {"chosen": transcript(*same, "Eight minutes."), "rejected": transcript(*same, "No.")}
    (pair,) = load_pairs(jsonl(tmp_path, row))
    prompt, better, worse = pair
    assert [m["role"] for m in prompt] == ["user", "assistant", "user"]
    assert prompt[1]["content"] == "Do you have a pan?"
    assert (better, worse) == ("Eight minutes.", "No.")


def test_rows_without_a_common_prompt_or_with_one_answer_are_left_out(tmp_path):
    rows = [
        {"chosen": transcript("a", "b"), "rejected": transcript("other", "b2")},
        {"chosen": transcript("a", "b"), "rejected": transcript("a", "b")},
        {"chosen": transcript("a", "b"), "rejected": transcript("a", "")},
    ]
    assert list(load_pairs(jsonl(tmp_path, *rows))) == []


@pytest.mark.parametrize(
    "text", [None, 3, "", "no turns", transcript("a"), transcript("a", "b", "c")]
)
def test_what_is_no_transcript_is_refused_by_row(tmp_path, text):
    row = {"chosen": text, "rejected": transcript("a", "b")}
    with pytest.raises(DataError, match=r"rows.jsonl row 0: 'chosen': must be a transcript"):
        list(load_pairs(jsonl(tmp_path, row)))


def test_text_keeps_colons_and_names_inside_a_turn():
    turns = messages(transcript("Human: is that you?", "Note: yes.\n\nAnd more."), "here")
    assert [t["content"] for t in turns] == ["Human: is that you?", "Note: yes.\n\nAnd more."]
