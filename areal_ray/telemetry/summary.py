"""summary.json: what a run came to, written once at its end, whatever the end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from areal_ray.core.storage import replace_text
from areal_ray.telemetry.rows import read_rows
from areal_ray.telemetry.sinks import METRICS_FILE
from areal_ray.telemetry.strict_json import dumps_strict

SUMMARY_FILE = "summary.json"

RunOutcome = Literal["finished", "stopped", "failed"]
"""finished = ran its last step; stopped = Ctrl-C or `stop()`; failed = ended by an error."""


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """One evaluation on held-out tasks."""

    step: int
    version: int
    accuracy: float | None
    """Fraction of the episodes asked for that got the full reward."""
    reward: float | None
    episodes: int


@dataclass(frozen=True, slots=True)
class EvalSummary:
    """Held-out accuracy: before the first step, at the last evaluation, and all of them."""

    before: float | None = None
    after: float | None = None
    curve: tuple[EvalPoint, ...] = ()


@dataclass(frozen=True, slots=True)
class RewardSummary:
    """Mean sampled reward of the first and last steps (a tenth of the run each, at most 5)."""

    first: float | None = None
    last: float | None = None


@dataclass(frozen=True, slots=True)
class StalenessSummary:
    """Learner version - oldest behaviour version that was trained on, over trained groups.

    Tokens that `at_consumption: mask` keeps out do not count, nor do groups that had no others.
    """

    max: int | None = None
    mean: float | None = None
    histogram: Mapping[str, int] = field(default_factory=dict)
    """Trained groups by staleness in versions (JSON keys are text)."""
    bound: int | None = None
    """None = unlimited."""


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """Groups by ending; admitted is the sum of the others."""

    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    failed: int = 0
    in_flight: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Dropped and failed groups by reason."""


@dataclass(frozen=True, slots=True)
class TokensSummary:
    """Tokens the policy sampled, and those that entered the loss."""

    sampled: int = 0
    trained: int = 0


@dataclass(frozen=True, slots=True)
class PublishSummary:
    """Weight updates of the rollout fleet."""

    count: int = 0
    differing: int = 0
    """Times that a replica swapped and did not sample from the learner's weights."""
    mean_s: float | None = None
    engine_idle_s: float | None = None
    """Mean seconds a replica stood still for one publish."""


@dataclass(frozen=True, slots=True)
class DriverSummary:
    """What the driver process cost."""

    cpu_s: float = 0.0
    bytes_per_trajectory: float | None = None
    trajectories: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run in numbers."""

    name: str
    kind: str
    outcome: RunOutcome
    failure: str = ""
    """Why it failed: the first cause, as the user should read it."""
    steps: int
    """Steps done."""
    planned_steps: int
    version: int | None
    """The last one published; None in a run that has steps alone."""
    wall_s: float
    seed: int
    eval: EvalSummary = EvalSummary()
    reward: RewardSummary = RewardSummary()
    staleness: StalenessSummary = StalenessSummary()
    ledger: LedgerSummary = LedgerSummary()
    tokens: TokensSummary = TokensSummary()
    publish: PublishSummary = PublishSummary()
    driver: DriverSummary = DriverSummary()
    replaced: tuple[str, ...] = ()
    """Actors that died and were replaced, one line each."""
    publish_events: tuple[str, ...] = ()
    """Replicas that a publish set aside or took back, one line each."""
    scaled: tuple[str, ...] = ()
    """Numbers of actors that were changed while it went on, one line each."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


_ALWAYS_THERE = {"outcome", "steps", "planned_steps", "version", "wall_s"}


def write_summary(folder: Path, summary: Summary) -> Path:
    """Write summary.json, whole or not at all.

    Raises:
        StorageError: The disk did not take it.
    """
    path = folder / SUMMARY_FILE
    replace_text(path, dumps_strict(summary.to_json(), indent=2) + "\n")
    return path


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The summary of a run, or None while it has none that can be read."""
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_whole = isinstance(summary, dict) and summary.keys() >= _ALWAYS_THERE
    return summary if is_whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """What the rows of a run do not hold: the driver tells it at the end."""

    name: str
    kind: str
    outcome: RunOutcome
    planned_steps: int
    version: int | None
    wall_s: float
    seed: int
    failure: str = ""
    staleness_bound: int | None = None
    staleness_histogram: Mapping[int, int] = field(default_factory=dict)
    """Trained groups by staleness in versions."""
    ledger: LedgerSummary = LedgerSummary()
    replaced: tuple[str, ...] = ()
    publish_events: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()


def summarize(folder: Path, end: RunEnd) -> Summary:
    """The summary of a run folder from its rows and its end."""
    rows = read_rows(folder / METRICS_FILE)
    steps = [row for row in rows if row["kind"] == "step"]
    counts = end.staleness_histogram
    groups = sum(counts.values())
    trajectories = int(_total(steps, "agent/episodes"))
    publishes = int(_total(steps, "publish/count_publishes"))
    return Summary(
        **{f.name: getattr(end, f.name) for f in fields(end) if not f.name.startswith("staleness")},
        steps=steps[-1]["step"] if steps else 0,
        eval=_eval_summary([row for row in rows if row["kind"] == "eval"]),
        reward=_reward_summary([row.get("reward/mean") for row in steps]),
        staleness=StalenessSummary(
            max=max(counts, default=None),
            mean=sum(k * n for k, n in counts.items()) / groups if groups else None,
            histogram={str(k): counts[k] for k in sorted(counts)},
            bound=end.staleness_bound,
        ),
        tokens=TokensSummary(
            sampled=int(_total(steps, "rollout/sampled_tokens")),
            trained=int(_total(steps, "learner/trained_tokens")),
        ),
        publish=PublishSummary(
            count=publishes,
            differing=int(_total(steps, "publish/differing_replicas")),
            mean_s=_mean([row.get("publish/wall_s") for row in steps]),
            engine_idle_s=_mean([row.get("publish/engine_idle_s") for row in steps]),
        ),
        driver=DriverSummary(
            cpu_s=round(_total(steps, "driver/cpu_s"), 3),
            bytes_per_trajectory=(
                _total(steps, "driver/bytes") / trajectories if trajectories else None
            ),
            trajectories=trajectories,
        ),
    )


def _eval_summary(rows: Sequence[Mapping[str, Any]]) -> EvalSummary:
    curve = tuple(
        EvalPoint(
            step=row["step"],
            version=row["version"],
            accuracy=row.get("eval/accuracy_fraction"),
            reward=row.get("eval/reward_mean"),
            episodes=int(row.get("eval/episodes") or 0),
        )
        for row in rows
    )
    before = next((point.accuracy for point in curve if point.step == 0), None)
    return EvalSummary(before, curve[-1].accuracy if curve else None, curve)


def _reward_summary(rewards: Sequence[float | None]) -> RewardSummary:
    width = min(5, max(1, len(rewards) // 10))
    return RewardSummary(_mean(rewards[:width]), _mean(rewards[-width:]) if rewards else None)


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(row.get(name) or 0.0 for row in rows))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
