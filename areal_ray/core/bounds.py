"""Bounds that new weights have to keep before anybody samples from them: the arithmetic alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from areal_ray.core.config import Config

KL_METRIC = "learner/kl_reference_nats"
"""What max_kl_nats is compared with."""


class GateConfig(Config):
    """What weights must score on the held-out tasks of the section evaluation."""

    metric: Literal["accuracy"] = "accuracy"
    """Share of held-out episodes with a reward of 1 or more."""
    min: float | None = Field(None, ge=0.0, le=1.0)
    """Lowest score; null = none."""
    max_drop: float | None = Field(None, ge=0.0, le=1.0)
    """How far below the last good version's score it may lie; null = anywhere."""
    every_steps: int = Field(1, ge=1)
    """Judge what every so many steps made, and what the last made. Those between are promoted
    unjudged, and a roll-back undoes them as well."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min is None and self.max_drop is None:
            raise ValueError("gate: has neither min nor max_drop, so all would pass. Set one")
        return self

    def is_due(self, step: int, last_step: int) -> bool:
        """Whether what `step` made is judged."""
        return step == last_step or step % self.every_steps == 0

    def refusal(self, score: float, good: float | None) -> str:
        """Why weights of this score are not promoted; empty where they are.

        Args:
            score: Fraction.
            good: Of the last good version; None = unknown.
        """
        if self.min is not None and score < self.min:
            return f"held-out {self.metric} is {score:.3f}; bounds.gate.min is {self.min:g}"
        # A tolerance for what two equal shares lose in the subtraction.
        if self.max_drop is not None and good is not None and good - score > self.max_drop + 1e-9:
            return (
                f"held-out {self.metric} is {score:.3f}, that of the last good version {good:.3f}; "
                f"bounds.gate.max_drop is {self.max_drop:g}"
            )
        return ""


class BoundsConfig(Config):
    """What has to hold before weights are promoted, and what happens where it does not."""

    min_rewarded_sessions: int = Field(0, ge=0)
    """Episodes with a reward that wait, the step's own included, before a step begins."""
    max_kl_nats: float | None = Field(None, gt=0.0)
    """Cap on learner/kl_reference_nats, the estimated KL from the starting model. A step measures
    it on the weights that it began with, so it is seen one step late and undone to before."""
    gate: GateConfig | None = None
    """Held-out evaluation before a version is promoted; null = none."""
    on_refusal: Literal["roll_back", "stop"] = "roll_back"
    """roll_back: the last good weights and optimizer come back and are published under the next
    version, and the run goes on. stop: the run ends; the fleet never sampled from what was
    refused."""
    max_refusals: int = Field(5, ge=1)
    """Refusals in a row that end the run."""

    @property
    def judges(self) -> bool:
        """Whether anything is to be judged before a version is promoted."""
        return self.gate is not None or self.max_kl_nats is not None

    def kl_refusal(self, metrics: Mapping[str, float]) -> str:
        """Why the weights that a step began with are too far off; empty where they are not."""
        kl = metrics.get(KL_METRIC)
        if self.max_kl_nats is None or kl is None or kl <= self.max_kl_nats:
            return ""  # a step without an update has measured nothing
        told = f"{kl:.4g}" if math.isfinite(kl) else "not finite"
        return f"KL from the reference model is {told}; bounds.max_kl_nats is {self.max_kl_nats:g}"


@dataclass(frozen=True, slots=True)
class GoodVersion:
    """Weights that kept the bounds."""

    version: int
    score: float | None = None
    """Of the gate; None = not judged."""


class GoodVersions:
    """Which weights a run may go back to, and which of them the learner's present ones come from.

    Two are known at most: the newest may yet turn out to be too far from the starting model.
    """

    def __init__(self, first: GoodVersion) -> None:
        self._known = [first]
        self._live: int | None = first.version

    @property
    def newest(self) -> GoodVersion:
        """Where a roll-back leads."""
        return self._known[-1]

    def promote(self) -> None:
        """What the step made is in force, unjudged."""
        self._live = None

    def keep(self, good: GoodVersion) -> None:
        """What the step made is in force, and good."""
        self._known = [self._known[-1], good]
        self._live = good.version

    def disown(self) -> int | None:
        """The weights that the step began with broke a bound: if they counted as good, they do no
        more. Their version then; None where they did not count, or nothing is before them."""
        if self._live != self.newest.version or len(self._known) == 1:
            return None
        return self._known.pop().version

    def go_back(self) -> GoodVersion:
        """The learner has the newest good weights again."""
        self._live = self.newest.version
        return self.newest
