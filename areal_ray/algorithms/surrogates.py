"""Policy losses other than PPO's clip (`losses`), and what all of them share.

Arguments all have in common: `logprobs` [T] log pi of the sampled tokens, with gradient;
`old_logprobs` [T] the same under the policy that ratios are taken against; `advantages` [T];
`loss_mask` [T] bool; `token_weights` [T] from `aggregation`, times any constant factor such as
the behaviour weight; `sequence_ids` [T] int64 below T, equal on the tokens of one trajectory, all
of which must be there. Each returns the [] loss, summed over tokens, and sums for metrics.

At old_logprobs == logprobs each has the gradient of REINFORCE, -A * d log pi.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp of it is 4.9e8: finite in float32 also after squares and products."""

TokenSums = dict[str, Tensor]
"""[] detached sums over tokens (`max_*`: largest values), to be divided by `tokens`."""


def reinforce_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
) -> tuple[Tensor, TokenSums]:
    """-A * log pi. Williams, 1992, eq. 4; `old_logprobs` is for the metrics alone.

    RLOO is this with a leave-one-out baseline and `sequence_sum` (arXiv:2402.14740, eq. 8).
    """
    losses = -masked(advantages, loss_mask) * masked(logprobs, loss_mask)
    log_ratio = masked(logprobs - old_logprobs, loss_mask).detach()
    sums = ratio_sums(log_ratio, loss_mask, torch.zeros_like(loss_mask))
    return weighted_sum(losses, token_weights, loss_mask), sums


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    *,
    sequence_ids: Tensor,
    clip_range: tuple[float, float],
) -> tuple[Tensor, TokenSums]:
    """PPO's clip on the ratio of whole sequences. Zheng et al., arXiv:2507.18071, eq. 5 to 7.

    -min(s * A, clip(s) * A) with s = exp(mean over the sequence of log pi - log pi_old) and A
    the mean of the sequence's advantages; every token of a sequence has the same loss.
    """
    log_ratio = masked(logprobs - old_logprobs, loss_mask)
    mean_log_ratio = sequence_means(log_ratio, sequence_ids, loss_mask)
    advantages = sequence_means(masked(advantages, loss_mask), sequence_ids, loss_mask)
    ratio = bounded_exp(mean_log_ratio)
    losses, is_clipped = clipped_surrogate(ratio, advantages, clip_range)
    sums = ratio_sums(mean_log_ratio, loss_mask, is_clipped)
    # A sequence's ratio says little of the distance a token has moved.
    sums["policy_kl"] = old_kl(log_ratio).sum()
    return weighted_sum(losses, token_weights, loss_mask), sums


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    *,
    temperatures: tuple[float, float] = (1.0, 1.05),
) -> tuple[Tensor, TokenSums]:
    """A soft gate in place of the clip: -(4 / tau) * sigmoid(tau * (ratio - 1)) * A.

    tau is the first of `temperatures` where A > 0, else the second. arXiv:2511.20347, eq. 5.
    """
    log_ratio = masked(logprobs - old_logprobs, loss_mask)
    advantages = masked(advantages, loss_mask)
    positive, negative = temperatures
    tau = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
    gate = torch.sigmoid(tau * (bounded_exp(log_ratio) - 1.0))
    sums = ratio_sums(log_ratio, loss_mask, torch.zeros_like(loss_mask))
    return weighted_sum(-4.0 / tau * gate * advantages, token_weights, loss_mask), sums


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    *,
    clip_range: tuple[float, float],
) -> tuple[Tensor, TokenSums]:
    """REINFORCE with the ratio, clipped and constant, as weight: no token loses its gradient.

    -stop_gradient(clip(ratio)) * A * log pi. MiniMax, arXiv:2506.13585, eq. 4 and 5.
    """
    log_ratio = masked(logprobs - old_logprobs, loss_mask).detach()
    ratio = bounded_exp(log_ratio)
    clipped = ratio.clamp(*clip_range)
    losses = -clipped * masked(advantages, loss_mask) * masked(logprobs, loss_mask)
    sums = ratio_sums(log_ratio, loss_mask, ratio != clipped)
    return weighted_sum(losses, token_weights, loss_mask), sums


def topr_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    *,
    sequence_ids: Tensor,
) -> tuple[Tensor, TokenSums]:
    """REINFORCE whose bad samples fade as the policy leaves them behind.

    -w * A * log pi, w constant: 1 where A >= 0, else min(1, pi(sequence) / pi_old(sequence)),
    which is the product over its tokens. Le Roux et al., arXiv:2503.14286, eq. 7.
    """
    log_ratio = masked(logprobs - old_logprobs, loss_mask).detach()
    advantages = masked(advantages, loss_mask)
    whole = sequence_sums(log_ratio, sequence_ids)
    taper = torch.exp(whole.clamp(-MAX_LOG_RATIO, 0.0))
    is_tapered = loss_mask & (advantages < 0) & (whole < 0)
    weight = torch.where(is_tapered, taper, torch.ones_like(taper))
    losses = -weight * advantages * masked(logprobs, loss_mask)
    return weighted_sum(losses, token_weights, loss_mask), ratio_sums(
        log_ratio, loss_mask, is_tapered
    )


def masked(values: Tensor, loss_mask: Tensor) -> Tensor:
    """[T] the values, 0 where the mask is False; safe for NaN there, also in the gradient."""
    return values.masked_fill(~loss_mask, 0.0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of log ratios that are first held within +-MAX_LOG_RATIO."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_range: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """[T] -min(ratio * A, clip(ratio) * A), and [T] bool where the clip took its gradient away."""
    free, held = -ratio * advantages, -ratio.clamp(*clip_range) * advantages
    return torch.maximum(free, held), held > free


def weighted_sum(losses: Tensor, token_weights: Tensor, loss_mask: Tensor) -> Tensor:
    """[] sum of each token's loss times its weight, where the mask is True."""
    return (losses * masked(token_weights, loss_mask)).sum()


def sequence_sums(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """[T] at each token the sum over its sequence; ids must be below T."""
    totals = torch.zeros_like(values).index_add(0, sequence_ids, values)
    return totals[sequence_ids]


def sequence_means(values: Tensor, sequence_ids: Tensor, loss_mask: Tensor) -> Tensor:
    """[T] at each token the mean over the tokens of its sequence whose mask is True.

    Args:
        values: [T] 0 where the mask is False.
        sequence_ids: [T] int64 below T.
        loss_mask: [T]
    """
    counts = sequence_sums(loss_mask.to(values.dtype), sequence_ids)
    return sequence_sums(values, sequence_ids) / counts.clamp(min=1.0)


def ratio_sums(log_ratio: Tensor, loss_mask: Tensor, clipped: Tensor) -> TokenSums:
    """Sums every policy loss reports of its log ratios [T], which are 0 where masked."""
    log_ratio = log_ratio.detach()
    ratio = masked(bounded_exp(log_ratio), loss_mask)
    return {
        "tokens": loss_mask.sum(),
        "clipped": (loss_mask & clipped).sum(),
        "ratio": ratio.sum(),
        "max_ratio": ratio.max() if len(ratio) else ratio.sum(),
        "policy_kl": old_kl(log_ratio).sum(),
    }


def old_kl(log_ratio: Tensor) -> Tensor:
    """[T] k3 estimate of KL(old || new) in nats at tokens of `old`; never negative.

    exp(d) - 1 - d with d = log new - log old. Schulman, "Approximating KL divergence", 2020.
    """
    bounded = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded
