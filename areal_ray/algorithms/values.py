"""The critic's loss."""

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
    sums = {"value_tokens": loss_mask.sum(), "value_clipped": is_clipped.sum()}
    return weighted_sum(0.5 * losses, token_weights, loss_mask), sums
