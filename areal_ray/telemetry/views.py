"""What the driver shows a progress display, and the one line of text each makes."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A run as it starts."""

    name: str
    kind: str
    total_steps: int
    first_step: int = 0
    """Steps done before: a resumed run goes on from there."""
    folder: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else to show, in order: model, layout, objective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step, done."""

    step: int
    """Steps done, this one included."""
    version: int | None = None
    """None where nothing is published: such a run has steps alone."""
    step_s: float
    reward: float | None = None
    """None where the kind of run has none, or the step was skipped."""
    loss: float | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    staleness_bound: int | None = None
    """None = unlimited."""
    tokens_per_s: float | None = None
    queue_groups: int | None = None
    wait_s: float = 0.0
    """Seconds the learner waited in this step."""
    waited_for: str = "rollouts"
    skipped: bool = False
    """Nothing was trained on."""

    def line(self, total_steps: int = 0) -> str:
        """One plain line."""
        # A phase of supervised training may be prolonged beyond what was planned.
        of = f"/{max(total_steps, self.step)}" if total_steps else ""
        parts = [f"step {self.step:>{len(of) - 1 if of else 1}}{of}"]
        if self.version is not None:
            parts.append(f"v{self.version}")
        if self.skipped:
            parts.append("skipped (nothing to train on)")
        if self.reward is not None:
            parts.append(f"reward {self.reward:.3f}")
        if self.loss is not None and self.reward is None:  # of a policy it tells nothing
            parts.append(f"loss {self.loss:.4g}")
        if self.staleness_mean is not None:
            parts.append(f"staleness {self.staleness_mean:.1f} of {bound_text(self)}")
        parts.append(f"step {self.step_s:.1f} s")
        if self.tokens_per_s is not None:
            parts.append(f"{count_text(self.tokens_per_s)} tokens/s")
        if self.wait_s >= 0.05:
            parts.append(f"waited {self.wait_s:.1f} s for {self.waited_for}")
        return "  ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalView:
    """One evaluation, done."""

    step: int
    version: int | None = None
    """The one that was scored; None in a run that has steps alone."""
    accuracy: float
    episodes: int
    wall_s: float = 0.0
    unit: str = "tasks"
    """Of what `episodes` counts."""
    is_alone: bool = False
    """Whether the model is all there is to it: no step led there, no version was published."""

    def line(self) -> str:
        """One plain line."""
        where = f" at step {self.step}" if self.version is None else f" at v{self.version}"
        if self.is_alone:
            where = ""
        return (
            f"held-out accuracy {self.accuracy:.3f}{where}  "
            f"({self.episodes} {self.unit}, {self.wall_s:.1f} s)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusView:
    """What goes on between two steps."""

    waits: Mapping[str, str] = field(default_factory=dict)
    """What each role waits for: `WaitBoard.by_role()`."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Such as groups running, groups queued, turns being sampled."""

    def line(self) -> str:
        """One plain line."""
        waits = "; ".join(f"{role} waits for {what}" for role, what in self.waits.items())
        counts = ", ".join(f"{name} {number:,}" for name, number in self.counts.items())
        return "; ".join(part for part in (waits, counts) if part) or "nothing to report yet"


def bound_text(view: StepView) -> str:
    """The staleness bound as a word."""
    return "unlimited" if view.staleness_bound is None else str(view.staleness_bound)


def count_text(number: float) -> str:
    """A count in at most four characters: 940, 7.4k, 12k, 1.3M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            scaled = number / size
            return f"{scaled:.1f}{suffix}" if scaled < 9.95 else f"{scaled:.0f}{suffix}"
    return f"{number:.0f}"


def duration_text(seconds: float) -> str:
    """Seconds as people say them: 8.4 s, 1 min 05 s, 2 h 07 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
