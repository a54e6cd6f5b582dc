"""ObjectiveConfig: what the learner maximises, as named parts.

`kind` names an algorithm and so a set of parts (`presets`); any part may be replaced by its own
key. Read by the train engine; `shaping`, `normalise`, `gae`, `losses` and `correction` do the work.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
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
    CLIPS,
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
    those of the training pass itself; one minibatch only. With one minibatch all do the same."""
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
    """The ratio is clipped below at 1 - eps_clip; of losses ppo_clip, gspo and cispo."""
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
    """Score of a sub-agent: its episode's, times this for each call between the main agent and it
    (a client from `client.sub_agent()` tells who called)."""
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
            *_unread_problems(self),
            *([] if self.rejection_sampling is None else self.rejection_sampling.problems()),
            *self._weight_problems(),
            *self._loss_problems(),
            *self._signal_problems(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lowest and highest ratio that still carries a gradient towards it, of a loss that clips.

        Filled in by kind or loss.
        """
        assert self.eps_clip is not None, f"loss '{self.loss}' does not clip"
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
        takes_weight = self.loss in (*RATIO_LOSSES, "reinforce")  # others refuse any, below
        if weight in ("clamp", "mask") and bounds is None and takes_weight:
            problems.append(
                f"behaviour_weight: is '{weight}' without rejection_sampling, which holds its "
                "bounds. Add the section, or use 'full' or 'none'."
            )
        if bounds is not None and weight in ("none", "full"):
            problems.append(
                f"rejection_sampling: is given with behaviour_weight '{weight}', which has no "
                "bounds. Remove one of them."
            )
        elif bounds is not None and weight != bounds.action:
            problems.append(
                f"rejection_sampling: has action '{bounds.action}' with behaviour_weight "
                f"'{weight}'; they must agree. Give the action alone: it implies the weight."
            )
        if self.clip_centre == "behaviour" and weight != "none" and self.loss in RATIO_LOSSES:
            problems.append(
                f"behaviour_weight: is '{weight}' (a rejection_sampling implies one) with "
                "clip_centre 'behaviour', whose ratio holds that factor already. Use kind "
                "'decoupled_ppo' or clip_centre 'proximal', or behaviour_weight 'none' without "
                "rejection_sampling."
            )
        return problems

    def _loss_problems(self) -> list[str]:
        problems = []
        if self.loss in ("sapo", "cispo", "topr") and self.clip_centre == "proximal":
            problems.append(
                f"clip_centre: is 'proximal' with loss '{self.loss}', which bounds the ratio "
                "against the sampling policy by itself; must be 'behaviour'. Change it."
            )
        if self.loss in ("sapo", "cispo", "topr") and self.behaviour_weight != "none":
            problems.append(
                f"behaviour_weight: is '{self.behaviour_weight}' with loss '{self.loss}', whose "
                "ratio holds that factor already; must be 'none'. Set it to that, without "
                "rejection_sampling."
            )
        if self.loss == "reinforce" and self.clip_centre == "proximal":
            problems.append(
                "clip_centre: is 'proximal' with loss 'reinforce', which takes no ratio; must be "
                "'behaviour'. Change it; behaviour_weight corrects for an older sampling policy."
            )
        return problems

    def _signal_problems(self) -> list[str]:
        problems = []
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
        return problems


@dataclass(frozen=True, slots=True)
class _Reader:
    """Keys that some parts alone read."""

    keys: str
    """One or more, as a recipe has them."""
    is_there: bool
    why_not: str
    """What stands in place of a reader."""
    way_out: str


def _unread_problems(objective: ObjectiveConfig) -> list[str]:
    """Keys that are given, by another value than their default, and that nothing would read."""
    return [
        f"{key}: is {_shown(objective, key)} with {reader.why_not}, so nothing reads it. "
        f"Remove it, or {reader.way_out}."
        for reader in _readers(objective)
        if not reader.is_there
        for key in reader.keys.split()
        if _is_given(objective, key)
    ]


def _readers(objective: ObjectiveConfig) -> list[_Reader]:
    return [*_loss_readers(objective), *_reward_readers(objective), *_gae_readers(objective.gae)]


def _loss_readers(objective: ObjectiveConfig) -> list[_Reader]:
    loss, bounds = objective.loss, objective.rejection_sampling
    return [
        _Reader(
            "eps_clip eps_clip_higher", loss in CLIPS, f"loss '{loss}', which does not clip",
            f"use a loss that does: {', '.join(CLIPS)}",
        ),
        _Reader(
            "c_clip", loss == "ppo_clip", f"loss '{loss}', which has no dual clip",
            "use loss 'ppo_clip'",
        ),
        _Reader("sapo_tau_pos sapo_tau_neg", loss == "sapo", f"loss '{loss}'", "use kind 'sapo'"),
        _Reader(
            "prox_logp_method", objective.needs_proximal,
            f"clip_centre '{objective.clip_centre}' and behaviour_weight "
            f"'{objective.behaviour_weight}', which need no proximal log-probs",
            "use kind 'decoupled_ppo' or clip_centre 'proximal'",
        ),
        _Reader(
            "rejection_sampling.aggregation", bounds is not None and bounds.level == "sequence",
            "level 'token'", "use level 'sequence'",
        ),
        _Reader(
            "fixed_length_tokens", objective.aggregation == "fixed_length",
            f"aggregation '{objective.aggregation}'", "use aggregation 'fixed_length'",
        ),
    ]  # fmt: skip


def _reward_readers(objective: ObjectiveConfig) -> list[_Reader]:
    rewards, advantages = objective.reward_norm, objective.advantage_norm
    assert rewards is not None, "filled in by the kind"
    assert advantages is not None, "filled in by the kind"
    has_scope = any(n.mean != "none" or n.std != "none" for n in (rewards, advantages))
    return [
        _Reader(
            "reward_shaping.overlong_limit_tokens reward_shaping.overlong_penalty_factor",
            objective.reward_shaping.overlong_tokens is not None,
            "reward_shaping.overlong_tokens null", "give overlong_tokens too",
        ),
        _Reader(
            "min_reward_spread", has_scope, "no mean or std in reward_norm and advantage_norm",
            "give one of them",
        ),
        _Reader(
            " ".join(["reward_norm.mean reward_norm.std branch_discount", *_SHAPING]),
            objective.needs_rewards, "distillation.rl_weight 0, by which no reward is learned from",
            "use kind 'opd' with nothing of it, or raise distillation.rl_weight (gae.discount 1)",
        ),
    ]  # fmt: skip


def _gae_readers(gae: GaeConfig) -> list[_Reader]:
    method = f"gae.lambda_method '{gae.lambda_method}'"
    readers = {
        "gae.gae_lambda": "constant",
        "gae.alpha": "length_adaptive",
        "gae.share": "relative_position",
    }
    return [
        _Reader(key, gae.lambda_method == name, method, f"use '{name}'")
        for key, name in readers.items()
    ]


_SHAPING = [f"reward_shaping.{name}" for name in RewardShapingConfig.model_fields]


def _is_given(objective: ObjectiveConfig, key: str) -> bool:
    """Whether a key has another value than where nothing is said of it."""
    section, _, name = key.rpartition(".")
    holder = getattr(objective, section) if section else objective
    return holder is not None and getattr(holder, name) != type(holder).model_fields[name].default


def _shown(objective: ObjectiveConfig, key: str) -> str:
    value = reduce(getattr, key.split("."), objective)
    return f"{value:g}" if isinstance(value, float) else repr(value)
