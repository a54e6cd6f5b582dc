"""What a run says while it goes: one plain line an event here, a live table in `live.py`.

The driver calls a `Progress`; a thread of the display's own speaks up when nothing was said for
`heartbeat_s`, so that a slow rollout does not look like a hang. What would only be repeated is said
at ever longer intervals: the log of a service that nobody calls stays short.
"""

import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TextIO

from areal_ray.telemetry.closing import closing_lines
from areal_ray.telemetry.history import RunHistory
from areal_ray.telemetry.sinks import TelemetryConfig
from areal_ray.telemetry.summary import Summary
from areal_ray.telemetry.terminal import printable
from areal_ray.telemetry.views import (
    EvalView,
    Header,
    StatusView,
    StepView,
    duration_text,
)

_BETWEEN_STEPS_S = 0.5
"""Faster steps share a line: metrics.jsonl has them all."""
_LONGEST_QUIET_S = 3600.0
_AGE = re.compile(r", \d+ s\b")
"""How long the oldest group has been where it is: that alone is no news."""


class Progress(Protocol):
    """Shows one run. Every method returns at once and may be called from any thread."""

    def start(self, header: Header) -> None:
        """The run begins."""

    def on_step(self, view: StepView) -> None:
        """A step is done."""

    def on_eval(self, view: EvalView) -> None:
        """An evaluation is done."""

    def on_event(self, text: str) -> None:
        """Something happened that the user should read, such as an actor that was replaced."""

    def on_status(self, view: StatusView) -> None:
        """What goes on between two steps; cheap, call it about once a second."""

    def stop(self, summary: Summary | None = None, report: Path | None = None) -> None:
        """The run is over; shows what it came to. A second call does nothing."""


class LineProgress:
    """One plain line an event: pipes, job logs, notebooks."""

    def __init__(
        self,
        stream: TextIO,
        *,
        heartbeat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._heartbeat_s = self._quiet_s = heartbeat_s
        self._repeated = ""
        self._clock = clock
        self._said_at = clock()
        self._since, self._since_s = "the start", clock()
        self._next_step_at = clock()
        self._status = StatusView()
        self._history: RunHistory | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._closed = False

    def start(self, header: Header) -> None:
        """The run begins."""
        self._history = RunHistory(header, self._clock)
        steps = f": {header.total_steps} steps" if header.total_steps else ""
        self._say(f"{header.name} ({header.kind}){steps}")
        for name, text in header.facts.items():
            self._say(f"  {name:<10} {text}")
        if header.first_step:
            self._say(f"  resumed    at step {header.first_step}")
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def on_step(self, view: StepView) -> None:
        """A step is done."""
        total, eta = 0, ""
        if self._history is not None:
            self._history.add_step(view)
            total = self._history.header.total_steps
            left_s = self._history.eta_s
            eta = f"  eta {duration_text(left_s)}" if left_s else ""
        now = self._clock()
        self._since, self._since_s = f"step {view.step}", now
        if now >= self._next_step_at or view.step == total or view.skipped:
            self._next_step_at = now + _BETWEEN_STEPS_S
            self._say(view.line(total) + eta)

    def on_eval(self, view: EvalView) -> None:
        """An evaluation is done."""
        if self._history is not None:
            self._history.add_eval(view)
        self._say(view.line())

    def on_event(self, text: str) -> None:
        """Something happened that the user should read."""
        self._say(text)

    def on_status(self, view: StatusView) -> None:
        """What the next heartbeat line will tell."""
        self._status = view

    def stop(self, summary: Summary | None = None, report: Path | None = None) -> None:
        """The run is over; says what it came to."""
        if self._closed:
            return
        self._closed = True
        self._stopped.set()
        if summary is None:
            return
        history = self._history
        curves = (history.rewards, history.evals) if history else ([], [])
        ascii_only = not can_show(self._stream, chr(0x28FF))
        for line in closing_lines(summary, *curves, report=report, ascii_only=ascii_only):
            self._say(line)

    def beat(self) -> None:
        """Say what is awaited, if nothing was said for `heartbeat_s`."""
        now = self._clock()
        told = self._status.line()
        news = _AGE.sub("", told)
        wait_s = self._quiet_s if news == self._repeated else self._heartbeat_s
        if now - self._said_at >= wait_s:
            passed = duration_text(now - self._since_s)
            self._say(f"  {passed} since {self._since}: {told}")
            self._repeated = news
            self._quiet_s = max(self._heartbeat_s, min(2 * wait_s, _LONGEST_QUIET_S))

    def _beat(self) -> None:
        while not self._stopped.wait(min(1.0, self._heartbeat_s / 4)):
            self.beat()

    def _say(self, line: str) -> None:
        with self._lock:
            self._stream.write(printable(line) + "\n")
            self._stream.flush()
            self._said_at = self._clock()
            self._quiet_s = self._heartbeat_s


class QuietProgress:
    """Says nothing."""

    def start(self, header: Header) -> None:
        """Nothing."""

    def on_step(self, view: StepView) -> None:
        """Nothing."""

    def on_eval(self, view: EvalView) -> None:
        """Nothing."""

    def on_event(self, text: str) -> None:
        """Nothing."""

    def on_status(self, view: StatusView) -> None:
        """Nothing."""

    def stop(self, summary: Summary | None = None, report: Path | None = None) -> None:
        """Nothing."""


def can_show(stream: TextIO, text: str) -> bool:
    """Whether the stream's encoding has these characters."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def open_progress(config: TelemetryConfig, stream: TextIO | None = None) -> Progress:
    """The display that the recipe asks for; `auto` is the live table on a terminal."""
    stream = stream or sys.stdout
    if config.console == "off":
        return QuietProgress()
    if config.console == "lines" or (config.console == "auto" and not stream.isatty()):
        return LineProgress(stream, heartbeat_s=config.heartbeat_s)
    from areal_ray.telemetry.live import LiveProgress  # rich is not free to import

    return LiveProgress(stream, quiet_s=config.heartbeat_s)
