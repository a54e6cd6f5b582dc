"""Curves as text: a sparkline for a table cell, a braille or ASCII plot for the end of a run."""

import math
from collections.abc import Sequence

_BLOCKS = "".join(chr(0x2581 + i) for i in range(8))  # lower one eighth block to full block
_ASCII_LEVELS = "_.-=*#"
_BRAILLE = 0x2800
_DOT = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] bits of a cell

Point = tuple[float, float]
"""x and y."""


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """The values in at most `width` characters, averaged where there are more; gaps are blank."""
    levels = _ASCII_LEVELS if ascii_only else _BLOCKS
    shrunk = shrink(values, width)
    known = [v for v in shrunk if v is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if v is None else levels[round((v - low) * scale)] for v in shrunk)


def shrink(values: Sequence[float | None], width: int) -> list[float | None]:
    """At most `width` values: means of equal stretches, of what is known and finite in each."""
    count = min(width, len(values))
    shrunk: list[float | None] = []
    for i in range(count):
        stretch = values[i * len(values) // count : (i + 1) * len(values) // count]
        known = [v for v in stretch if v is not None and math.isfinite(v)]
        shrunk.append(sum(known) / len(known) if known else None)
    return shrunk


def plot(
    points: Sequence[Point],
    *,
    width: int,
    height: int,
    y_range: tuple[float, float] | None = None,
    ascii_only: bool = False,
) -> list[str]:
    """Lines of text with the curve through the points, y labels at the left, x range below.

    Args:
        width: Characters of the drawing itself.
        height: Lines of the drawing itself.
        y_range: Smallest and largest y; by default those of the points.
    """
    known = sorted(p for p in points if math.isfinite(p[1]))
    if not known:
        return []
    low, high = y_range or (min(y for _, y in known), max(y for _, y in known))
    if high <= low:
        low, high = low - 0.5, high + 0.5
    columns, rows = (width, height) if ascii_only else (2 * width, 4 * height)
    dots = _trace(known, columns, rows, low, high)
    cells = _ascii_cells(dots, width, height) if ascii_only else _cells(dots, width, height)
    bar = "|" if ascii_only else chr(0x2502)
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    labels.setdefault(height // 2, f"{high - (high - low) * (height // 2) / (height - 1):.2f}")
    size = max(len(label) for label in labels.values())
    lines = [f"{labels.get(i, ''):>{size}} {bar}{row}" for i, row in enumerate(cells)]
    left, right = f"{known[0][0]:g}", f"{known[-1][0]:g}"
    right = right if right != left else ""
    return [*lines, " " * (size + 2) + (left + right.rjust(width - len(left))).rstrip()]


def _trace(
    points: Sequence[Point], columns: int, rows: int, low: float, high: float
) -> set[tuple[int, int]]:
    """Cells (column, row from the top) that the straight lines between the points touch."""
    first, last = points[0][0], points[-1][0]
    span = last - first or 1.0

    def place(point: Point) -> tuple[float, float]:
        x = (point[0] - first) / span * (columns - 1)
        y = min(max((point[1] - low) / (high - low), 0.0), 1.0)
        return x, (1.0 - y) * (rows - 1)

    dots = set()
    placed = [place(point) for point in points]
    for (x0, y0), (x1, y1) in zip(placed, placed[1:] or placed, strict=False):
        hops = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0))))
        for hop in range(hops + 1):
            t = hop / hops
            dots.add((round(x0 + (x1 - x0) * t), round(y0 + (y1 - y0) * t)))
    return dots


def _cells(dots: set[tuple[int, int]], width: int, height: int) -> list[str]:
    bits = [[0] * width for _ in range(height)]
    for column, row in dots:
        bits[row // 4][column // 2] |= _DOT[row % 4][column % 2]
    return ["".join(chr(_BRAILLE + b) if b else " " for b in line).rstrip() for line in bits]


def _ascii_cells(dots: set[tuple[int, int]], width: int, height: int) -> list[str]:
    lines = [[" "] * width for _ in range(height)]
    for column, row in dots:
        lines[row][column] = "*"
    return ["".join(line).rstrip() for line in lines]
