"""An episode's reward before any normalisation: length penalty, bias, scale, bounds."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from areal_ray.algorithms.objective_parts import RewardShapingConfig


def overlong_penalty(
    lengths: Sequence[int] | NDArray[np.int64], *, tokens: int, limit: int, factor: float = 1.0
) -> NDArray[np.float64]:
    """[E] what an episode's length costs: 0 down to -factor over the last `tokens` below `limit`.

    Soft overlong punishment, DAPO, arXiv:2503.14476, eq. 13. Longer than the limit costs no more.

    Args:
        lengths: [E] sampled tokens of each episode.
        tokens: Width of the stretch over which the penalty grows.
        limit: Tokens at which it is whole.
        factor: The whole penalty.
    """
    excess = np.asarray(lengths, dtype=np.float64) - (limit - tokens)
    return -factor * np.clip(excess / tokens, 0.0, 1.0)


def shape_rewards(
    rewards: Sequence[float | None] | NDArray[np.float64],
    lengths: Sequence[int] | NDArray[np.int64],
    config: RewardShapingConfig,
) -> NDArray[np.float64]:
    """[E] clip((reward + length penalty + bias) * scaling); NaN where there is no reward.

    Args:
        rewards: [E] as scored; None or NaN = left out.
        lengths: [E] sampled tokens of each episode.
        config: `overlong_limit_tokens` must be filled in where `overlong_tokens` is.
    """
    shaped = np.array([np.nan if r is None else r for r in rewards], dtype=np.float64)
    if config.overlong_tokens is not None:
        limit = config.overlong_limit_tokens
        if limit is None:
            raise ValueError(
                "reward_shaping.overlong_limit_tokens: is null with overlong_tokens = "
                f"{config.overlong_tokens}; must be the tokens at which the penalty is whole"
            )
        shaped += overlong_penalty(
            lengths,
            tokens=config.overlong_tokens,
            limit=limit,
            factor=config.overlong_penalty_factor,
        )
    shaped = (shaped + config.bias) * config.scaling
    return shaped if config.clip is None else np.clip(shaped, -config.clip, config.clip)


def shape_levels(rewards: Sequence[float], config: RewardShapingConfig) -> list[float]:
    """[E] the same without the length penalty: what tells siblings apart by what they achieved.

    Args:
        rewards: [E] as scored.
        config: Bias, scale and bounds.
    """
    plain = config.model_copy(update={"overlong_tokens": None})
    shaped: list[float] = shape_rewards(rewards, np.zeros(len(rewards), np.int64), plain).tolist()
    return shaped
