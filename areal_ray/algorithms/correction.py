"""Correction for tokens sampled by a policy other than the one that learns.

The behaviour weight of a token is pi_proximal / pi_behaviour (decoupled PPO: Hilton et al.,
arXiv:2110.00641; AReaL, arXiv:2505.24298, sec. 5.2), bounded as `RejectionSamplingConfig` says:

- TIS: token, ratio, clamp (Yao et al., "Your efficient RL framework secretly brings you
  off-policy RL training", 2025);
- IcePop: token, ratio, mask with lower and upper (arXiv:2510.18855, sec. 3.3);
- KPop: token, binary_kl, mask (AReaL's documentation);
- M2PO: `m2po_kept` (arXiv:2510.01161, sec. 4).

What is masked gets weight 0; denominators know nothing of it, so a mask shrinks a gradient and
never makes the rest of the batch count for more.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_ray.algorithms.objective_parts import RejectionSamplingConfig
from areal_ray.algorithms.surrogates import (
    MAX_LOG_RATIO,
    TokenSums,
    bounded_exp,
    masked,
    old_kl,
    sequence_means,
    sequence_sums,
)

_TINY = 1e-8
"""Probabilities are held this far from 0 and 1 in a Bernoulli KL."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What becomes of each token; all [T], without gradient, 0 or False where masked."""

    weights: Tensor
    """Factor of the token's loss."""
    kept: Tensor
    """bool: trains; False where a mask rejected it."""
    raw: Tensor
    """pi_proximal / pi_behaviour before any bound."""
    outside: Tensor
    """bool: a bound concerned it, by mask or by clamp."""

    def sums(self, drift_kl: Tensor) -> TokenSums:
        """Sums for metrics; `drift_kl` [T] of the same tokens, from `old_kl`."""
        return {
            "outside": self.outside.sum(),
            "kept": self.kept.sum(),
            "raw_weight": self.raw.sum(),
            "max_raw_weight": self.raw.max() if len(self.raw) else self.raw.sum(),
            "used_weight": self.weights.sum(),
            "behaviour_kl": drift_kl.sum(),
        }


@torch.no_grad()
def behaviour_weights(
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    loss_mask: Tensor,
    config: RejectionSamplingConfig | None,
    sequence_ids: Tensor,
) -> Correction:
    """Weights pi_proximal / pi_behaviour of tokens, bounded.

    Args:
        proximal_logprobs: [T] log-probs at the start of the step.
        behaviour_logprobs: [T] as sampled.
        loss_mask: [T] bool.
        config: The bounds; None leaves every weight as it is.
        sequence_ids: [T] int64 below T; read at level sequence, whose sequences must be whole.
    """
    drift = masked(proximal_logprobs - behaviour_logprobs, loss_mask)
    raw = masked(bounded_exp(drift), loss_mask)
    if config is None:
        return Correction(raw, loss_mask, raw, torch.zeros_like(loss_mask))
    metric = _metric(drift, behaviour_logprobs, loss_mask, config.metric)
    weights = raw
    if config.level == "sequence":
        metric = _aggregate(metric, loss_mask, sequence_ids, config.aggregation)
        if config.metric == "ratio" and config.aggregation != "max":
            weights = masked(bounded_exp(metric), loss_mask)
    if config.metric == "ratio":
        metric = bounded_exp(metric)
    lower = -math.inf if config.lower is None else config.lower
    outside = loss_mask & ((metric > config.upper) | (metric < lower))
    if config.action == "clamp":
        weights = masked(weights.clamp(lower, config.upper), loss_mask)
        return Correction(weights, loss_mask, raw, outside)
    return Correction(weights.masked_fill(outside, 0.0), loss_mask & ~outside, raw, outside)


def _metric(drift: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor, name: str) -> Tensor:
    """[T] what is compared with the bounds; of ratio its logarithm, so that it can be summed."""
    if name == "binary_kl":
        behaviour = masked(behaviour_logprobs, loss_mask)
        return masked(binary_kl(behaviour + drift, behaviour).to(drift.dtype), loss_mask)
    if name == "kl_k2":
        return drift * drift / 2
    if name == "kl_k3":
        bounded = drift.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(-bounded) + bounded
    return drift


def binary_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """[T] float64: the larger of KL(p || q) and KL(q || p) of two coins, in nats.

    p and q are the two probabilities of the sampled token, held within 1e-8..1 - 1e-8, and
    KL(p || q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)).
    """
    low, high = math.log(_TINY), math.log1p(-_TINY)
    log_p, log_q = (x.detach().double().clamp(low, high) for x in (logprobs, other_logprobs))
    log_not_p, log_not_q = torch.log(-torch.expm1(log_p)), torch.log(-torch.expm1(log_q))
    gap, not_gap = log_p - log_q, log_not_p - log_not_q
    forward = log_p.exp() * gap + log_not_p.exp() * not_gap
    backward = -log_q.exp() * gap - log_not_q.exp() * not_gap
    return torch.maximum(forward, backward)


def _aggregate(metric: Tensor, loss_mask: Tensor, sequence_ids: Tensor, name: str) -> Tensor:
    """[T] at each token its sequence's sum, mean or largest value over tokens that train."""
    if name == "sum":
        return sequence_sums(metric, sequence_ids)
    if name == "mean":
        return sequence_means(metric, sequence_ids, loss_mask)
    lowest = torch.full_like(metric, -math.inf)
    found = metric.masked_fill(~loss_mask, -math.inf)
    largest = lowest.scatter_reduce(0, sequence_ids, found, "amax")[sequence_ids]
    return masked(largest, loss_mask)


@torch.no_grad()
def m2po_kept(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor, threshold: float
) -> Tensor:
    """[T] bool: tokens left after M2PO dropped those that moved furthest.

    The largest (log pi_behaviour - log pi_proximal)^2 are dropped until the mean of the rest is
    below `threshold`; of equal ones all or none, so order does not matter. It looks at the tokens
    it is given: give it those of a whole minibatch. arXiv:2510.01161, sec. 4.
    """
    squares = masked(proximal_logprobs - behaviour_logprobs, loss_mask).double().square()
    ordered = squares[loss_mask].sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    # Means of a sorted list never fall, so those below the threshold come first.
    dropped = ordered[means >= threshold]
    if not len(dropped):
        return loss_mask
    return loss_mask & (squares < dropped[0])


@torch.no_grad()
def loglinear_proximal(
    behaviour_logprobs: Tensor,
    policy_logprobs: Tensor,
    versions: Tensor,
    version: int,
    progress: float,
) -> Tensor:
    """[T] proximal log-probs guessed without a forward pass, on the line between two others.

    (1 - a) * behaviour + a * policy, a = (v_proximal - v_behaviour) / (v_policy - v_behaviour)
    in 0..1. Where the policy has not moved since the step began (progress 0), a is 1.

    Args:
        behaviour_logprobs: [T] as sampled.
        policy_logprobs: [T] of the policy now.
        versions: [T] that sampled each token.
        version: The learner's as the step began, v_proximal.
        progress: Share of the step's minibatches already taken, in 0..1; the policy counts as
            version + progress.
    """
    age = (version - versions).to(policy_logprobs.dtype).clamp(min=0.0)
    share = age / (age + progress) if progress > 0.0 else torch.ones_like(age)
    policy = policy_logprobs.detach()
    return behaviour_logprobs + share * (policy - behaviour_logprobs)


@torch.no_grad()
def mismatch_sums(
    proximal_logprobs: Tensor, behaviour_logprobs: Tensor, staleness: Tensor
) -> TokenSums:
    """How far the learner's log-probs lie from the engine's, by cause.

    `fresh_*`: tokens the learner's own version sampled, where all difference is the engine's
    (kernels, precision, sampling); `aged_*`: older tokens, where training moved the policy too.
    Each has tokens, kl (k3 of KL(behaviour || proximal), nats), ratio and max_ratio.

    Args:
        proximal_logprobs: [T] log-probs at the start of the step.
        behaviour_logprobs: [T] as sampled.
        staleness: [T] versions the token lies behind the learner.
    """
    sums: TokenSums = {}
    drift = proximal_logprobs - behaviour_logprobs
    for name, chosen in {"fresh": staleness <= 0, "aged": staleness > 0}.items():
        part = masked(drift, chosen)
        ratio = masked(bounded_exp(part), chosen)
        sums[f"{name}_tokens"] = chosen.sum()
        sums[f"{name}_kl"] = old_kl(part).sum()
        sums[f"{name}_ratio"] = ratio.sum()
        sums[f"max_{name}_ratio"] = ratio.max() if len(ratio) else ratio.sum()
    return sums
