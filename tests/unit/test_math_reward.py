"""Verdicts on mathematical answers: what a user expects, not what a library says."""

import math
import sys
from fractions import Fraction

import numpy as np
import pytest

from areal_ray.core.task import Task
from areal_ray.errors import DataError
from areal_ray.rewards.extraction import extract
from areal_ray.rewards.math import _math_verify, last_number, score
from recipes.gsm8k.reward import right_or_close_to_form
from tests.support.replies import replied

RIGHT, WRONG = 1.0, 0.0


def verdict(gold: object, reply: str, **args: float) -> float:
    return score(Task("row-7", (), gold), replied(reply), **args)["reward"]


MATH = [
    (r"\left( 5, \frac{\pi}{4} \right)", r"\boxed{(5, \frac{3\pi}{4})}", WRONG),
    (r"\left( 5, \frac{\pi}{4} \right)", r"\boxed{(5, \frac{\pi}{4})}", RIGHT),
    (r"\dfrac{11}{6}", r"\boxed{\dfrac{11}{6}}", RIGHT),
    (r"\frac34", r"\boxed{\frac{3}{4}}", RIGHT),
    ("6", r"\boxed{6\sqrt{2}}", WRONG),
    ("6", r"$6\sqrt(2)$", WRONG),
    (r"6\sqrt{2}", r"$6\sqrt(2)$", RIGHT),
    (r"\frac{1}{1500!}", r"\boxed{\frac{1}{1502!}}", WRONG),
    (r"\frac{1}{1500!}", r"\boxed{\frac{1}{1500!}}", RIGHT),
    ("n=4, 5, 6", r"\boxed{n=3, 4, 5}", WRONG),
    ("n=4, 5, 6", r"\boxed{n=4, 5, 6}", RIGHT),
    ("T = (0, 2)", r"\boxed{T = (0, 2.5)}", WRONG),
    ("11:00", r"\boxed{2:00}", WRONG),
    ("11:00", r"\boxed{11:00}", RIGHT),
    ("2:4", r"\boxed{1:2}", RIGHT),
    ("1/0", r"\boxed{2/0}", WRONG),
    ("19", r"\boxed{\text{19}}", RIGHT),
    (r"\frac{x^2}{9}+\frac{y^2}{5}=1", r"\boxed{\frac{x^2}{36}+\frac{y^2}{20}=1}", WRONG),
    (r"\frac{x^2}{9}+\frac{y^2}{5}=1", r"\boxed{\frac{x^2}{9}+\frac{y^2}{5}=1}", RIGHT),
    (r"36\%", r"\boxed{36 \text{ percent}}", RIGHT),
    (r"36\%", r"\boxed{36 pct}", RIGHT),
    (r"36\%", r"\boxed{3600\%}", WRONG),
    (r"36\%", r"\boxed{36}", RIGHT),
    (r"36\%", r"\boxed{0.36}", RIGHT),
    (r"36\%", r"\boxed{0.0036}", WRONG),
    ("36", r"\boxed{36\%}", RIGHT),
    (
        "81",
        "300 + 2*117 = 534. So the number of members is **81**.\n\nFinal answer: **81**",
        RIGHT,
    ),
    (r"m \geq \sqrt{3}", r"\boxed{m \in [\sqrt{3}, +\infty)}", RIGHT),
    ("B", r"\boxed{B}", RIGHT),
    ("B", r"\boxed{\text{(B)}}", RIGHT),
    ("B", r"\boxed{D}", WRONG),
    (
        r"\begin{pmatrix}2&0\\1&-3\end{pmatrix}",
        r"\boxed{\begin{bmatrix}2&0\\1&-3\end{bmatrix}}",
        RIGHT,
    ),
    (
        r"\begin{pmatrix}2&0\\1&-3\end{pmatrix}",
        r"\boxed{\begin{pmatrix}2&0\\1&3\end{pmatrix}}",
        WRONG,
    ),
    (r"\tan^2 t + 1", r"\boxed{\sec^2 t}", RIGHT),
    (r"\tan^2(t) + 1", r"\boxed{\sec^2(t)}", RIGHT),
    (r"\tan^2 t + 1", r"\boxed{\csc^2 t}", WRONG),
    ("1000000", r"\boxed{1\,000\,000}", RIGHT),
    ("1000000", r"\boxed{1e6}", RIGHT),
    ("1000000", r"\boxed{10^6}", RIGHT),
    (r"1\,000\,000", r"\boxed{1000000}", RIGHT),
    ("1e6", r"\boxed{1000000}", RIGHT),
    ("1.2345679", r"\boxed{1.2345678}", WRONG),
    ("1.2345679", r"\boxed{1.2345671}", WRONG),
    (r"\frac{100}{7}", r"\boxed{14.29}", WRONG),
    ("42", r"so it must be \boxed{42", WRONG),
    (7, r"\boxed{7}", RIGHT),
    (0.5, r"\boxed{\frac{1}{2}}", RIGHT),
    ("12", r"\boxed{12 \text{ apples}}", RIGHT),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", RIGHT),
]

GSM8K = [
    ("-7", "#### -7", RIGHT),
    ("7", "#### -7", WRONG),
    ("12400", r"\boxed{12,400}", RIGHT),
    ("12400", "#### 12,400", RIGHT),
    ("6300", r"\boxed{\$6{,}300}", RIGHT),
    ("400", r"\boxed{12,400}", WRONG),
    ("70000", "After all costs the profit is $70,000.", RIGHT),
    ("18", "#### $18.00", RIGHT),
    ("42", "#### 42.", RIGHT),
    ("15", "#### 12\nWait, that is wrong.\n#### 15", RIGHT),
    ("12", "#### 12\nWait, that is wrong.\n#### 15", WRONG),
    ("24", r"<think>Let me see, \boxed{24} looks plausible, still need to check", WRONG),
    ("24", r"<think>first try \boxed{24}, hmm</think> The answer is \boxed{26}.", WRONG),
    ("26", r"<think>first try \boxed{24}, hmm</think> The answer is \boxed{26}.", RIGHT),
    ("5", r"thoughts \boxed{1}###Response \boxed{2}###Response \boxed{5}", RIGHT),
    ("5", r"Answer: \boxed{5}", RIGHT),
    (r"\frac{3}{5}", r"\boxed{\frac{3}{5}}", RIGHT),
    (r"\frac{3}{5}", r"\boxed{\boxed{\frac{3}{5}}}", RIGHT),
]


@pytest.mark.parametrize(("gold", "reply", "expected"), MATH)
def test_a_mathematical_answer_gets_the_verdict_a_user_expects(gold, reply, expected):
    pytest.importorskip("math_verify")
    assert verdict(gold, reply) == expected


@pytest.mark.parametrize(("gold", "reply", "expected"), GSM8K)
def test_a_grade_school_answer_gets_the_verdict_a_user_expects(gold, reply, expected):
    assert verdict(gold, reply) == expected


def test_rounded_decimals_are_equal_only_within_an_asked_for_tolerance():
    assert verdict(r"\frac{100}{7}", r"\boxed{14.29}", tolerance=1e-3) == RIGHT
    assert verdict(r"\frac{100}{7}", r"\boxed{14.5}", tolerance=1e-3) == WRONG


def test_a_box_cut_by_the_length_limit_is_flagged_and_the_reply_is_not_its_answer():
    told = score(Task("row-7", (), "42"), replied(r"42 and \boxed{42"))
    assert told == {"reward": 0.0, "answer": "", "is_cut": True}


@pytest.mark.parametrize(
    "gold", [None, "", "  ", [1], True, math.nan, math.inf, np.float32("nan"), {"a": 1}]
)
def test_a_row_without_usable_gold_is_a_data_error_that_names_it(gold):
    with pytest.raises(DataError, match="row-7"):
        score(Task("row-7", (), gold), replied(r"\boxed{1}"))


@pytest.mark.parametrize("reply", ["", "I do not know.", r"\boxed{}", "####", "$$", "{{{", "\\"])
def test_a_reply_without_an_answer_is_wrong_and_raises_nothing(reply):
    assert verdict("3", reply) == WRONG


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("42", RIGHT),
        ("17+25=42", RIGHT),
        ("The answer is 42.", RIGHT),
        ("42 is 17 + 25", WRONG),
        ("-42", WRONG),
        ("4 2", WRONG),
        ("142", WRONG),
        ("", WRONG),
        ("forty-two", WRONG),
    ],
)
def test_the_last_number_of_a_reply_decides_an_arithmetic_task(reply, expected):
    assert last_number(Task("t", (), 42), replied(reply)) == expected


def test_a_gold_that_is_no_number_is_a_data_error_for_last_number():
    with pytest.raises(DataError, match="'t'"):
        last_number(Task("t", (), "x+1"), replied("3"))


NAMED = {"score": score, "last_number": last_number, "gsm8k": right_or_close_to_form}


@pytest.mark.parametrize("reward", NAMED)
@pytest.mark.parametrize(
    ("gold", "reply", "expected"),
    [
        ("5", r"Answer: \boxed{5}", RIGHT),
        ("5", "Answer: 5", RIGHT),
        ("5", r"Answer: \boxed{6}", WRONG),
        ("-7", r"\boxed{-7}", RIGHT),
        ("7", r"\boxed{-7}", WRONG),
        ("12400", r"\boxed{12,400}", RIGHT),
        ("400", r"\boxed{12,400}", WRONG),
        (5, r"so \boxed{5}", RIGHT),
    ],
)
def test_every_named_reward_reads_an_answer_alike(reward, gold, reply, expected):
    told = NAMED[reward](Task("t", (), gold), replied(reply))
    told = told.get("correct", told["reward"]) if isinstance(told, dict) else told
    assert told == expected


PLAIN = [case for case in MATH if case[0] in (r"36\%", "36", "19", "1000000", "1.2345679", 7, 0.5)]


def test_plain_numbers_and_percentages_need_no_library_and_so_none_changes_their_verdict(
    monkeypatch,
):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    _math_verify.cache_clear()
    try:
        assert len(PLAIN) > 12
        for gold, reply, expected in [*PLAIN, *GSM8K]:
            if reply != r"\boxed{10^6}":
                assert verdict(gold, reply) == expected, (gold, reply)
    finally:
        _math_verify.cache_clear()


def test_no_verdict_leaves_a_trace_or_a_warning(caplog, recwarn):
    pytest.importorskip("math_verify")
    for gold, reply, _ in MATH:
        verdict(gold, reply)
    assert [r.getMessage() for r in caplog.records] == []
    assert [str(w.message) for w in recwarn if "areal_ray" in w.filename] == []


@pytest.mark.parametrize(
    "gold", [7, 7.0, np.int64(7), np.float32(7), np.float64(7), "7", "7.0", Fraction(7)]
)
def test_a_gold_number_of_any_type_is_that_number(gold):
    assert verdict(gold, r"\boxed{7}") == RIGHT
    assert verdict(gold, r"\boxed{8}") == WRONG
    assert last_number(Task("t", (), gold), replied("so 7")) == RIGHT


def test_of_a_box_and_a_marker_the_later_one_is_the_answer():
    assert extract(r"\boxed{1} #### 2").answer == "2"
    assert extract("#### 2\nso " + r"\boxed{1}").answer == "1"
