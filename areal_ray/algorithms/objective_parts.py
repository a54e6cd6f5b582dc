"""The parts an objective is made of, each with its own recipe section; no torch.

`objective.ObjectiveConfig` puts them together and `presets` says which an algorithm's name stands
for.
"""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from areal_ray.core.config import Config

NormScope = Literal["group", "batch", "none"]


class RejectionSamplingConfig(Config):
    """Bounds on how far the policy may have moved from the one that sampled a token."""

    level: Literal["token", "sequence"] = "token"
    """Whether each token is judged alone or a whole sequence stands or falls together."""
    aggregation: Literal["sum", "mean", "max"] = "mean"
    """How a sequence's metric follows from its tokens': of log ratios for ratio (mean = the
    geometric mean), of the tokens' values for a KL. Level sequence alone reads it."""
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = "ratio"
    """What is compared with the bounds. ratio: pi_proximal / pi_behaviour. kl_k*: an estimate of
    their KL (see `kl`). binary_kl: the larger of the two KLs between Bernoulli variables with the
    two probabilities of the sampled token (KPop)."""
    action: Literal["mask", "clamp"] = "mask"
    """mask: what lies outside the bounds does not train, and still counts in the denominator.
    clamp: it trains with the bound as its weight (truncated importance sampling)."""
    upper: float = Field(5.0, gt=0.0)
    """Largest allowed value of the metric."""
    lower: float | None = None
    """Smallest allowed value; none by default."""

    def problems(self) -> Iterator[str]:
        """What is wrong with all of it together, each line beginning with its key.

        Told by the objective: a recipe may give a part, and the rest is its kind's.
        """
        where, metric = "rejection_sampling", self.metric
        if self.action == "clamp" and metric != "ratio":
            yield (
                f"{where}.action: is 'clamp' with metric '{metric}'; only a ratio is a weight that "
                "can be clamped. Use action 'mask' or metric 'ratio'."
            )
        if (self.action, self.level, self.aggregation) == ("clamp", "sequence", "max"):
            yield (
                f"{where}.action: is 'clamp' with level 'sequence' and aggregation 'max'; the "
                "largest ratio of a sequence is no weight for its other tokens. Use aggregation "
                "'mean' or 'sum', or level 'token'."
            )
        if metric == "ratio" and self.upper < 1.0:
            yield (
                f"{where}.upper: is {self.upper:g} with metric 'ratio'; must be >= 1, or a policy "
                "that has not moved at all would be cut off. Raise it."
            )
        if self.lower is not None:
            yield from self._lower_problems(f"{where}.lower", self.lower)

    def _lower_problems(self, where: str, lower: float) -> Iterator[str]:
        if self.metric in ("kl_k2", "kl_k3", "binary_kl"):
            yield (
                f"{where}: is {lower:g} with metric '{self.metric}', which is 0 where the policy "
                "has not moved and never less; a lower bound would reject the best tokens or "
                "nothing. Remove it."
            )
        elif lower >= self.upper:
            yield f"{where}: is {lower:g}; must be below upper = {self.upper:g}. Lower it."
        elif self.metric == "ratio" and not 0.0 <= lower <= 1.0:
            yield (
                f"{where}: is {lower:g} with metric 'ratio'; must be in 0..1, since a policy that "
                "has not moved has ratio 1. Change it."
            )
        elif self.metric == "kl_k1" and lower > 0.0:
            yield (
                f"{where}: is {lower:g} with metric 'kl_k1'; must be <= 0, its value where the "
                "policy has not moved. Lower it."
            )


class RewardShapingConfig(Config):
    """What happens to an episode's reward before any normalisation, in this order."""

    overlong_tokens: int | None = Field(None, ge=1)
    """The last so many tokens below rollout.sampling.max_new_tokens cost reward, linearly up to
    the whole penalty (DAPO, arXiv:2503.14476, eq. 13). Counts the episode's sampled tokens."""
    overlong_penalty_factor: float = Field(1.0, gt=0.0)
    """The whole penalty."""
    overlong_limit_tokens: int | None = Field(None, ge=1)
    """Where the whole penalty is reached; null = rollout.sampling.max_new_tokens."""
    bias: float = 0.0
    """Added."""
    scaling: float = Field(1.0, gt=0.0)
    """Then multiplied."""
    clip: float | None = Field(None, gt=0.0)
    """Then cut to -clip..clip."""


class NormConfig(Config):
    """Centre and scale of rewards or advantages; statistics in float64 over true group sizes."""

    mean: Literal["group", "leave_one_out", "batch", "none"] = "none"
    """What is subtracted: the mean of the group, of the group without the sample itself, of the
    whole step, or nothing."""
    std: NormScope = "none"
    """What it is divided by: the standard deviation of the group, of the whole step, or nothing."""
    unbiased: bool = False
    """The variance is the sum of squares over n - 1 instead of n; a single value is not divided."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mean == "leave_one_out" and self.std == "group":
            raise ValueError(
                "std: is 'group' with mean 'leave_one_out'; a group of equal rewards and one "
                "outlier would be divided by next to nothing. Use 'none' or 'batch', or mean "
                "'group'."
            )
        if self.unbiased and self.std == "none":
            raise ValueError(
                "unbiased: is true with std 'none', to which it belongs. Give std ('group' or "
                "'batch'), or remove it."
            )
        return self


class GaeConfig(Config):
    """How reward flows back over an episode (arXiv:1506.02438)."""

    discount: float = Field(1.0, ge=0.0, le=1.0)
    """Of the next token's or turn's value; 0: a token answers for its own reward alone."""
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Between one-step (0) and whole-episode (1) estimates; needs a critic to matter."""
    unit: Literal["token", "turn"] = "token"
    """One step of the recursion: a sampled token, or a whole turn."""
    lambda_method: Literal["constant", "length_adaptive", "relative_position"] = "constant"
    """length_adaptive: 1 - 1 / (alpha * length) (VAPO, arXiv:2504.05118, eq. 7).
    relative_position: the first step's share of the last reward is `share` at any length."""
    alpha: float = Field(0.05, gt=0.0)
    """Of length_adaptive."""
    share: float = Field(0.5, gt=0.0, le=1.0)
    """Of relative_position."""


class KlConfig(Config):
    """How the policy is held near the reference model."""

    kl_ctl: float = Field(gt=0.0)
    """Weight of the estimate."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Of KL(policy || reference) at a sampled token; algorithms/kl.py has value and gradient."""
    where: Literal["reward", "loss"] = "reward"
    """reward: subtracted from each token's reward. loss: added to the loss, with gradient."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.where == "loss" and self.estimator == "k1":
            raise ValueError(
                "estimator: is 'k1' with where 'loss'; the gradient of k1 has mean zero, so it "
                "would be noise. Use 'k2' (the gradient of the KL) or 'k3', or where 'reward'."
            )
        return self


class DistillationConfig(Config):
    """Learning from a teacher on the policy's own samples (OPD)."""

    weight: float = Field(1.0, gt=0.0)
    """Of the teacher's signal, log pi_teacher - log pi, in each token's reward."""
    rl_weight: float = Field(0.0, ge=0.0)
    """Of the advantage from rewards, added to it; 0 = the teacher alone."""
    clip: float | None = Field(None, gt=0.0)
    """The signal of a token is cut to -clip..clip; null = not at all."""
