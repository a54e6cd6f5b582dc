"""Supervised fine-tuning: its examples and its recipe section; no torch.

The driver of `kind: sft` reads the phases; the train engine takes the examples.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from areal_ray.core.config import Config


@dataclass(frozen=True, slots=True)
class SftExample:
    """One tokenized conversation."""

    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T] True on tokens to learn. Each unbroken run of True is a *span*, counted from 0."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.loss_mask):
            raise ValueError(
                f"SftExample: loss_mask has {len(self.loss_mask)} entries, token_ids has "
                f"{len(self.token_ids)}; they must match"
            )

    @property
    def span_ids(self) -> NDArray[np.int32]:
        """[T] number of the span a token belongs to; -1 outside."""
        starts = self.loss_mask & ~np.concatenate([[False], self.loss_mask[:-1]])
        return np.where(self.loss_mask, np.cumsum(starts) - 1, -1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class SftEvaluation:
    """How well held-out examples are reproduced, each token given the true ones before it."""

    num_examples: int
    loss: float
    """Mean negative log-prob of a trained token, in nats."""
    token_accuracy: float
    """Share of trained tokens that are the model's first choice."""
    exact_match: float
    """Share of examples whose trained tokens are all the first choice: a greedy decode of each
    span would reproduce it."""
    span_exact_match: tuple[float, ...]
    """The same for span 0, 1, ... alone, over the examples that have it."""

    def match_of(self, span: int | None) -> float:
        """Exact match of one span, or of whole examples; 0 where no example has the span."""
        if span is None:
            return self.exact_match
        return self.span_exact_match[span] if span < len(self.span_exact_match) else 0.0


class SftUntil(Config):
    """A phase goes on until held-out examples are reproduced."""

    exact_match: float = Field(ge=0.0, le=1.0)
    """Share of held-out examples that must be reproduced token for token (teacher-forced)."""
    span: int | None = Field(None, ge=0)
    """Count this trained span alone (0 = the first assistant turn); null = whole examples."""
    source: str | None = None
    """Held-out examples, 'module:function'; null = the phase's own source."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `source`."""
    num_examples: int = Field(128, ge=1)
    """Held-out examples looked at."""
    every_steps: int = Field(10, ge=1)
    """Steps between two looks."""


class SftPhase(Config):
    """One stretch of training on one source."""

    source: str
    """'module:function' that yields conversations."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `source`."""
    steps: int = Field(ge=1)
    """Optimizer updates; with `until` the fewest."""
    batch_size: int = Field(ge=1)
    """Conversations an update, over all ranks."""
    max_tokens: int | None = Field(None, ge=2)
    """Longer conversations are left out, and counted; null = none, and one that is longer than
    the model allows ends the run by its row."""
    until: SftUntil | None = None
    """Go on beyond `steps` while this does not hold."""
    max_steps: int | None = Field(None, ge=1)
    """Updates at most, whether `until` holds or not; required with it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.until is not None and self.max_steps is None:
            raise ValueError(
                "max_steps: is missing beside until; a phase must end some time. Give a number."
            )
        if self.until is None and self.max_steps is not None:
            raise ValueError(
                f"max_steps: is {self.max_steps} without until; it has no effect. "
                "Remove it or add until."
            )
        if self.max_steps is not None and self.max_steps < self.steps:
            raise ValueError(
                f"max_steps: is {self.max_steps}; must be >= steps = {self.steps}. Raise it."
            )
        return self

    def is_finished(self, steps_taken: int, evaluation: SftEvaluation | None) -> bool:
        """Whether the phase ends after `steps_taken`, given the last look at held-out examples."""
        if steps_taken < self.steps:
            return False
        if self.until is None or self.max_steps is None or steps_taken >= self.max_steps:
            return True
        if evaluation is None:
            return False
        return evaluation.match_of(self.until.span) >= self.until.exact_match

    def described(self, seen: SftEvaluation) -> str:
        """What a look at held-out examples found, in words."""
        assert self.until is not None, "a phase without `until` is not looked at"
        reached, wanted = seen.match_of(self.until.span), self.until.exact_match
        return f"exact match {reached:.2f} held out, {wanted:g} wanted"

    def is_look_due(self, steps_taken: int) -> bool:
        """Whether held-out examples decide now if the phase goes on."""
        if self.until is None or steps_taken < self.steps:
            return False
        return (steps_taken - self.steps) % self.until.every_steps == 0


class OfflineDistillationConfig(Config):
    """What a teacher says of given conversations, token by token (arXiv:1503.02531)."""

    top_k: int | None = Field(64, ge=1)
    """The teacher's likeliest tokens at each place, all others together; null = each one."""
    direction: Literal["forward", "reverse"] = "forward"
    """forward: KL(teacher || student), covers all that the teacher would say. reverse: the other
    way round, seeks one way to say it."""
    temperature: float = Field(1.0, gt=0.0)
    """Divides both models' logits."""
    answer_weight: float = Field(0.0, ge=0.0)
    """Of the ordinary loss on the given tokens, added to the KL."""


class SftConfig(Config):
    """The phases of a run on given conversations, one after the other."""

    phases: tuple[SftPhase, ...] = Field(min_length=1)
    """At least one."""
    distillation: OfflineDistillationConfig | None = None
    """Of kind distill: how to learn from the teacher; null = as its defaults say."""

    @property
    def planned_steps(self) -> int:
        """Steps without any extension: what a learning-rate schedule spans."""
        return sum(phase.steps for phase in self.phases)
