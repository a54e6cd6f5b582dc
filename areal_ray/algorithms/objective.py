"""ObjectiveConfig: what the learner maximises, and the arithmetic its knobs select.

Read by the train engine; `losses.policy_loss` and `advantages.group_advantages` do the work.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from areal_ray.core.config import Config

_PROXIMAL_LATER = ("loglinear", "metrics", "reuse_train_logp")


class RejectionSamplingConfig(Config):
    """Bounds on the behaviour weight pi_proximal / pi_behaviour of a token."""

    level: Literal["token"] = "token"
    """Each token is judged alone."""
    metric: Literal["ratio"] = "ratio"
    """The weight itself is compared with the bounds."""
    action: Literal["mask", "clamp"] = "mask"
    """mask: tokens outside the bounds do not train, and still count in the denominator.
    clamp: they train with the bound as their weight."""
    upper: float = Field(5.0, gt=1.0)
    """Largest weight."""
    lower: float | None = Field(None, gt=0.0, lt=1.0)
    """Smallest weight; none by default."""


class ObjectiveConfig(Config):
    """Advantage, surrogate and aggregation of one RL step."""

    kind: Literal["grpo", "ppo", "decoupled_ppo"] = "grpo"
    """grpo: clip around the sampling policy, mean over sequences (arXiv:2402.03300, eq. 3).
    ppo: the same clip, mean over tokens (arXiv:1707.06347, eq. 7; no critic: the baseline is
    the group's). decoupled_ppo: clip around the policy at the start of the step, weighted by
    how far that moved from the sampling policy (arXiv:2505.24298, sec. 5.2)."""
    advantage: Literal["group_mean_std", "group_mean"] = "group_mean_std"
    """Reward minus the group's mean, divided by the group's standard deviation or not."""
    min_reward_spread: float = Field(1e-6, ge=0.0)
    """A group whose rewards lie closer together than this teaches nothing: advantage 0."""
    eps_clip: float = Field(0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 - eps_clip."""
    eps_clip_higher: float | None = Field(None, gt=0.0)
    """... and above at 1 + eps_clip_higher; eps_clip where not given."""
    c_clip: float | None = Field(None, gt=1.0)
    """Dual clip: the loss of a token with negative advantage A is at most c_clip * |A|
    (arXiv:1912.09729, eq. 5). Off by default."""
    prox_logp_method: str = "recompute"
    """How decoupled_ppo gets the policy's log-probs at the start of the step."""
    rejection_sampling: RejectionSamplingConfig | None = None
    """Bounds on the behaviour weight of decoupled_ppo; the defaults above where not given."""
    aggregation: Literal["token_mean", "sequence_mean"] | None = None
    """Over all tokens of a minibatch, or over sequences of the mean of each. By kind where not
    given: sequence_mean for grpo, token_mean for the others."""
    mask_truncated: bool = False
    """Episodes cut short by a limit neither train nor count in their group's mean."""
    skip_zero_advantage: bool = True
    """Do not compute what cannot change the gradient. Denominators stay as they are."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prox_logp_method in _PROXIMAL_LATER:
            raise ValueError(
                f"prox_logp_method: is '{self.prox_logp_method}', an approximation that is not "
                "offered yet; must be 'recompute'. One forward pass without gradient is its cost."
            )
        if self.prox_logp_method != "recompute":
            raise ValueError(
                f"prox_logp_method: is '{self.prox_logp_method}'; must be 'recompute'."
            )
        if self.rejection_sampling is not None and self.kind != "decoupled_ppo":
            raise ValueError(
                f"rejection_sampling: given with kind '{self.kind}', which has no behaviour "
                "weight to bound; needs kind 'decoupled_ppo'. Change the kind or remove it."
            )
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lowest and highest ratio that still carries a gradient towards it."""
        higher = self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher
        return 1.0 - self.eps_clip, 1.0 + higher

    @property
    def is_sequence_mean(self) -> bool:
        """Whether each sequence has the same say, however long it is."""
        if self.aggregation is None:
            return self.kind == "grpo"
        return self.aggregation == "sequence_mean"

    @property
    def weight_bounds(self) -> RejectionSamplingConfig:
        """Bounds on the behaviour weight that are in force."""
        return self.rejection_sampling or RejectionSamplingConfig()
