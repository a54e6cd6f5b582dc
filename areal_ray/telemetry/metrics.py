"""Metrics: a name is declared once, with unit, reduction and meaning; values are data until logged.

Whoever measures adds to a `MetricWindow` or returns `Metric`s; the driver takes one row a step from
the window and gives it to the sinks. The declarations are in `names.py`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import SupportsFloat


class Reduction(StrEnum):
    """How the values that one step gathers under a name become one."""

    MEAN = "mean"
    """Weighted by what each value was averaged over (tokens, episodes)."""
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


UNITS = frozenset((
    "s", "bytes", "tokens", "groups", "episodes", "requests", "turns", "versions", "nats",
    "fraction", "tokens_per_s", "bytes_per_s", "updates", "steps", "replicas", "restarts",
    "pairs",
    "publishes",
))  # fmt: skip
"""A name ends with its unit; a name without one is a pure number."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """What one name means."""

    name: str
    """`area/what_unit`, or `area/what` for a pure number."""
    unit: str
    """One of `UNITS`, or empty."""
    reduction: Reduction
    meaning: str
    """One line."""

    def __post_init__(self) -> None:
        area, _, what = self.name.partition("/")
        if not area.isidentifier() or not what.isidentifier():
            raise ValueError(f"metric {self.name!r}: must read area/what_unit")
        if self.unit and self.unit not in UNITS:
            raise ValueError(
                f"metric {self.name}: unit {self.unit!r} is unknown; must be one of "
                f"{', '.join(sorted(UNITS))}, or empty for a pure number"
            )
        if self.unit and what != self.unit and not what.endswith(f"_{self.unit}"):
            raise ValueError(f"metric {self.name}: must end with its unit, _{self.unit}")

    @property
    def area(self) -> str:
        """What stands before the slash."""
        return self.name.partition("/")[0]


class MetricRegistry:
    """Every declared name; nothing else can be logged."""

    def __init__(self, specs: Iterable[MetricSpec] = ()) -> None:
        self._specs: dict[str, MetricSpec] = {}
        for spec in specs:
            self.declare(spec)

    def declare(self, spec: MetricSpec) -> None:
        """Add a name. Saying the same again is fine; a second meaning is not.

        Raises:
            ValueError: The name already means something else.
        """
        known = self._specs.setdefault(spec.name, spec)
        if known != spec:
            raise ValueError(
                f"metric {spec.name} is already declared ({known.reduction}, {known.unit or '1'}: "
                f"{known.meaning}); a name has one meaning. Choose another"
            )

    def __getitem__(self, name: str) -> MetricSpec:
        try:
            return self._specs[name]
        except KeyError:
            near = get_close_matches(name, self._specs, n=1)
            hint = f"Did you mean {near[0]}?" if near else "docs/metrics.md lists the names."
            raise KeyError(f"metric {name} is not declared. {hint}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[MetricSpec]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured value on its way to the row of a step."""

    name: str
    value: SupportsFloat
    weight: float = 1.0
    """What a mean counts it by: the tokens or episodes it was averaged over."""


class MetricWindow:
    """What was measured since the last row, reduced as each name declares.

    A mean of nothing is left out of the row rather than being NaN, so a step that trained on
    nothing has no loss and says so in its counts: sums of `learner/` are in every row, other sums
    in every row after their first.
    """

    def __init__(self, registry: MetricRegistry) -> None:
        self._registry = registry
        self._values: dict[str, tuple[float, float]] = {}  # value, weight so far
        self._sums = {
            s.name for s in registry if s.area == "learner" and s.reduction is Reduction.SUM
        }

    def add(self, name: str, value: SupportsFloat, *, weight: float = 1.0) -> None:
        """Take one value.

        Raises:
            KeyError: The name is not declared.
        """
        reduction = self._registry[name].reduction
        number = float(value)
        if reduction is Reduction.SUM:
            self._sums.add(name)
        if weight <= 0:  # an average over nothing says nothing
            return
        if name not in self._values:
            self._values[name] = (number, weight)
            return
        self._values[name] = _reduce(reduction, self._values[name], (number, weight))

    def update(self, values: Mapping[str, SupportsFloat], *, weight: float = 1.0) -> None:
        """Take many values of equal weight."""
        for name, value in values.items():
            self.add(name, value, weight=weight)

    def extend(self, metrics: Iterable[Metric]) -> None:
        """Take metrics that an actor returned."""
        for metric in metrics:
            self.add(metric.name, metric.value, weight=metric.weight)

    def take(self) -> dict[str, float]:
        """The row so far, by name; the window is empty afterwards."""
        row = dict.fromkeys(self._sums, 0.0)
        row.update((name, value) for name, (value, _) in self._values.items())
        self._values.clear()
        return dict(sorted(row.items()))


def reduce_metrics(metrics: Iterable[Metric], registry: MetricRegistry) -> list[Metric]:
    """The same metrics with each name once: what an actor returns instead of one per episode."""
    reduced: dict[str, tuple[float, float]] = {}
    for metric in metrics:
        new = (float(metric.value), metric.weight)
        old = reduced.get(metric.name)
        if old is not None:
            new = _reduce(registry[metric.name].reduction, old, new)
        reduced[metric.name] = new
    return [Metric(name, value, weight) for name, (value, weight) in reduced.items()]


def _reduce(
    reduction: Reduction, old: tuple[float, float], new: tuple[float, float]
) -> tuple[float, float]:
    (old_value, old_weight), (value, weight) = old, new
    total = old_weight + weight
    if reduction is Reduction.MEAN:
        return ((old_value * old_weight + value * weight) / total if total else value), total
    if reduction is Reduction.SUM:
        return old_value + value, total
    if reduction is Reduction.LAST:
        return value, weight
    if math.isnan(old_value) or math.isnan(value):  # max() would keep whichever came first
        return math.nan, total
    return (max if reduction is Reduction.MAX else min)(old_value, value), total


def metrics_page(registry: MetricRegistry) -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every number a run logs, declared once in `areal_ray/telemetry/names.py`; this page is",
        "made from it (`python -m areal_ray.telemetry.names docs/metrics.md`) and a test compares",
        "the two. Logging any other name is an error.",
        "",
        "The same names are used in `metrics.jsonl` (one strict-JSON line a step), in TensorBoard",
        "and, as `areal_ray_area_what_unit`, in `ray.util.metrics`. *Reduction* tells how the",
        "values of one step become one: `mean` is weighted by the tokens or episodes behind each",
        "value, so it is the global mean over ranks and microbatches. A mean of nothing is absent;",
        "a value that is not finite is `null`. Units: `s` seconds, `fraction` 0 to 1, `versions`",
        "published weight sets, `nats` natural-log units; no unit means a pure number.",
    ]
    area = ""
    for spec in sorted(registry, key=lambda s: (s.area, s.name)):
        if spec.area != area:
            area = spec.area
            lines += ["", f"## {area}/", "", "| name | unit | reduction | meaning |"]
            lines += ["|---|---|---|---|"]
        lines.append(f"| `{spec.name}` | {spec.unit or '1'} | {spec.reduction} | {spec.meaning} |")
    return "\n".join(lines) + "\n"
