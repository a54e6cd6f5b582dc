"""Rewards for mathematics: `score` for answers of any form, `last_number` for plain numbers.

Plain numbers, fractions, percentages, ratios and choice letters are compared exactly, here. Only
what is left, such as symbolic expressions, sets and intervals, goes to math-verify (extra `math`),
and its yes is checked again where it is known to round.

Where users want opposite things, the answer is: a percentage equals the same number with or
without the sign, and its value as a fraction (36\\%, 36 and 0.36); decimals are not rounded
(1.2345678 is not 1.2345679, and 14.29 is not 100/7) unless `tolerance` says so.
"""

import functools
import logging
import math
import re
from fractions import Fraction
from typing import Any

from areal_ray.core.numeric import as_number
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Trajectory
from areal_ray.errors import DataError, RecipeError
from areal_ray.rewards.extraction import Number, extract, last_number_in, normalised, number

_RATIO = re.compile(r"^(\d+)\s*:\s*(\d+)$")
_IN_BASE = re.compile(r"^([0-9A-Fa-f]+)_\{?(\d+)\}?$")
_ZERO_BELOW = re.compile(r"\\frac\{[^{}]*\}\{0+\}|/\s*0+(?![\d.])")
_CLOSE = 1e-6


def score(task: Task, trajectory: Trajectory, tolerance: float = 0.0) -> dict[str, Any]:
    """1 if the reply's answer equals `task.answer`, else 0; details say what was compared.

    Args:
        task: Its answer is text (with or without LaTeX delimiters), a number, or a choice letter.
        trajectory: Its final text is read by the rules of `areal_ray.rewards.extraction`.
        tolerance: Relative difference up to which plain numbers are equal.

    Raises:
        DataError: The task has no usable answer.
    """
    gold = gold_text(task)
    found = extract(trajectory.final_text)
    is_right = bool(found.answer) and equal(gold, found.answer, tolerance)
    details: dict[str, Any] = {"reward": float(is_right), "answer": found.answer[:100]}
    return {**details, "is_cut": True} if found.is_cut else details


def last_number(task: Task, trajectory: Trajectory) -> float:
    """1 if the last number of the reply is `task.answer`, else 0. Stdlib only.

    Raises:
        DataError: The task's answer is no number.
    """
    gold = number(gold_text(task))
    if gold is None:
        raise DataError(f"task '{task.id}': answer is {task.answer!r}; must be a number")
    said = number(last_number_in(trajectory.final_text))
    return float(said is not None and said.value == gold.value)


def gold_text(task: Task) -> str:
    """The reference answer as text.

    Raises:
        DataError: It is missing, empty or neither text nor a number; names the row.
    """
    answer = task.answer
    if isinstance(answer, str) and answer.strip():
        return answer
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    value = None if isinstance(answer, bool) else as_number(answer)
    if value is not None and math.isfinite(value):
        return repr(value)
    raise DataError(
        f"task '{task.id}': answer is {answer!r}; must be text or a finite number to compare with"
    )


def equal(gold: str, answer: str, tolerance: float = 0.0) -> bool:
    """Whether an extracted answer says the same as the gold one. The order matters: a gold
    inequality accepts its interval."""
    ours, theirs = normalised(gold), normalised(answer)
    if _flat(ours) == _flat(theirs):
        return True
    one, other = number(ours), number(theirs)
    if one is not None and other is not None:
        return _numbers_equal(one, other, tolerance)
    if all(_IN_BASE.match(text) for text in (ours, theirs)):
        return _in_base(ours) == _in_base(theirs)
    if any(_RATIO.match(text) for text in (ours, theirs)):
        return _ratios_equal(ours, theirs)
    if any(_ZERO_BELOW.search(text) for text in (ours, theirs)):
        return False  # no value to compare; the same text was accepted above
    if _choice(ours):
        return _choice(ours) == _choice(theirs)
    return _verified(_exactly(one, ours), _exactly(other, theirs))


def _exactly(known: Number | None, text: str) -> str:
    """A plain number without an exponent, which the library would read as a constant times e."""
    return text if known is None or known.is_percent else str(known.value)


def _numbers_equal(gold: Number, said: Number, tolerance: float) -> bool:
    accepted = {gold.value}
    if gold.is_percent and not said.is_percent:
        accepted.add(gold.value / 100)
    if said.is_percent and not gold.is_percent:
        accepted.add(gold.value * 100)
    allowed = Fraction(tolerance)
    return any(abs(said.value - value) <= allowed * abs(value) for value in accepted)


def _in_base(text: str) -> int | str:
    """The value of digits with the base below them, as 101_2; the text where there is none."""
    digits, base = text.replace("{", "").replace("}", "").split("_")
    try:
        return int(digits, int(base))
    except ValueError:
        return text


def _ratios_equal(gold: str, said: str) -> bool:
    one, other = _RATIO.match(gold), _RATIO.match(said)
    if one is None or other is None:
        return False
    (a, b), (c, d) = ((int(m[1]), int(m[2])) for m in (one, other))
    if (a, b) == (c, d):
        return True
    # Clock times have two digits after the colon, and are not reduced.
    is_clock = any(len(m[2]) == 2 for m in (one, other))
    return not is_clock and 0 not in (b, d) and a * d == b * c


def _choice(text: str) -> str:
    """The letter of a multiple-choice answer; empty for anything else."""
    found = re.fullmatch(r"\(?([A-Z])\)?[.:]?", _flat(text))
    return found[1] if found else ""


def _flat(text: str) -> str:
    """For comparing as text: macros for words taken off, no spaces but between digits."""
    unwrapped = re.sub(r"\\(?:text|textbf|mathrm|mbox|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", unwrapped)


def _verified(gold: str, said: str) -> bool:
    verify, parse = _math_verify()
    ours, theirs = parse(gold), parse(said)
    if not ours or not theirs:
        return False
    # Strict: as the gold is written, not the other way round.
    return bool(verify(ours, theirs)) and _is_close_enough(ours[0], theirs[0])


def _is_close_enough(one: Any, other: Any) -> bool:
    """Refuse two numbers that only look equal since both round to zero."""
    import sympy

    if not all(isinstance(side, sympy.Expr) and side.is_number for side in (one, other)):
        return True
    one, other = one.doit(), other.doit()
    if one == 0 or other == 0:
        return bool(one == other)
    ratio = sympy.N(one / other, 20)
    return bool(ratio.is_finite) and bool(abs(ratio - 1) < _CLOSE)


@functools.cache
def _math_verify() -> tuple[Any, Any]:
    try:
        import math_verify
    except ImportError as error:
        raise RecipeError(
            "reward.score: 'areal_ray.rewards.math:score' needs math-verify for answers that are "
            "no plain numbers. pip install 'areal-ray[math]'."
        ) from error
    # Our runner kills what takes too long; signals would not work outside a main thread.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    targets = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]

    def parse(text: str) -> Any:
        return math_verify.parse(f"${text}$", targets, parsing_timeout=None)

    def verify(gold: Any, said: Any) -> Any:
        return math_verify.verify(gold, said, float_rounding=9, timeout_seconds=None)

    return verify, parse
