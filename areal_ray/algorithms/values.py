"""The critic's loss and how much of the returns it explains."""

from collections.abc import Mapping

import torch
from torch import Tensor

from areal_ray.algorithms.surrogates import TokenSums, masked, weighted_sum


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    token_weights: Tensor,
    *,
    eps_clip: float | None = 0.5,
) -> tuple[Tensor, TokenSums]:
    """The larger of two squared errors, summed: 0.5 * max((V - R)^2, (V_clipped - R)^2).

    V_clipped = V held within V_old +- eps_clip. PPO's value clip as in openai/baselines and
    Huang et al., "The 37 implementation details of PPO", 2022, detail 9.

    Args:
        values: [T] the critic's; carry the gradient.
        old_values: [T] at the start of the step.
        returns: [T] what they should be.
        loss_mask: [T] bool.
        token_weights: [T] from `aggregation`.
        eps_clip: In the unit of the reward; None for no clip.
    """
    values, old_values, returns = (masked(x, loss_mask) for x in (values, old_values, returns))
    errors = (values - returns).square()
    is_clipped = torch.zeros_like(loss_mask)
    losses = errors
    if eps_clip is not None:
        held = values.clamp(old_values - eps_clip, old_values + eps_clip)
        far = (held - returns).square()
        is_clipped = far > errors
        losses = torch.maximum(errors, far)
    exact = returns.detach().double()
    residual = exact - values.detach().double()
    sums = {
        "value_tokens": loss_mask.sum(),
        "value_clipped": is_clipped.sum(),
        "return": exact.sum(),
        "return_squared": exact.square().sum(),
        "residual": residual.sum(),
        "residual_squared": residual.square().sum(),
    }
    return weighted_sum(0.5 * losses, token_weights, loss_mask), sums


def explained_variance(sums: Mapping[str, float]) -> float:
    """1 - Var(return - value) / Var(return): 1 = foreseen exactly, 0 = no better than the mean.

    0 where all returns are equal. `sums` are those of `clipped_value_loss`, over everything.
    """
    count = sums["value_tokens"]
    if not count:
        return 0.0
    variance = sums["return_squared"] / count - (sums["return"] / count) ** 2
    missed = sums["residual_squared"] / count - (sums["residual"] / count) ** 2
    scale = sums["return_squared"] / count
    return 1.0 - missed / variance if variance > 1e-12 * max(scale, 1e-12) else 0.0
