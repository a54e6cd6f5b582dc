"""Generalised advantage estimation over the sampled tokens or turns of one trajectory.

Schulman et al., arXiv:1506.02438, eq. 16: A_t = delta_t + discount * lambda * A_{t+1} with
delta_t = r_t + discount * V_{t+1} - V_t. Step t + 1 is the next *sampled* token or turn: what a
tool said in between is no step. Beyond the last step stands `bootstrap`: the critic's value
there if the episode was cut short by a limit, 0 if it ended. All float64.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from areal_ray.algorithms.objective_parts import GaeConfig

Values = NDArray[np.float64]


def token_gae(
    rewards: Values,
    values: Values,
    *,
    discount: float,
    gae_lambda: float,
    bootstrap: float = 0.0,
    trained: NDArray[np.bool_] | None = None,
) -> tuple[Values, Values]:
    """[T] advantages and returns, where one step is one token.

    Args:
        rewards: [T] at each token.
        values: [T] the critic's before each token; zeros without a critic.
        discount: Of the next token's value.
        gae_lambda: 0 looks one step ahead, 1 to the end.
        bootstrap: Value beyond the last step.
        trained: [T] False on tokens that are no step, whose results are 0; None = all are.
    """
    if trained is not None:
        advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
        advantages[trained], returns[trained] = token_gae(
            rewards[trained],
            values[trained],
            discount=discount,
            gae_lambda=gae_lambda,
            bootstrap=bootstrap,
        )
        return advantages, returns
    following = np.append(values[1:], bootstrap)[: len(values)]
    deltas = rewards + discount * following - values
    advantages = _sum_ahead(deltas, discount * gae_lambda)
    return advantages, advantages + values


def turn_gae(
    rewards: Values,
    values: Values,
    turn_ids: NDArray[np.integer],
    *,
    discount: float,
    gae_lambda: float,
    bootstrap: float = 0.0,
) -> tuple[Values, Values]:
    """[T] advantages and returns, where one step is one turn: all its tokens have the same.

    A turn's reward is the sum over its tokens, its value that before its first token; there is
    no discount within a turn.

    Args:
        rewards: [T] over sampled tokens.
        values: [T]
        turn_ids: [T] never falling; equal on the tokens of one turn.
        discount: Of the next turn's value.
        gae_lambda: As in `token_gae`.
        bootstrap: Value beyond the last turn.
    """
    if not len(rewards):
        return np.zeros(0), np.zeros(0)
    changes = np.flatnonzero(np.diff(turn_ids)) + 1
    starts = np.concatenate([[0], changes])
    lengths = np.diff(np.append(starts, len(rewards)))
    advantages, returns = token_gae(
        np.add.reduceat(rewards, starts),
        values[starts],
        discount=discount,
        gae_lambda=gae_lambda,
        bootstrap=bootstrap,
    )
    return np.repeat(advantages, lengths), np.repeat(returns, lengths)


def _sum_ahead(deltas: Values, decay: float) -> Values:
    """[T] at t: the sum over k >= 0 of decay^k * deltas[t + k], in log2(T) array operations."""
    total, reach = deltas.astype(np.float64), 1
    while reach < len(total) and decay > 0.0:
        # `total` covers `reach` terms; as many again lie `reach` further on.
        ahead = decay**reach * total[reach:]
        total = np.concatenate([total[: len(ahead)] + ahead, total[len(ahead) :]])
        reach *= 2
    return total


def trajectory_lambdas(config: GaeConfig, lengths: Sequence[int] | NDArray[np.int64]) -> Values:
    """[N] lambda of each trajectory from its number of steps (tokens or turns).

    length_adaptive: 1 - 1 / (alpha * length), at least 0 (VAPO, arXiv:2504.05118, eq. 7).
    relative_position: share^(1 / (length - 1)), so that lambda^(length - 1) = share: the first
    step sees that share of the last one's surprise however long the trajectory is; 1 of one step.
    """
    steps = np.asarray(lengths, dtype=np.float64)
    if config.lambda_method == "length_adaptive":
        return np.maximum(0.0, 1.0 - 1.0 / (config.alpha * np.maximum(steps, 1.0)))
    if config.lambda_method == "relative_position":
        return np.where(steps > 1.0, config.share ** (1.0 / np.maximum(steps - 1.0, 1.0)), 1.0)
    return np.full(len(steps), config.gae_lambda)
