"""ObjectiveConfig: what the learner maximises, as named parts.

`kind` names an algorithm and so a set of parts (`presets`); any part may be replaced by its own
key. Read by the train engine; `shaping`, `normalise`, `gae`, `losses` and `correction` do the work.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from areal_ray.algorithms.objective_parts import (
    DistillationConfig,
    GaeConfig,
    KlConfig,
    NormConfig,
    RejectionSamplingConfig,
    RewardShapingConfig,
)
from areal_ray.algorithms.presets import (
    PRESETS,
    RATIO_LOSSES,
    AggregationName,
    BehaviourWeight,
    LossName,
    ObjectiveKind,
    filled_in,
)
from areal_ray.core.config import Config


class ObjectiveConfig(Config):
    """Rewards to advantages, policy loss, correction and aggregation of one RL step."""

    former_keys: ClassVar[Mapping[str, str]] = {
        "advantage": "Use reward_norm: {mean: group, std: group} for group_mean_std, and "
        "{mean: group} for group_mean."
    }

    kind: ObjectiveKind = "grpo"
    """Algorithm: the parts below that are null are as its name says."""
    loss: LossName | None = None
    """Policy loss of a token."""
    clip_centre: Literal["behaviour", "proximal"] | None = None
    """Policy that ratios are taken against: the one that sampled, or the learner's at the start
    of the step (decoupled PPO, arXiv:2505.24298, sec. 5.2)."""
    prox_logp_method: Literal["recompute", "loglinear", "reuse"] = "recompute"
    """How the proximal log-probs are had. recompute: one more forward pass before the second
    minibatch. loglinear: interpolated between behaviour and policy by version, no pass. reuse:
    those of the training pass itself; one minibatch only."""
    behaviour_weight: BehaviourWeight | None = None
    """Factor pi_proximal / pi_behaviour of a token's loss. none: left out. full: as it is.
    clamp or mask: held in the bounds of rejection_sampling."""
    rejection_sampling: RejectionSamplingConfig | None = None
    """Bounds of behaviour_weight; implies it (mask or clamp) where that is null."""
    m2_threshold: float | None = Field(None, gt=0.0)
    """M2PO: tokens with the largest squared log ratio are left out until the mean of the rest is
    below it."""
    aggregation: AggregationName | None = None
    """From token losses to one number. token_mean: over all tokens of a minibatch.
    sequence_mean: of each sequence's mean. sequence_sum: mean over sequences of their sums.
    fixed_length: the same divided by fixed_length_tokens. rollout_mean: of each episode's mean,
    all its branches together."""
    fixed_length_tokens: int | None = Field(None, ge=1)
    """Of aggregation fixed_length; null = rollout.sampling.max_new_tokens."""
    eps_clip: float | None = Field(None, gt=0.0, le=1.0)
    """The ratio is clipped below at 1 - eps_clip."""
    eps_clip_higher: float | None = Field(None, gt=0.0)
    """... and above at 1 + eps_clip_higher; null = as the kind says, else eps_clip."""
    c_clip: float | None = Field(None, gt=1.0)
    """Dual clip: the loss of a token with negative advantage A is at most c_clip * |A|
    (arXiv:1912.09729, eq. 5). Off by default."""
    sapo_tau_pos: float = Field(1.0, gt=0.0)
    """SAPO's temperature where the advantage is positive."""
    sapo_tau_neg: float = Field(1.05, gt=0.0)
    """... and where it is negative."""
    entropy_coef: float = Field(0.0, ge=0.0)
    """Weight of the entropy bonus."""
    reward_shaping: RewardShapingConfig = RewardShapingConfig()
    """Length penalty, bias, scale and bounds of rewards."""
    reward_norm: NormConfig | None = None
    """Baseline and scale of rewards."""
    advantage_norm: NormConfig | None = None
    """Centre and scale of advantages, over the trained tokens of the whole step."""
    min_reward_spread: float = Field(1e-6, ge=0.0)
    """A group whose rewards lie closer together than this teaches nothing: advantage 0."""
    gae: GaeConfig = GaeConfig()
    """How reward flows back over an episode."""
    branch_discount: float = Field(1.0, gt=0.0, le=1.0)
    """Reward of a sub-agent's branch: the episode's, times this for each edge between."""
    kl: KlConfig | None = None
    """Penalty for leaving the reference model; needs the section `reference`."""
    distillation: DistillationConfig | None = None
    """Teacher's signal in each token's reward; needs the section `teacher`."""
    mask_truncated: bool = False
    """Episodes cut short by a limit neither train nor count in their group's mean."""
    skip_zero_advantage: bool = True
    """Do not compute what cannot change the gradient. Denominators stay as they are."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        """Parts that are not given, as the kind says; so a saved recipe tells all of them."""
        if not isinstance(given, dict) or given.get("kind", "grpo") not in tuple(PRESETS):
            return given  # an unknown kind is told by its own field
        return filled_in(given)

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [
            *self._weight_problems(),
            *self._loss_problems(),
            *self._signal_problems(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lowest and highest ratio that still carries a gradient towards it."""
        assert self.eps_clip is not None, "filled in by the kind"
        higher = self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher
        return 1.0 - self.eps_clip, 1.0 + higher

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference model are read."""
        return self.kl is not None

    @property
    def needs_teacher(self) -> bool:
        """Whether log-probs of the teacher are read."""
        return self.distillation is not None

    @property
    def needs_rewards(self) -> bool:
        """Whether an episode without a reward teaches nothing."""
        return self.distillation is None or self.distillation.rl_weight > 0.0

    @property
    def needs_proximal(self) -> bool:
        """Whether log-probs at the start of the step are read."""
        is_corrected = self.behaviour_weight != "none" or self.m2_threshold is not None
        return self.clip_centre == "proximal" or is_corrected

    @property
    def has_group_baseline(self) -> bool:
        """Whether a reward is compared with those of its siblings alone."""
        assert self.reward_norm is not None, "filled in by the kind"
        return self.reward_norm.mean in ("group", "leave_one_out")

    @property
    def may_skip(self) -> bool:
        """Whether tokens with advantage 0 have no say, so that they need not be computed.

        Under M2PO they have: which tokens are left out depends on all of a minibatch.
        """
        return (
            self.skip_zero_advantage and not self.has_other_gradient and self.m2_threshold is None
        )

    @property
    def has_other_gradient(self) -> bool:
        """Whether a token with advantage 0 has a gradient all the same."""
        return self.entropy_coef > 0.0 or self.has_kl("loss")

    @property
    def has_token_rewards(self) -> bool:
        """Whether another model's log-probs are part of each token's reward."""
        return self.has_kl("reward") or self.distillation is not None

    def has_kl(self, where: Literal["reward", "loss"]) -> bool:
        """Whether the KL to the reference model stands there."""
        return self.kl is not None and self.kl.where == where

    def with_limit(self, max_new_tokens: int) -> "ObjectiveConfig":
        """The same with `max_new_tokens` where a length is null."""
        shaping = self.reward_shaping
        if shaping.overlong_tokens is not None and shaping.overlong_limit_tokens is None:
            shaping = shaping.model_copy(update={"overlong_limit_tokens": max_new_tokens})
        length = self.fixed_length_tokens
        if self.aggregation == "fixed_length" and length is None:
            length = max_new_tokens
        changes = {"reward_shaping": shaping, "fixed_length_tokens": length}
        return self.model_copy(update=changes)

    def _weight_problems(self) -> list[str]:
        problems = []
        weight, bounds = self.behaviour_weight, self.rejection_sampling
        is_bounded = self.loss not in (*RATIO_LOSSES, "reinforce")  # refuses any weight, below
        if weight in ("clamp", "mask") and bounds is None and not is_bounded:
            problems.append(
                f"behaviour_weight: is '{weight}' without rejection_sampling, which holds its "
                "bounds. Add the section, or use 'full' or 'none'."
            )
        if bounds is not None and weight != bounds.action:
            problems.append(
                f"rejection_sampling: has action '{bounds.action}' with behaviour_weight "
                f"'{weight}'; they must agree. Give the action alone: it implies the weight."
            )
        if self.clip_centre == "behaviour" and weight != "none" and self.loss in RATIO_LOSSES:
            problems.append(
                f"behaviour_weight: is '{weight}' with clip_centre 'behaviour', whose ratio holds "
                "that factor already. Use clip_centre 'proximal', kind 'decoupled_ppo', or "
                "behaviour_weight 'none'."
            )
        if self.prox_logp_method != "recompute" and not self.needs_proximal:
            problems.append(
                f"prox_logp_method: is '{self.prox_logp_method}' with kind '{self.kind}', which "
                "reads no proximal log-probs. Remove it, or use clip_centre 'proximal'."
            )
        return problems

    def _loss_problems(self) -> list[str]:
        problems = []
        if self.c_clip is not None and self.loss != "ppo_clip":
            problems.append(
                f"c_clip: is {self.c_clip:g} with loss '{self.loss}'; dual clip belongs to "
                "'ppo_clip'. Remove it."
            )
        if self.loss in ("sapo", "cispo", "topr") and self.clip_centre == "proximal":
            problems.append(
                f"clip_centre: is 'proximal' with loss '{self.loss}', which bounds the ratio "
                "against the sampling policy by itself; must be 'behaviour'. Change it."
            )
        if self.loss in ("sapo", "cispo", "topr") and self.behaviour_weight != "none":
            problems.append(
                f"behaviour_weight: is '{self.behaviour_weight}' with loss '{self.loss}', whose "
                "ratio holds that factor already; must be 'none'. Remove it and rejection_sampling."
            )
        if self.loss == "reinforce" and self.clip_centre == "proximal":
            problems.append(
                "clip_centre: is 'proximal' with loss 'reinforce', which takes no ratio; must be "
                "'behaviour'. Change it; behaviour_weight corrects for an older sampling policy."
            )
        if self.loss != "sapo" and (self.sapo_tau_pos, self.sapo_tau_neg) != (1.0, 1.05):
            problems.append(
                f"sapo_tau_pos, sapo_tau_neg: are {self.sapo_tau_pos:g} and {self.sapo_tau_neg:g} "
                f"with loss '{self.loss}', which does not read them. Remove them, or use kind "
                "'sapo'."
            )
        if self.fixed_length_tokens is not None and self.aggregation != "fixed_length":
            problems.append(
                f"fixed_length_tokens: is {self.fixed_length_tokens} with aggregation "
                f"'{self.aggregation}', which does not read it. Remove it."
            )
        return problems

    def _signal_problems(self) -> list[str]:
        problems = []
        shaping = self.reward_shaping
        if shaping.overlong_limit_tokens is not None and shaping.overlong_tokens is None:
            problems.append(
                "reward_shaping.overlong_limit_tokens: is given without overlong_tokens. Give "
                "both or neither."
            )
        if self.advantage_norm is not None and self.advantage_norm.mean == "leave_one_out":
            problems.append(
                "advantage_norm.mean: is 'leave_one_out', which is a baseline of rewards: each "
                "token would be compared with the other tokens. Use it in reward_norm, and here "
                "'batch', 'group' or 'none'."
            )
        if self.kl is not None and self.distillation is not None and self.kl.where == "reward":
            problems.append(
                "kl: is given with where 'reward' beside distillation; both pull each token's "
                "reward towards another model. Remove one, or use where 'loss'."
            )
        teacher = self.distillation
        if teacher is not None and teacher.rl_weight > 0.0 and self.gae.discount == 0.0:
            problems.append(
                f"distillation.rl_weight: is {teacher.rl_weight:g} with gae.discount 0, by which "
                "an episode's reward would teach its last token alone. Use gae.discount 1."
            )
        method = self.gae.lambda_method
        if method != "constant" and self.gae.gae_lambda != 1.0:
            problems.append(
                f"gae.gae_lambda: is {self.gae.gae_lambda:g} with lambda_method '{method}', which "
                "makes its own. Remove one of them."
            )
        return problems
