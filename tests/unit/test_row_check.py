"""Given rows are read for their form before anything starts, and the one that is wrong is named."""

import re
from pathlib import Path

import pytest

from areal_ray.errors import ArealRayError
from areal_ray.row_check import check_conversation, check_pair, check_rows

ASKED = [{"role": "user", "content": "Hi"}]
SAID = [*ASKED, {"role": "assistant", "content": "Hello."}]
ROWS = f"""
def given(rows):
    return rows

def generated(rows=({SAID},)):
    yield from rows

async def awaited():
    return []
"""


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    (tmp_path / "given_rows.py").write_text(ROWS)
    return [tmp_path]


@pytest.mark.parametrize(
    ("row", "check"), [(SAID, check_conversation), ((ASKED, "a", "b"), check_pair)]
)
def test_sound_rows_pass_whether_they_are_returned_or_generated(roots, row, check):
    for function in ("given", "generated"):
        check_rows("x", f"given_rows:{function}", {"rows": [row, row]}, roots, check)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("text", "is a str; must be a list of messages"),
        (None, "is a NoneType; must be a list of messages"),
        (ASKED, "has no assistant message"),
        ([], "has no assistant message"),
        ([{"content": "x"}], "messages[0].role: is None"),
        ([*ASKED, {"role": "assistant", "content": 3}], "messages[1].content"),
        ([*ASKED, {"role": "assistant", "content": "\ud800"}], "surrogates not allowed"),
    ],
)
def test_a_conversation_that_nothing_can_be_learned_from_is_named_by_its_row(roots, row, told):
    with pytest.raises(ArealRayError, match=re.escape("x.source: given_rows:given: row 1: ")) as e:
        check_rows("x", "given_rows:given", {"rows": [SAID, row]}, roots, check_conversation)
    assert told in str(e.value)


@pytest.mark.parametrize(
    "row",
    ["abc", ("a", "b"), ([], "a", "b"), (ASKED, "a", 3), ("Hi", "a", "b"), (ASKED, "a", None)],
)
def test_a_row_that_is_no_pair_is_named(roots, row):
    with pytest.raises(ArealRayError, match=r"x\.source: given_rows:given: row 1: "):
        check_rows("x", "given_rows:given", {"rows": [(ASKED, "a", "b"), row]}, roots, check_pair)


@pytest.mark.parametrize(
    ("source", "args", "told"),
    [
        ("given_rows:given", {"rows": []}, "gave no rows"),
        ("given_rows:given", {"rows": None}, "gave a NoneType; must be rows"),
        ("given_rows:given", {"rows": "text"}, "gave a str; must be rows"),
        ("given_rows:given", {"row": []}, "x.args: given_rows:given cannot be called"),
        ("given_rows:awaited", {}, "gave a coroutine; must be rows"),
        ("given_rows:gone", {}, "has no 'gone'"),
    ],
)
def test_a_source_without_rows_is_told(roots, source, args, told):
    with pytest.raises(ArealRayError, match=re.escape(told)):
        check_rows("x", source, args, roots, check_conversation)
