"""What the benchmarks share: whole runs on one Ray, their rows, medians, tables.

All runs of a benchmark share one Ray session, started the way `areal-ray train` starts it; each
run has actors of its own. Start-up is never part of a figure: only rows between two steps are.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import areal_ray
from areal_ray.recipe import Recipe, load_recipe
from areal_ray.telemetry.summary import Summary
from areal_ray.telemetry.views import EvalView, Header, StatusView, StepView

ROOT = Path(__file__).resolve().parents[1]
FILEROOT = ROOT / "runs" / "benchmarks"
"""Run folders, and the warm-up checkpoints that runs begin from: made once, then used again."""
PLAIN = (
    f"cluster.fileroot={FILEROOT}",
    "checkpoint.every_steps=null",
    "telemetry.dump_every_steps=0",
)
"""Overrides of every run: nothing is written but its rows and its model."""

GSM8K_TOKENS = (
    (45, 47), (38, 69), (53, 66), (47, 82), (63, 75), (59, 89), (68, 89), (52, 115),
    (66, 111), (53, 136), (67, 134), (52, 163), (77, 154), (58, 193), (88, 194), (123, 216),
)  # fmt: skip
"""Question and answer, in tokens of SmolLM2, of the 16 rows of GSM8K's training set that stand at
even ranks of its 7,473 rows by their sum (mean 185, longest 538)."""


class Watcher:
    """A silent `Progress`; calls back when a step is done."""

    def __init__(self, on_step: Callable[[StepView], None] | None = None) -> None:
        self._on_step = on_step

    def start(self, header: Header) -> None:
        """Say nothing."""

    def on_step(self, view: StepView) -> None:
        """Pass a step on; called between two steps, in the driver's loop."""
        if self._on_step is not None:
            self._on_step(view)

    def on_eval(self, view: EvalView) -> None:
        """Say nothing."""

    def on_event(self, text: str) -> None:
        """Say nothing."""

    def on_status(self, view: StatusView) -> None:
        """Say nothing."""

    def stop(self, summary: Summary | None = None, report: Path | None = None) -> None:
        """Say nothing."""


@dataclass(frozen=True)
class Finished:
    """A run that ended."""

    rows: list[dict[str, Any]]
    summary: Summary

    def between(self, skip: int) -> "Window":
        """From the end of step `skip` to the last step."""
        steps = [row for row in self.rows if row["kind"] == "step"]
        return Window(steps[skip:], steps[-1]["wall_s"] - steps[skip - 1]["wall_s"])


@dataclass(frozen=True)
class Window:
    """Consecutive steps of a run and the seconds they took together."""

    steps: list[dict[str, Any]]
    seconds: float

    def total(self, name: str) -> float:
        """Sum of a metric over the steps."""
        return float(sum(row.get(name) or 0.0 for row in self.steps))

    def mean(self, name: str) -> float:
        """Mean of a metric over the steps that have it."""
        values = [row[name] for row in self.steps if row.get(name) is not None]
        return float(statistics.fmean(values)) if values else 0.0


@contextmanager
def ray_session(num_cpus: int | None = None) -> Iterator[None]:
    """The Ray that all runs of a benchmark share.

    Args:
        num_cpus: What Ray shall believe there is, for several runs at once; None = what there is.
    """
    import ray

    from areal_ray.runtime.cluster import connect
    from areal_ray.runtime.run_config import ClusterConfig, DeadlinesConfig, SchedulerConfig

    connection = connect(ClusterConfig(num_cpus=num_cpus), SchedulerConfig(), DeadlinesConfig())
    try:
        yield
    finally:
        connection.close()
        assert not ray.is_initialized()


def run(
    recipe: str, overrides: Iterable[str], on_step: Callable[[StepView], None] | None = None
) -> Finished:
    """One run by `areal_ray.launch`, to its end."""
    return end_of(start(recipe, overrides, on_step))


def start(
    recipe: str, overrides: Iterable[str], on_step: Callable[[StepView], None] | None = None
) -> Any:
    """The handle of a run that has begun."""
    loaded = recipe_of(recipe, overrides)
    return areal_ray.launch(loaded, overwrite=True, progress=Watcher(on_step))


def end_of(handle: Any) -> Finished:
    """Wait for a run's end."""
    summary = handle.wait()
    return Finished(handle.metrics(), summary)


def recipe_of(recipe: str, overrides: Iterable[str]) -> Recipe:
    """A recipe of this repository with the overrides of every benchmark run, then these."""
    return load_recipe(ROOT / recipe, [*PLAIN, *overrides])


def median(values: Iterable[float]) -> float:
    """The median."""
    return float(statistics.median(values))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range as text."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def table(columns: Sequence[tuple[str, int]], rows: Iterable[Sequence[str]]) -> str:
    """Rows as text under (title, width); the first column begins at the left, the others end."""
    lines = [[title for title, _ in columns], *rows]
    return "\n".join(
        " ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, (_, width)) in enumerate(zip(line, columns, strict=True))
        )
        for line in lines
    )


def machine_load() -> str:
    """How busy the machine is, for beside the figures."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def options(
    description: str | None, arguments: Sequence[str] | None, **own: dict[str, Any]
) -> argparse.Namespace:
    """The options that every benchmark has, and its own: name and what argparse is told."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    for name, how in own.items():
        parser.add_argument(f"--{name}", **how)
    parser.add_argument("--quick", action="store_true", help="few, short rounds")
    parser.add_argument("--rounds", type=int, help="interleaved rounds, at least 5 for a figure")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args(arguments)


def finish(text: str, figures: Any, json_file: Path | None) -> None:
    """Print a table, and write the figures behind it if asked."""
    print(text)
    print(machine_load(), flush=True)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1), encoding="utf-8")
