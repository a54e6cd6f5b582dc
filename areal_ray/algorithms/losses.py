"""The policy loss of a micro-batch: pure functions of flat token vectors.

A loss is a *sum* over tokens, each times its own `token_weights` entry (`aggregation`), which
already divides by the count over all ranks and micro-batches. So losses and gradients of
micro-batches and ranks add up to the exact global mean, however the batch was cut.
Masked positions may hold anything, NaN and infinities included; they are replaced before any
arithmetic, because 0 * inf in a gradient is NaN.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from areal_ray.algorithms.correction import Correction, behaviour_weights, m2po_kept
from areal_ray.algorithms.kl import kl_estimate
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.surrogates import (
    TokenSums,
    bounded_exp,
    cispo_loss,
    clipped_surrogate,
    gspo_loss,
    masked,
    old_kl,
    ratio_sums,
    reinforce_loss,
    sapo_loss,
    topr_loss,
    weighted_sum,
)


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The trained tokens of one micro-batch; all [T]. Its rows hold whole sequences."""

    logprobs: Tensor
    """log pi of the sampled tokens; carries the gradient."""
    behaviour_logprobs: Tensor
    """The same as sampled."""
    advantages: Tensor
    """Constant; of each token."""
    token_weights: Tensor
    """From `aggregation`: the sum of weight * loss over everything is the global value."""
    sequence_ids: Tensor
    """int64, counted from 0 in the micro-batch: equal on the tokens of one trajectory."""
    proximal_logprobs: Tensor | None = None
    """At the start of the step; None: no update was taken since, the policy still is it."""
    reference_logprobs: Tensor | None = None
    """Of the reference model; needed where the objective has a KL in the loss."""
    entropy: Tensor | None = None
    """Of the next-token distribution, in nats, with gradient; needed where entropy_coef > 0."""
    m2_kept: Tensor | None = None
    """bool: what `m2po_kept` left of the whole minibatch; None: judge this micro-batch alone."""


def ppo_clip_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    *,
    clip_range: tuple[float, float] = (0.8, 1.2),
    c_clip: float | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, TokenSums]:
    """The clipped surrogate, summed: -min(ratio * A, clip(ratio) * A) per token.

    ratio = pi / pi_old. Schulman et al., arXiv:1707.06347, eq. 7. With `c_clip` the loss of a
    token with A < 0 is bounded by c_clip * |A| (dual clip, Ye et al., arXiv:1912.09729, eq. 5).

    Args:
        logprobs: [T] log pi of the sampled token; carries the gradient.
        old_logprobs: [T] the same under the policy the clip is centred on.
        advantages: [T].
        loss_mask: [T] bool, True on tokens that train.
        token_weights: [T] from `aggregation`.
        clip_range: Lowest and highest ratio.
        c_clip: > 1, or None for no dual clip.
        factor: [T] constant factor of each token's loss (the behaviour weight).

    Returns:
        [] loss to call backward() on, and sums for metrics.
    """
    log_ratio = masked(logprobs - old_logprobs, loss_mask)
    advantages = masked(advantages, loss_mask)
    ratio = bounded_exp(log_ratio)
    losses, is_clipped = clipped_surrogate(ratio, advantages, clip_range)
    is_dual = torch.zeros_like(loss_mask)
    if c_clip is not None:
        ceiling = -c_clip * advantages
        is_dual = loss_mask & (advantages < 0) & (losses > ceiling)
        losses = torch.where(is_dual, ceiling, losses)
    if factor is not None:
        losses = losses * masked(factor, loss_mask)
    sums = ratio_sums(log_ratio, loss_mask, is_clipped)
    sums["dual_clipped"] = is_dual.sum()
    return weighted_sum(losses, token_weights, loss_mask), sums


def policy_loss(objective: ObjectiveConfig, columns: TokenColumns) -> tuple[Tensor, TokenSums]:
    """The loss `objective` asks for, over the trained tokens of one micro-batch.

    Sum over tokens of token_weight * (behaviour weight * surrogate + kl_ctl * KL to the
    reference - entropy_coef * entropy); the last two where the objective has them.

    Returns:
        [] loss to call backward() on, and sums for metrics. `policy_kl` is KL(proximal ||
        policy), `behaviour_kl` KL(behaviour || policy as the ratio or weight sees it), nats.
    """
    columns = _in_float32(columns)
    mask = torch.ones_like(columns.sequence_ids, dtype=torch.bool)
    proximal = columns.proximal_logprobs
    if proximal is None:
        proximal = columns.logprobs.detach()
    weights, sums, survivors = columns.token_weights, TokenSums(), mask
    if objective.behaviour_weight != "none":
        correction = _correction(objective, columns, proximal, mask)
        weights, survivors = weights * correction.weights, correction.kept
        drift = proximal - columns.behaviour_logprobs
        sums |= correction.sums(old_kl(drift))
    if objective.m2_threshold is not None:
        kept = columns.m2_kept
        if kept is None:
            kept = m2po_kept(proximal, columns.behaviour_logprobs, mask, objective.m2_threshold)
        weights, kept = masked(weights, kept), kept & survivors
        sums |= {"kept": kept.sum(), "outside": (~kept).sum()}
    loss, surrogate_sums = _surrogate(objective, columns, proximal, mask, weights)
    penalty, penalty_sums = _penalties(objective, columns)
    return loss + penalty, surrogate_sums | sums | penalty_sums


def _correction(
    objective: ObjectiveConfig, columns: TokenColumns, proximal: Tensor, mask: Tensor
) -> Correction:
    bounds = objective.rejection_sampling
    return behaviour_weights(
        proximal, columns.behaviour_logprobs, mask, bounds, columns.sequence_ids
    )


def _surrogate(
    objective: ObjectiveConfig,
    columns: TokenColumns,
    proximal: Tensor,
    mask: Tensor,
    weights: Tensor,
) -> tuple[Tensor, TokenSums]:
    """The loss without KL and entropy; its `policy_kl` is renamed where it is the behaviour's."""
    is_centred = objective.clip_centre == "proximal" or objective.behaviour_weight != "none"
    old = proximal if is_centred else columns.behaviour_logprobs
    flat = (columns.logprobs, old, columns.advantages, mask, weights)
    ids = columns.sequence_ids
    match objective.loss:
        case "reinforce":
            loss, sums = reinforce_loss(*flat)
        case "gspo":
            loss, sums = gspo_loss(*flat, sequence_ids=ids, clip_range=objective.clip_range)
        case "sapo":
            temperatures = (objective.sapo_tau_pos, objective.sapo_tau_neg)
            loss, sums = sapo_loss(*flat, temperatures=temperatures)
        case "cispo":
            loss, sums = cispo_loss(*flat, clip_range=objective.clip_range)
        case "topr":
            loss, sums = topr_loss(*flat, sequence_ids=ids)
        case _:
            bounds = objective.clip_range
            loss, sums = ppo_clip_loss(*flat, clip_range=bounds, c_clip=objective.c_clip)
    if not is_centred:
        sums["behaviour_kl"] = sums.pop("policy_kl")
    return loss, sums


def _penalties(objective: ObjectiveConfig, columns: TokenColumns) -> tuple[Tensor, TokenSums]:
    """[] KL to the reference less the entropy bonus, each as far as the objective has it."""
    total, sums = columns.token_weights.new_zeros(()), TokenSums()
    if objective.kl is not None and objective.kl.where == "loss":
        reference = columns.reference_logprobs
        assert reference is not None, "the objective has a KL in the loss: reference_logprobs"
        estimates = kl_estimate(columns.logprobs, reference, objective.kl.estimator)
        total = total + objective.kl.kl_ctl * (columns.token_weights * estimates).sum()
        sums["kl_reference"] = estimates.detach().sum()
    if objective.entropy_coef > 0.0:
        assert columns.entropy is not None, "entropy_coef > 0: entropy with gradient"
        bonus = (columns.token_weights * columns.entropy).sum()
        total = total - objective.entropy_coef * bonus
    return total, sums


def _in_float32(columns: TokenColumns) -> TokenColumns:
    """The same with half-precision columns widened: a sum of thousands of them loses all digits."""
    found = {field.name: getattr(columns, field.name) for field in fields(columns)}
    wide = {
        name: column.float()
        for name, column in found.items()
        if column is not None and column.dtype in (torch.bfloat16, torch.float16)
    }
    return replace(columns, **wide) if wide else columns
