"""Charts as SVG text: lines, bars, stacked bars. No script is needed to see them.

A line chart carries its points as JSON in `data-points`; the report's few lines of script show
them under the pointer. Colours are CSS classes (`c1` to `c6`), so light and dark are the page's.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

Point = tuple[float, float]

_HEIGHT = 210.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 46.0, 14.0, 12.0, 26.0
_WIDE = 520.0
NARROW = 330.0
"""Width of a chart of which three stand side by side."""
_SMOOTH_FROM = 60  # points above which a moving average is drawn over the raw line
_MOST_POINTS = 400  # of one curve; more are averaged, the screen has no room for them
_MOST_COLUMNS = 120
_FLAT = 1e-9  # a range below this share of its values is drawn as a constant


@dataclass(frozen=True, slots=True)
class Series:
    """One curve."""

    name: str
    points: Sequence[Point]
    colour: str = "c1"
    is_marked: bool = False
    """Draw a dot at each point: few points, or points that matter one by one."""
    is_peak: bool = False
    """Where points are too many, keep the largest of a stretch instead of its mean."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear scale with round ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float, start: float, end: float) -> float:
        """Position of a value between two pixel positions."""
        return start + (value - self.low) / (self.high - self.low) * (end - start)


def nice_axis(low: float, high: float, *, count: int = 4, is_whole: bool = False) -> Axis:
    """An axis whose ticks are multiples of 1, 2 or 5 times a power of ten."""
    if not high - low > _FLAT * max(1.0, abs(low), abs(high)):  # ticks would round to one value
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    if is_whole:
        step = max(1.0, round(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(i * step, 12) for i in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def number(value: float) -> str:
    """A number for people: at most four significant digits, k and M above ten thousand."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 1e-3 or value == 0:
        return f"{value:.4g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def thin(points: Sequence[Point], most: int, *, is_peak: bool = False) -> list[Point]:
    """At most `most` points: means (or peaks) of equal stretches of them."""
    if len(points) <= most:
        return list(points)
    thinned = []
    for i in range(most):
        stretch = points[i * len(points) // most : (i + 1) * len(points) // most]
        values = [y for _, y in stretch]
        thinned.append((stretch[-1][0], max(values) if is_peak else sum(values) / len(values)))
    return thinned


def _finite(points: Sequence[Point]) -> list[Point]:
    return [p for p in points if math.isfinite(p[1])]


def line_chart(
    series: Sequence[Series],
    *,
    y_range: tuple[float, float] | None = None,
    from_zero: bool = False,
    x_name: str = "step",
    band: tuple[float, str] | None = None,
    width: float = _WIDE,
) -> str:
    """Curves over a shared x axis; empty text when there is no finite point.

    Args:
        band: A horizontal rule, such as a bound: its y and its label.
        width: In pixels, if it is shown at full size.
    """
    finite = [
        replace(s, points=thin(_finite(s.points), _MOST_POINTS, is_peak=s.is_peak)) for s in series
    ]
    drawn = [s for s in finite if s.points]
    if not drawn:
        return ""
    values = [y for s in drawn for _, y in s.points] + ([band[0]] if band else [])
    low, high = y_range or (0.0 if from_zero else min(values), max(values))
    y_axis = nice_axis(low, high)
    places = [x for s in drawn for x, _ in s.points]
    x_axis = nice_axis(min(places), max(places), count=round(width / 85), is_whole=True)
    x_axis = Axis(min(places), max(max(places), min(places) + 1), x_axis.ticks)
    parts = [_grid(x_axis, y_axis, x_name, width)]
    if band:
        y = y_axis.place(band[0], _HEIGHT - _BOTTOM, _TOP)
        parts.append(
            f'<line class="bound" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="note" x="{width - _RIGHT}" y="{y - 4:.1f}" text-anchor="end">'
            f"{escape(band[1])}</text>"
        )
    parts += [_curve(s, x_axis, y_axis, width) for s in drawn]
    parts.append(f'<line class="cross" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    points = escape(json.dumps(_hover_points(drawn, x_axis, x_name, width)), quote=True)
    legend = _legend([(s.colour, s.name) for s in drawn]) if len(drawn) > 1 else ""
    return legend + _svg("".join(parts), f'class="lines" data-points="{points}"', width)


def _grid(x_axis: Axis, y_axis: Axis, x_name: str, width: float) -> str:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.place(tick, _HEIGHT - _BOTTOM, _TOP)
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">'
            f"{number(tick)}</text>"
        )
    for tick in x_axis.ticks:
        if x_axis.low <= tick <= x_axis.high:
            x = x_axis.place(tick, _LEFT, width - _RIGHT)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - 9}" text-anchor="middle">'
                f"{number(tick)}</text>"
            )
    parts.append(f'<text class="tick" x="0" y="{_HEIGHT - 9}">{escape(x_name)}</text>')
    return "".join(parts)


def _curve(series: Series, x_axis: Axis, y_axis: Axis, width: float) -> str:
    placed = [_place(point, x_axis, y_axis, width) for point in series.points]
    path = _path(placed)
    if len(placed) < _SMOOTH_FROM or series.is_marked or series.is_peak:
        kind = "line peak" if series.is_peak else "line"
        parts = [f'<path class="{kind} {series.colour}" d="{path}"/>'] if len(placed) > 1 else []
    else:
        smooth = _path([_place(p, x_axis, y_axis, width) for p in _moving_average(series.points)])
        parts = [
            f'<path class="line faint {series.colour}" d="{path}"/>',
            f'<path class="line {series.colour}" d="{smooth}"/>',
        ]
    if series.is_marked or len(placed) == 1:
        parts += [f'<circle class="{series.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>'
                  for x, y in placed]  # fmt: skip
    return "".join(parts)


def _place(point: Point, x_axis: Axis, y_axis: Axis, width: float) -> Point:
    x = x_axis.place(point[0], _LEFT, width - _RIGHT)
    return x, y_axis.place(point[1], _HEIGHT - _BOTTOM, _TOP)


def _path(placed: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)


def _moving_average(points: Sequence[Point]) -> list[Point]:
    reach = max(2, len(points) // 40)
    smooth = []
    for i, (x, _) in enumerate(points):
        near = points[max(0, i - reach) : i + reach + 1]
        smooth.append((x, sum(y for _, y in near) / len(near)))
    return smooth


def _hover_points(
    series: Sequence[Series], x_axis: Axis, x_name: str, width: float
) -> list[list[object]]:
    by_x: dict[float, list[list[str]]] = {}
    for s in series:
        for x, y in s.points:
            by_x.setdefault(x, []).append([s.name, number(y)])
    return [
        [round(x_axis.place(x, _LEFT, width - _RIGHT), 1), f"{x_name} {x:g}", values]
        for x, values in sorted(by_x.items())
    ]


def bar_chart(bars: Sequence[tuple[str, float]], *, x_name: str) -> str:
    """Vertical bars with their value above; empty text when there is none."""
    if not bars:
        return ""
    top = max(value for _, value in bars) or 1.0
    total = sum(value for _, value in bars) or 1.0
    room = (_WIDE - _RIGHT - 10) / len(bars)
    width = min(64.0, room * 0.72)
    base, ceiling = _HEIGHT - _BOTTOM - 8, _TOP + 18
    parts = [f'<line class="axis" x1="0" x2="{_WIDE - _RIGHT}" y1="{base}" y2="{base}"/>']
    for i, (label, value) in enumerate(bars):
        x = 10 + room * (i + 0.5)
        height = max(1.0, value / top * (base - ceiling)) if value else 0.0
        share = f"{100 * value / total:.0f} %" if len(bars) <= 12 else ""
        parts.append(
            f'<rect class="c1" x="{x - width / 2:.1f}" y="{base - height:.1f}" rx="2" '
            f'width="{width:.1f}" height="{height:.1f}"><title>{escape(label)}: {value:g}</title>'
            f'</rect><text class="value" x="{x:.1f}" y="{base - height - 6:.1f}" '
            f'text-anchor="middle">{share}</text>'
            f'<text class="tick" x="{x:.1f}" y="{base + 15}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )
    parts.append(f'<text class="tick" x="{_WIDE - _RIGHT}" y="{_HEIGHT - 1}" '
                 f'text-anchor="end">{escape(x_name)}</text>')  # fmt: skip
    return _svg("".join(parts), "")


def share_bars(rows: Sequence[tuple[str, Sequence[tuple[str, str, float]]]]) -> str:
    """One horizontal bar a row, cut into shares: rows of (name, [(colour, part, seconds)])."""
    parts = []
    for name, cuts in rows:
        total = sum(seconds for _, _, seconds in cuts)
        if total <= 0:
            continue
        pieces = []
        for colour, part, seconds in cuts:
            share = 100 * seconds / total
            if seconds <= 0:
                continue
            label = f"{escape(part)} {share:.0f} %" if share >= 11 else ""
            pieces.append(
                f'<span class="piece {colour}" style="width:{share:.2f}%" '
                f'title="{escape(name)}, {escape(part)}: {seconds:.1f} s, {share:.1f} %">'
                f"{label}</span>"
            )
        parts.append(
            f'<div class="share"><span class="role">{escape(name)}</span>'
            f'<span class="bar">{"".join(pieces)}</span></div>'
        )
    return "".join(parts)


def stacked_columns(steps: Sequence[float], layers: Sequence[Series]) -> str:
    """A column a step (a mean of several, if there are many), its parts stacked; seconds."""
    if not steps or not layers:
        return ""
    at = [dict(layer.points) for layer in layers]
    if len(steps) > _MOST_COLUMNS:
        every = [thin([(s, v.get(s, 0.0)) for s in steps], _MOST_COLUMNS) for v in at]
        steps, at = [step for step, _ in every[0]], [dict(points) for points in every]
    totals = [sum(values.get(step, 0.0) for values in at) for step in steps]
    if max(totals) <= 0:
        return ""
    y_axis = nice_axis(0.0, max(totals))
    room = (_WIDE - _RIGHT - _LEFT) / len(steps)
    pad = 0.5 if room > 4 else 0.0
    x_axis = Axis(steps[0] - 0.5, steps[-1] + 0.5,
                  nice_axis(steps[0], steps[-1], count=6, is_whole=True).ticks)  # fmt: skip
    parts = [_grid(x_axis, y_axis, "step", _WIDE)]
    hover = []
    for i, step in enumerate(steps):
        x, floor = _LEFT + room * i, 0.0
        for layer, values in zip(layers, at, strict=True):
            seconds = values.get(step, 0.0)
            bottom = y_axis.place(floor, _HEIGHT - _BOTTOM, _TOP)
            top = y_axis.place(floor + seconds, _HEIGHT - _BOTTOM, _TOP)
            floor += seconds
            if bottom - top >= 0.05:
                parts.append(
                    f'<rect class="{layer.colour}" x="{x + pad:.2f}" y="{top:.2f}" '
                    f'width="{room - 2 * pad:.2f}" height="{bottom - top:.2f}"/>'
                )
        labels = [[s.name, f"{v.get(step, 0.0):.2f} s"] for s, v in zip(layers, at, strict=True)]
        hover.append([round(x + room / 2, 1), f"step {step:g}", labels])
    points = escape(json.dumps(hover), quote=True)
    legend = _legend([(layer.colour, layer.name) for layer in layers])
    return legend + _svg("".join(parts), f'class="lines" data-points="{points}"')


def spark(values: Sequence[float]) -> str:
    """A curve for a table cell."""
    finite = [y for _, y in thin(_finite([(0.0, v) for v in values]), 100)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    span = high - low or 1.0
    points = [(i / (len(finite) - 1) * 96 + 2, 20 - (v - low) / span * 16)
              for i, v in enumerate(finite)]  # fmt: skip
    return (
        '<svg class="spark" viewBox="0 0 100 24" aria-hidden="true">'
        f'<path class="line c1" d="{_path(points)}"/></svg>'
    )


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    keys = "".join(
        f'<span><i class="key {colour}"></i>{escape(name)}</span>' for colour, name in entries
    )
    return f'<p class="legend">{keys}</p>'


def _svg(inside: str, attributes: str, width: float = _WIDE) -> str:
    return f'<svg viewBox="0 0 {width:g} {_HEIGHT:g}" role="img" {attributes}>{inside}</svg>'
