"""Policy losses: pure functions of flat token vectors.

A loss is a *sum* over tokens, each times its own `token_weights` entry (`mean_weights`), which
already divides by the count over all ranks and micro-batches. So losses and gradients of
micro-batches and ranks add up to the exact global mean, however the batch was cut.
Masked positions may hold anything, NaN and infinities included; they are replaced before any
arithmetic, because 0 * inf in a gradient is NaN.
"""

import torch
from torch import Tensor

from areal_ray.algorithms.objective import ObjectiveConfig

_MAX_LOG_RATIO = 20.0
"""exp of it is 4.9e8: finite in float32 also after squares and products."""

TokenSums = dict[str, Tensor]
"""[] detached sums over tokens (`max_*`: largest values), to be divided by `tokens`."""


def mean_weights(sequence_tokens: Tensor, num_global: int, *, per_sequence: bool) -> Tensor:
    """[T] weight of each token's loss that makes the sum over everything the global mean.

    Args:
        sequence_tokens: [T] number of trained tokens of the sequence the token belongs to.
        num_global: Trained tokens, or sequences with any, over all ranks and micro-batches.
        per_sequence: Mean over sequences of the mean of each, instead of over tokens.
    """
    if per_sequence:
        return 1.0 / (sequence_tokens * num_global)
    return torch.full_like(sequence_tokens, 1.0 / num_global)


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
        token_weights: [T] from `mean_weights`.
        clip_range: Lowest and highest ratio.
        c_clip: > 1, or None for no dual clip.
        factor: [T] constant factor of each token's loss (the behaviour weight).

    Returns:
        [] loss to call backward() on, and sums for metrics.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    log_ratio = torch.where(loss_mask, logprobs - old_logprobs, zero)
    advantages = torch.where(loss_mask, advantages, zero)
    ratio = torch.exp(log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    clipped = ratio.clamp(*clip_range)
    losses = torch.maximum(-ratio * advantages, -clipped * advantages)
    is_dual = torch.zeros_like(loss_mask)
    if c_clip is not None:
        ceiling = -c_clip * advantages
        is_dual = loss_mask & (advantages < 0) & (losses > ceiling)
        losses = torch.where(is_dual, ceiling, losses)
    if factor is not None:
        losses = losses * torch.where(loss_mask, factor, zero)
    loss = (losses * torch.where(loss_mask, token_weights, zero)).sum()
    sums = {
        "tokens": loss_mask.sum(),
        "clipped": (loss_mask & (ratio != clipped)).sum(),
        "dual_clipped": is_dual.sum(),
        "ratio": ratio.detach().masked_fill(~loss_mask, 0.0).sum(),
        "max_ratio": _largest(ratio, loss_mask),
        "policy_kl": _kl(log_ratio).sum(),
    }
    return loss, sums


def decoupled_ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    *,
    clip_range: tuple[float, float] = (0.8, 1.2),
    c_clip: float | None = None,
    max_behaviour_weight: float = 5.0,
    min_behaviour_weight: float = 0.0,
    clamp_weight: bool = False,
) -> tuple[Tensor, TokenSums]:
    """PPO that clips around the proximal policy and reweights from the behaviour policy.

    Per token: -weight * min(ratio * A, clip(ratio) * A), where ratio = pi / pi_proximal and
    weight = pi_proximal / pi_behaviour. Plain PPO if weight = 1. Hilton et al.,
    arXiv:2110.00641; AReaL, arXiv:2505.24298, sec. 5.2.

    Args:
        logprobs: [T] log pi(token); carries the gradient.
        proximal_logprobs: [T] the same at the start of the step.
        behaviour_logprobs: [T] the same as sampled.
        advantages: [T].
        loss_mask: [T] bool, True on tokens that train.
        token_weights: [T] from `mean_weights`.
        clip_range: Lowest and highest ratio.
        c_clip: > 1, or None for no dual clip.
        max_behaviour_weight: Tokens above it are left out, or clamped to it.
        min_behaviour_weight: The same below.
        clamp_weight: Clamp instead of leaving out.

    Returns:
        [] loss to call backward() on, and sums for metrics: `raw_weight` before any bound,
        `used_weight` after, `outside` the tokens that a bound concerned.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    drift = torch.where(loss_mask, proximal_logprobs - behaviour_logprobs, zero).detach()
    raw = torch.exp(drift.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    low, high = min_behaviour_weight, max_behaviour_weight
    outside = loss_mask & ((raw > high) | (raw < low))
    weight = raw.clamp(low, high) if clamp_weight else torch.where(outside, zero, raw)
    loss, sums = ppo_clip_loss(
        logprobs, proximal_logprobs, advantages, loss_mask, token_weights,
        clip_range=clip_range, c_clip=c_clip, factor=weight,
    )  # fmt: skip
    sums |= {
        "outside": outside.sum(),
        "raw_weight": raw.masked_fill(~loss_mask, 0.0).sum(),
        "max_raw_weight": _largest(raw, loss_mask),
        "used_weight": weight.masked_fill(~loss_mask, 0.0).sum(),
        "behaviour_kl": _kl(drift).sum(),
    }
    return loss, sums


def policy_loss(
    objective: ObjectiveConfig,
    logprobs: Tensor,
    proximal_logprobs: Tensor | None,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
) -> tuple[Tensor, TokenSums]:
    """The loss `objective` asks for; all tensors [T].

    `proximal_logprobs` is read by decoupled_ppo alone; None means that no update was taken yet
    in this step, so that the policy still is the proximal one.
    """
    if objective.kind != "decoupled_ppo":
        loss, sums = ppo_clip_loss(
            logprobs, behaviour_logprobs, advantages, loss_mask, token_weights,
            clip_range=objective.clip_range, c_clip=objective.c_clip,
        )  # fmt: skip
        sums["behaviour_kl"] = sums.pop("policy_kl")  # the clip's centre is the behaviour policy
        return loss, sums
    bounds = objective.weight_bounds
    proximal = logprobs.detach() if proximal_logprobs is None else proximal_logprobs
    return decoupled_ppo_loss(
        logprobs, proximal, behaviour_logprobs, advantages, loss_mask, token_weights,
        clip_range=objective.clip_range, c_clip=objective.c_clip,
        max_behaviour_weight=bounds.upper, min_behaviour_weight=bounds.lower or 0.0,
        clamp_weight=bounds.action == "clamp",
    )  # fmt: skip


def _kl(log_ratio: Tensor) -> Tensor:
    """[T] k3 estimate of KL(old || new) in nats at tokens of `old`; never negative.

    exp(d) - 1 - d with d = log new - log old. Schulman, "Approximating KL divergence", 2020.
    """
    bounded = log_ratio.detach().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded


def _largest(values: Tensor, loss_mask: Tensor) -> Tensor:
    """[] largest of the values where the mask is True, which are not negative; 0 of none."""
    known = values.detach().masked_fill(~loss_mask, 0.0)
    return known.max() if len(known) else known.sum()
