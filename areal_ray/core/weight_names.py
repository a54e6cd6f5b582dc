"""Two sides of a publish compared by the names and shapes of their tensors, told in full.

All differences are told; names that differ in one number alone, as those of layers do, become one:
`model.layers.{0-2,5}.mlp.up_proj.weight`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

Shape = tuple[int, ...]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MOST_TOLD = 12
"""Names, after folding, of each kind of difference."""


def difference(sent: Mapping[str, Shape], expected: Mapping[str, Shape]) -> str:
    """What is missing, extra or of another shape; empty where nothing is."""
    missing = [name for name in expected if name not in sent]
    extra = [name for name in sent if name not in expected]
    reshaped: defaultdict[tuple[Shape, Shape], list[str]] = defaultdict(list)
    for name, shape in sent.items():
        if name in expected and tuple(shape) != tuple(expected[name]):
            reshaped[tuple(shape), tuple(expected[name])].append(name)
    told = []
    if missing:
        told.append(f"{_count(missing)} expected but not sent: {_listed(folded(missing))}")
    if extra:
        told.append(f"{_count(extra)} sent but not expected: {_listed(folded(extra))}")
    if reshaped:
        lines = [
            f"{name} is sent as {ours}, expected {theirs}"
            for (ours, theirs), names in reshaped.items()
            for name in folded(names)
        ]
        total = [name for names in reshaped.values() for name in names]
        told.append(f"{_count(total)} of another shape: {_listed(lines)}")
    return "; ".join(told)


def folded(names: Iterable[str]) -> list[str]:
    """Names in their order; those that differ in their first number alone as one."""
    numbers: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for name in names:
        found = _NUMBER.search(name)
        if found is None:
            numbers[name, ""] = []
        else:
            numbers[name[: found.start()], name[found.end() :]].append(int(found.group()))
    return [
        f"{before}{_ranges(sorted(which))}{after}" for (before, after), which in numbers.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """`7` for one number, else `{0-2,5}`."""
    if len(numbers) < 2:
        return "".join(map(str, numbers))
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    told = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    return "{" + ",".join(told) + "}"


def _count(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _listed(lines: list[str]) -> str:
    rest = len(lines) - _MOST_TOLD
    return ", ".join(lines[:_MOST_TOLD]) + (f" and {rest} more" if rest > 0 else "")
