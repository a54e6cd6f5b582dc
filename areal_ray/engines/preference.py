"""Learning from pairs: their form and their recipe section; no torch.

The driver of `kind: dpo` and `kind: reward_model` reads the section; the train engine takes the
pairs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from areal_ray.core.config import Config
from areal_ray.engines.sft import SftExample


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two tokenized answers to one prompt; each mask is True on the answer, its end included."""

    chosen: SftExample
    """The better one."""
    rejected: SftExample
    """The worse one."""


@dataclass(frozen=True, slots=True)
class PairEvaluation:
    """How well held-out pairs are told apart, over all ranks."""

    num_pairs: int
    loss: float
    accuracy: float
    """Share of pairs whose better answer has the larger reward; a tie is half."""
    margin: float
    """Mean reward of the better answer less that of the worse."""
    seconds: float = 0.0

    def metrics(self) -> dict[str, float]:
        """The row of this look."""
        return {
            "eval/accuracy_fraction": self.accuracy,
            "eval/pairs": float(self.num_pairs),
            "eval/loss": self.loss,
            "eval/margin_mean": self.margin,
            "eval/wall_s": self.seconds,
        }


class HeldOutPairs(Config):
    """Pairs that are never trained on."""

    source: str | None = None
    """'module:function'; null = the section's own source."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `source`."""
    num_pairs: int = Field(256, ge=1)
    """Pairs looked at, the first of the source."""


class PreferenceConfig(Config):
    """Pairs of answers, and how the better is told from the worse."""

    source: str
    """'module:function' that yields (prompt messages, better answer, worse answer)."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `source`."""
    held_out: HeldOutPairs | None = None
    """What accuracy is measured on; null = not at all."""
    steps: int = Field(ge=1)
    """Optimizer updates."""
    batch_size: int = Field(ge=1)
    """Pairs an update, over all ranks."""
    every_steps: int = Field(0, ge=0)
    """Look at held-out pairs after every so many steps; 0 = before the first and after the last."""
    max_tokens: int | None = Field(None, ge=2)
    """Pairs with a longer answer, prompt included, are left out, and counted; null = none, and one
    that is longer than the model allows ends the run by its row."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Of kind dpo: sigmoid (arXiv:2305.18290), ipo (arXiv:2310.12036), hinge (arXiv:2305.10425).
    A reward model learns by Bradley and Terry's."""
    beta: float = Field(0.1, gt=0.0)
    """Of kind dpo: strength of the pull to the reference."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=0.5)
    """Of loss sigmoid: share of pairs believed to be the wrong way round."""
    length_normalised: bool | None = None
    """Of kind dpo: log ratios are averaged over an answer's tokens, not summed; null = as the
    loss was published: averaged for ipo, else summed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.label_smoothing and self.loss != "sigmoid":
            raise ValueError(
                f"label_smoothing: is {self.label_smoothing:g} with loss '{self.loss}'; it belongs "
                "to 'sigmoid'. Remove it."
            )
        return self

    @property
    def averages_tokens(self) -> bool:
        """Whether log ratios are averaged."""
        return self.loss == "ipo" if self.length_normalised is None else self.length_normalised

    def is_look_due(self, step: int) -> bool:
        """Whether held-out pairs are looked at after `step` steps; 0 = before the first."""
        if self.held_out is None:
            return False
        at_ends = step in (0, self.steps)
        return at_ends or bool(self.every_steps and step % self.every_steps == 0)

    def reward_model_problems(self) -> Iterator[str]:
        """Keys that say something of DPO alone."""
        for name in ("loss", "beta", "label_smoothing", "length_normalised"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default:
                yield (
                    f"preference.{name}: is {value!r} with kind: reward_model, whose loss is "
                    "Bradley and Terry's. Remove it, or use kind: dpo."
                )


@dataclass(frozen=True, slots=True)
class PairTask:
    """What a train engine makes of pairs."""

    config: PreferenceConfig
    is_scored: bool
    """A reward model learns to score answers; else a policy learns to prefer them (DPO)."""
