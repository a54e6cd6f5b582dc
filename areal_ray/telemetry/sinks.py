"""Where rows go: metrics.jsonl, TensorBoard, and any sink that the runtime adds."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, Protocol

from pydantic import Field

from areal_ray.core.config import Config
from areal_ray.core.storage import writing
from areal_ray.telemetry.metrics import MetricRegistry
from areal_ray.telemetry.names import METRICS
from areal_ray.telemetry.rows import Row, RowKind, keep_rows_through
from areal_ray.telemetry.strict_json import dumps_strict

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class TelemetryConfig(Config):
    """What a run tells, and where."""

    tensorboard: bool = True
    """Also write event files to tensorboard/ in the run folder."""
    ray_metrics: bool = True
    """Also set gauges in ray.util.metrics, for the dashboard and Prometheus."""
    console: Literal["auto", "live", "lines", "off"] = "auto"
    """`live` redraws a table, `lines` prints a line a step; `auto` is live on a terminal."""
    heartbeat_s: float = Field(15.0, gt=0.0)
    """Say what is awaited when nothing else was printed for so long; the same again after twice as
    long, and so on up to an hour."""
    dump_every_steps: int = Field(10, ge=0)
    """Write sample episodes of the first, last and every such step; 0 = never."""
    dump_groups: int = Field(2, ge=1)
    """Groups written in such a step."""
    mismatch_alarm_nats: float | None = Field(0.02, gt=0.0)
    """Say so when mismatch/kl_nats exceeds it; null = never."""
    probe_alarm_nats: float | None = Field(0.2, gt=0.0)
    """Say so when publish/probe_mean_nats exceeds it, which sees engine and learner disagree at
    any staleness; null = never."""


class Sink(Protocol):
    """Takes rows, in order."""

    def write(self, row: Row) -> None:
        """Take one row."""

    def close(self) -> None:
        """Make sure that what was written stays."""


class JsonlSink:
    """metrics.jsonl: a line a row, flushed, so that a reader beside the run sees whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")

    def write(self, row: Row) -> None:
        """Append one line."""
        with writing(self._path):
            self._file.write(dumps_strict(row.to_json()).encode() + b"\n")
            self._file.flush()

    def close(self) -> None:
        """Force the file to disk."""
        if not self._file.closed:
            with writing(self._path):
                os.fsync(self._file.fileno())
                self._file.close()


class TensorBoardSink:
    """Event files by the `tensorboard` package alone: the driver need not load torch for it."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = folder
        with writing(folder):
            self._writer = EventFileWriter(str(folder))
        if resume_step is not None:
            self._forget_after(resume_step)

    def write(self, row: Row) -> None:
        """Add a point to each metric's curve; values that are not numbers have none."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.values.items()
            if value is not None
        ]
        summary = Summary(value=points)
        with writing(self._folder):
            self._writer.add_event(Event(step=row.step, wall_time=time.time(), summary=summary))
            self._writer.flush()

    def close(self) -> None:
        """Flush and end the writer's thread."""
        with writing(self._folder):
            self._writer.close()

    def _forget_after(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)  # readers drop points from this step on
        self._writer.add_event(Event(step=step + 1, wall_time=time.time(), session_log=start))


class MetricLog:
    """The one place a run logs to: checks names and order, keeps the clock, feeds every sink."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        registry: MetricRegistry = METRICS,
        last_step: int = 0,
        elapsed_s: float = 0.0,
    ) -> None:
        self._sinks = list(sinks)
        self._registry = registry
        self._last: dict[RowKind, int] = {"step": last_step, "eval": last_step if last_step else -1}
        self._began = time.monotonic() - elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Wall time of the run so far, time between a crash and its resumption left out."""
        return time.monotonic() - self._began

    def log(
        self,
        step: int,
        version: int,
        values: Mapping[str, float | None],
        *,
        kind: RowKind = "step",
    ) -> Row:
        """Write one row; returns it.

        Raises:
            KeyError: A name is not declared.
            ValueError: The step was logged already.
        """
        for name in values:
            _ = self._registry[name]
        if step <= self._last[kind]:
            raise ValueError(
                f"{kind} row of step {step}: step {self._last[kind]} was logged already; "
                "rows must come in order, each step once"
            )
        self._last[kind] = step
        row = Row(step, version, self.elapsed_s, dict(values), kind)
        for sink in self._sinks:
            sink.write(row)
        return row

    def close(self) -> None:
        """Close every sink.

        Raises:
            StorageError: One did not take its last rows; the others are closed all the same.
        """
        with ExitStack() as closing:
            for sink in reversed(self._sinks):
                closing.callback(sink.close)


def open_metric_log(
    folder: Path,
    config: TelemetryConfig,
    *,
    resume_step: int | None = None,
    extra_sinks: Sequence[Sink] = (),
) -> MetricLog:
    """The log of a run folder.

    Args:
        resume_step: Steps done at the checkpoint to go on from; later rows are forgotten.
            None starts anew: rows of an earlier run in this folder are forgotten too.
        extra_sinks: Sinks made by the runtime, such as `runtime.ray_metrics.RayMetricsSink`.
    """
    with writing(folder / METRICS_FILE):
        last = keep_rows_through(folder / METRICS_FILE, -1 if resume_step is None else resume_step)
    sinks: list[Sink] = [JsonlSink(folder / METRICS_FILE)]
    if config.tensorboard:
        sinks.append(TensorBoardSink(folder / TENSORBOARD_FOLDER, resume_step=resume_step))
    elapsed_s = float(last["wall_s"]) if last else 0.0
    return MetricLog([*sinks, *extra_sinks], last_step=resume_step or 0, elapsed_s=elapsed_s)
