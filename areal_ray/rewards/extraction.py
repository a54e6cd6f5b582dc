"""Which part of a reply is its answer, and what plain numbers are worth; stdlib only.

The rules, in order: text after the last finished thought and the last `###Response`; there, of the
last `\\boxed{}` and the last `####`, the one further down; else the last formula between dollars on
the last line; else the letter that the last line says the answer is; else the last number. A
thought or a box that was never closed has no answer in it.
A number's unit, or the name of what is counted, is left aside; 1 1/2 is one and a half.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_BOX = re.compile(r"\\(?:fbox|f?boxed)\s*\{")
_WRAPPED = re.compile(r"\\(?:fbox|f?boxed)\s*\{(.*)\}|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_MARKER = re.compile(r"####[ \t]*([^\n]*)")
# A dollar before a digit opens a price: "$5 and $6" holds no formula.
_FORMULA = re.compile(r"\$([^$\n]+)\$(?!\d)|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])-?(?:\d[\d,]*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?:/\d+)?(?![\w])")
_THOUSANDS = re.compile(r"^[+-]?\d{1,3}(?:(,\d{3})+|( \d{3})+)(\.\d+)?$")
_PLAIN = re.compile(r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?$")
_FRACTION = re.compile(r"^([+-]?)\\frac\{([+-]?[\d.,]+)\}\{([+-]?[\d.,]+)\}$")
_MIXED = re.compile(r"^([+-]?)(\d+) ?(?:\\frac\{(\d+)\}\{(\d+)\}|(?<= )(\d+)/(\d+))$")
_WORDS = re.compile(r"^(.*\d)\s*((?:\s[A-Za-z]{2,})+)$")
_COUNTING = re.compile(
    r"\b(and|or|to|of|over|times|plus|minus|mod|pi|sqrt|root|sin|cos|tan|log|ln|exp|inf|infinity"
    r"|half)\b",
    re.IGNORECASE,
)
"""Words after a number that change what it is worth; others name what is counted."""
_UNDERLINED = re.compile(r"(?<![\w}])_{1,2}(?=[\w$+-])|(?<=[\w%.])_{1,2}(?![\w{\\])")
"""Markdown's other mark of what is bold or slanted: __81__."""
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(rf"^(.*\d)\s*\b({'|'.join(_SCALES)})\b(.*)$", re.IGNORECASE)
_GREEK = r"\\(?:alpha|beta|gamma|delta|theta|phi|varphi|psi|omega|lambda|mu|pi|tau|rho|sigma)"
_UNIT = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}")
_CHOICE = re.compile(
    r"\b(?i:answer|choice|option)\b\W{0,4}(?:is\b)?\W{0,6}\b([A-Z])\b(?![\w'-])\W{0,4}$",
    re.ASCII,
)
"""A line that ends with a letter as its answer."""
_PERCENT = re.compile(r"\s*(?:\\?%|\\?\s*(?:percent|per cent|pct)\.?)\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Number:
    """A plain number, exactly."""

    value: Fraction
    is_percent: bool = False


@dataclass(frozen=True, slots=True)
class Extracted:
    """The answer of a reply; empty where there is none."""

    answer: str
    is_cut: bool = False
    """A thought or a box was left open: the reply was cut short."""


def extract(reply: str) -> Extracted:
    """The answer of a reply, by the rules above."""
    text = reply.rpartition("</think>")[2]
    if "<think>" in text:
        return Extracted("", is_cut=True)
    text = text.rpartition("###Response")[2]
    boxes = list(_BOX.finditer(text))
    markers = [m for m in _MARKER.finditer(text) if m[1].strip()]
    if boxes and (not markers or boxes[-1].start() > markers[-1].start()):
        inner = _inside_braces(text, boxes[-1].end())
        # A box within a box: the outer one closes after the inner one.
        return Extracted("", is_cut=True) if inner is None else Extracted(inner.strip())
    if markers:
        return Extracted(_without_markup(markers[-1][1]))
    return Extracted(_flexible(text))


def _inside_braces(text: str, start: int) -> str | None:
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


def _flexible(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    formulas = [m for m in _FORMULA.finditer(lines[-1]) if "\\$" not in m[0]]
    if formulas:
        return next(part for part in formulas[-1].groups() if part is not None).strip()
    choice = _CHOICE.search(_without_markup(lines[-1]))
    if choice is not None:
        return choice[1]
    return last_number_in(text)


def last_number_in(text: str) -> str:
    """The last number of a text as written; empty if there is none."""
    text = _UNDERLINED.sub("", text)
    for old, new in (("{,}", ","), ("\\,", ","), ("\u2212", "-"), ("-\\$", "-"), ("-$", "-")):
        text = text.replace(old, new)
    found = _NUMBER.findall(text)
    return found[-1].rstrip(",") if found else ""


def _without_markup(text: str) -> str:
    return _UNDERLINED.sub("", text).strip().strip("*").strip()


def normalised(answer: str) -> str:
    """One spelling for what is written in several ways; no values are computed."""
    text = _without_markup(answer)
    for old, new in (
        *(("\\$", ""), ("$", ""), ("\\!", ""), ("{,}", ","), ("\\dfrac", "\\frac")),
        *(("\\tfrac", "\\frac"), ("\\left", ""), ("\\right", ""), ("\u2212", "-")),
        *(("\\ ", " "), ("~", " "), ("\\varnothing", "\\emptyset")),
    ):
        text = text.replace(old, new)
    while (box := _WRAPPED.fullmatch(text)) is not None:
        text = next(inside for inside in box.groups() if inside is not None).strip()
    text = re.sub(r"(?<=\d)(?:\\,|\\;|\\:)(?=\d{3})", "", text)
    text = re.sub(r"(?<=\d)(?:\\,|\\;|\s)(?=\\?(?:text|mathrm)?)", " ", text)
    text = re.sub(r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(
        rf"\\(sin|cos|tan|sec|csc|cot)(\^\{{?\d+\}}?)?\s*"
        rf"(\d*{_GREEK}|\d+[a-zA-Z]|(?<=\s)[a-zA-Z])(?![a-zA-Z({{^_])",
        r"\\\1\2(\3)",
        text,
    )
    text = text.strip()
    return text.rstrip(".").strip() if re.search(r"[\w})]\.+$", text) else text


def number(answer: str) -> Number | None:
    """The exact value of a plain number, fraction or percentage; None for anything else."""
    text = normalised(answer)
    bare = _UNIT.sub(lambda unit: f" {unit[1]} ", text).strip()
    is_percent = bool(_PERCENT.search(bare))
    value = _value(_PERCENT.sub("", bare).strip() if is_percent else bare)
    if value is None:
        value = _counted(text, bare)
    return None if value is None else Number(value, is_percent)


def _counted(text: str, bare: str) -> Fraction | None:
    """The number before a unit or the name of what is counted: 12 \\text{ m}, 3 million apples."""
    scaled = _SCALED.match(bare)
    if scaled is not None:
        small = number(scaled[1] + scaled[3])
        return None if small is None else small.value * 10 ** _SCALES[scaled[2].lower()]
    if not _COUNTING.search(bare):
        value = _value(_UNIT.sub("", text).strip())
        words = _WORDS.match(bare)
        return _value(words[1]) if value is None and words is not None else value
    return None


def _value(text: str) -> Fraction | None:
    # Spaces between digits mean something: 1 1/2 is not 11/2, nor 4 2 a 42.
    text = re.sub(r"(?<!\d) +| +(?![\d\\])", "", text.strip())
    if _THOUSANDS.match(text):
        text = re.sub("[, ]", "", text)
    mixed = _MIXED.match(text)
    if mixed:
        sign, *parts = mixed.groups()
        whole, top, bottom = (int(part) for part in parts if part is not None)
        value = whole + Fraction(top, bottom) if bottom else None
        return None if value is None else (-value if sign == "-" else value)
    if _PLAIN.match(text):
        return Fraction(text)
    found = _FRACTION.match(text)
    sign, above, below = found.groups() if found else ("", *_slashed(text))
    over, under = (_value(part) if part else None for part in (above, below))
    if over is None or under is None or under == 0:
        return None
    return -over / under if sign == "-" else over / under


def _slashed(text: str) -> tuple[str, str]:
    above, slash, below = text.partition("/")
    return (above, below) if slash and "/" not in below else ("", "")
