"""The curves of benchmarks/staleness.py as one picture: a panel a bound, a line an objective.

    python -m benchmarks.staleness_plot FIGURES.json docs/staleness.svg

Each line is the median over the seeds, its band the lowest and highest of them.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
WIDTH, HEIGHT, GAP, TOP, LEFT = 190.0, 170.0, 24.0, 46.0, 40.0
LOOKS_EVERY = 5
"""Steps between two looks at held-out accuracy, as in the demo's recipe."""

Row = dict[str, Any]


def draw(rows: Sequence[Row]) -> str:
    """An SVG that stands alone, light and dark pages alike."""
    bounds = sorted({row["bound"] for row in rows})
    names = list(dict.fromkeys(row["objective"] for row in rows))
    seeds = len({row["seed"] for row in rows})
    width = LEFT + len(bounds) * (WIDTH + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {TOP + HEIGHT + 40:g}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, name in enumerate(names):
        x = LEFT + place * 170
        parts.append(f'<rect x="{x}" y="8" width="14" height="4" fill="{COLOURS[place]}"/>')
        parts.append(f'<text x="{x + 19}" y="14">{name}</text>')
    for place, bound in enumerate(bounds):
        parts += _panel([row for row in rows if row["bound"] == bound], names, bound, place)
    about = f"held-out accuracy by step; median and range of {seeds} seeds"
    parts.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 32}">{about}</text></svg>')
    return "\n".join(parts) + "\n"


def _panel(rows: Sequence[Row], names: Sequence[str], bound: int, place: int) -> list[str]:
    left = LEFT + place * (WIDTH + GAP)
    last = max(len(row["curve"]) for row in rows) - 1

    def at(look: int, accuracy: float) -> str:
        return f"{left + look / last * WIDTH:.1f},{TOP + (1.0 - accuracy) * HEIGHT:.1f}"

    parts = [f'<text x="{left}" y="{TOP - 8}">bound {bound}</text>']
    for accuracy in (0.0, 0.5, 1.0):
        y = TOP + (1.0 - accuracy) * HEIGHT
        parts.append(f'<path d="M{left} {y}h{WIDTH}" stroke="#ddd"/>')
        if place == 0:
            label = f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{accuracy:g}</text>'
            parts.append(label)
    for look in range(0, last + 1, max(1, last // 2)):
        x, y = left + look / last * WIDTH, TOP + HEIGHT + 14
        label = f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{look * LOOKS_EVERY}</text>'
        parts.append(label)
    for colour, name in zip(COLOURS, names, strict=False):
        curves = [row["curve"] for row in rows if row["objective"] == name]
        looks = list(zip(*curves, strict=True))
        high = [at(i, max(seen)) for i, seen in enumerate(looks)]
        low = [at(i, min(seen)) for i, seen in enumerate(looks)]
        middle = [at(i, statistics.median(seen)) for i, seen in enumerate(looks)]
        band = " ".join(high + low[::-1])
        parts.append(f'<polygon points="{band}" fill="{colour}" opacity="0.12"/>')
        line = f'<polyline points="{" ".join(middle)}" fill="none" stroke="{colour}"'
        parts.append(f'{line} stroke-width="1.5"/>')
    return parts


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the figures, write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", type=Path, help="what benchmarks.staleness --json wrote")
    parser.add_argument("picture", type=Path)
    chosen = parser.parse_args(arguments)
    rows = json.loads(chosen.figures.read_text(encoding="utf-8"))
    chosen.picture.write_text(draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
