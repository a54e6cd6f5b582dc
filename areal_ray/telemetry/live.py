"""The live table of a run on a terminal, drawn with rich."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_ray.telemetry.closing import closing_lines
from areal_ray.telemetry.history import RunHistory
from areal_ray.telemetry.plot import Point, sparkline
from areal_ray.telemetry.summary import Summary
from areal_ray.telemetry.terminal import printable
from areal_ray.telemetry.views import (
    EvalView,
    Header,
    StatusView,
    StepView,
    bound_text,
    count_text,
    duration_text,
)

_SPARK = 18
_WIDEST = 110


class LiveProgress:
    """Redraws one table; events stay above it, the summary replaces it at the end."""

    def __init__(
        self,
        stream: TextIO,
        *,
        quiet_s: float,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(file=stream, highlight=False, soft_wrap=False)
        self._quiet_s = quiet_s
        self._clock = clock
        self._history: RunHistory | None = None
        self._status = StatusView()
        self._changed_at = clock()
        self._live: Live | None = None
        self._lock = threading.Lock()

    def start(self, header: Header) -> None:
        """The run begins."""
        for name, text in header.facts.items():
            self._console.print(Text.assemble((f"{name:<10} ", "dim"), printable(text)))
        with self._lock:
            self._history = RunHistory(header, self._clock)
            self._changed_at = self._clock()
            self._live = Live(
                get_renderable=self._draw,
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
        self._live.start()

    def on_step(self, view: StepView) -> None:
        """A step is done."""
        if self._history is not None:
            self._history.add_step(view)
        self._changed_at = self._clock()

    def on_eval(self, view: EvalView) -> None:
        """An evaluation is done."""
        if self._history is not None:
            self._history.add_eval(view)
        self._changed_at = self._clock()

    def on_event(self, text: str) -> None:
        """Print a line that stays above the table."""
        self._console.print(Text(printable(text)))

    def on_status(self, view: StatusView) -> None:
        """What the table's lower half shows."""
        self._status = view

    def stop(self, summary: Summary | None = None, report: Path | None = None) -> None:
        """The run is over; the summary takes the table's place."""
        with self._lock:
            live, self._live = self._live, None
        if live is None:
            return
        live.stop()
        if summary is not None and self._history is not None:
            self._console.print(self._closing(summary, self._history, report))

    def _closing(self, summary: Summary, history: RunHistory, report: Path | None) -> Panel:
        width = min(self._console.width, _WIDEST)
        lines = closing_lines(
            summary,
            history.rewards,
            history.evals,
            report=report,
            width=width - 6,
            ascii_only=self._is_ascii,
        )
        colour = {"finished": "green", "stopped": "yellow", "failed": "red"}[summary.outcome]
        lines = [printable(line) for line in lines]
        text = Text("\n".join(lines[1:]).strip("\n"), no_wrap=False)
        title = Text(f" {lines[0]} ", style=f"bold {colour}")
        return Panel(text, title=title, title_align="left", border_style=colour, padding=(1, 2),
                     width=width)  # fmt: skip

    @property
    def _is_ascii(self) -> bool:
        return not self._console.encoding.lower().startswith("utf")

    def _draw(self) -> Panel | Text:
        history = self._history
        if history is None:
            return Text("")
        header = history.header
        width = min(self._console.width, _WIDEST)
        parts: list[Table | Text] = [self._bar(history), Text("")]
        parts.append(self._numbers(history))
        if self._status.waits or self._status.counts:
            parts += [Text(""), self._waits()]
        title = Text.assemble((f" {printable(header.name)} ", "bold"), (f"{header.kind} ", "dim"))
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim",
                     padding=(1, 2), width=width)  # fmt: skip

    def _bar(self, history: RunHistory) -> Table:
        total = history.header.total_steps
        eta = history.eta_s
        left = f"about {duration_text(eta)} left" if eta else ""
        if history.last is None:
            left = "first step under way"
        bar = Table.grid(expand=True, padding=(0, 2))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True, justify="right")
        bar.add_row(
            Text(f"step {history.steps_done} of {total}", style="bold"),
            ProgressBar(total=total, completed=history.steps_done, complete_style="cyan"),
            Text(f"{duration_text(history.elapsed_s)}  {left}".strip(), style="dim"),
        )
        return bar

    def _numbers(self, history: RunHistory) -> Table:
        view = history.last
        table = Table.grid(expand=True, padding=(0, 2))
        for ratio in (0, 3, 0, 2):
            table.add_column(ratio=ratio or None, no_wrap=True)
        is_scored = view is None or view.reward is not None or view.loss is None
        learnt = self._curve(history.rewards, "{:.3f}" if is_scored else "{:.4g}")
        stale = "-"
        if view is not None and view.staleness_mean is not None:
            highest = "" if view.staleness_max is None else f", max {view.staleness_max}"
            stale = f"{view.staleness_mean:.1f}{highest} of {bound_text(view)}"
        rows = [
            ("reward" if is_scored else "loss", learnt, "version", _or_dash(view and view.version)),
            ("held-out", self._curve(history.evals, "{:.3f}"), "staleness", Text(stale)),
            (
                "tokens/s",
                _or_dash(count_text(view.tokens_per_s) if view and view.tokens_per_s else None),
                "queue",
                _or_dash(f"{view.queue_groups} groups" if view and view.queue_groups is not None
                         else None),
            ),
        ]  # fmt: skip
        for left, left_value, right, right_value in rows:
            table.add_row(
                Text(left, style="dim"), left_value, Text(right, style="dim"), right_value
            )
        return table

    def _curve(self, points: list[Point], form: str) -> Text:
        if not points:
            return Text("-", style="dim")
        values = [y for _, y in points]
        drawn = sparkline(values, _SPARK, ascii_only=self._is_ascii) if len(values) > 1 else ""
        return Text.assemble((form.format(values[-1]), "bold"), "  ", (drawn, "cyan"))

    def _waits(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="ellipsis", no_wrap=True)
        for role, what in self._status.waits.items():
            table.add_row(Text(role, style="dim"), Text(printable(f"waits for {what}")))
        counts = ", ".join(f"{number:,} {name}" for name, number in self._status.counts.items())
        if counts:
            table.add_row(Text("now", style="dim"), Text(printable(counts)))
        quiet_s = self._clock() - self._changed_at
        has_steps = self._history is not None and self._history.header.total_steps
        if has_steps and quiet_s >= self._quiet_s:
            text = f"nothing finished for {duration_text(quiet_s)}; the run goes on"
            table.add_row(Text("quiet", style="yellow"), Text(text))
        return table


def _or_dash(value: object) -> Text:
    return Text("-", style="dim") if value is None else Text(str(value), style="bold")
