"""How a server bore a load, as a table on a terminal."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_ray.telemetry.terminal import printable


@dataclass(frozen=True, slots=True)
class LoadTable:
    """What is shown."""

    title: str
    times_ms: Mapping[str, tuple[float, float, float] | None]
    """Name -> p50, p95, p99; None = not measured."""
    facts: Mapping[str, str]
    errors: Mapping[str, int]


def print_load(shown: LoadTable, stream: TextIO) -> None:
    """Draw it."""
    console = Console(file=stream, highlight=False)
    console.print(Text(printable(shown.title)), soft_wrap=True)
    table = Table()
    table.add_column("")
    for name in ("p50", "p95", "p99"):
        table.add_column(f"{name}, ms", justify="right")
    for name, times in shown.times_ms.items():
        table.add_row(name, *(f"{time:,.2f}" for time in times) if times else ("-",) * 3)
    console.print(table)
    for name, text in shown.facts.items():
        console.print(Text(printable(f"{name:<20} {text}")))
    for kind, count in shown.errors.items():
        console.print(Text(printable(f"error: {count:,} x {kind}")), soft_wrap=True)
