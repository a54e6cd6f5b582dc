"""From the rewards of a step's episodes to the advantage of each token; numbers only.

Order: shaping, reward_norm, then per trajectory: rewards of tokens, GAE; then advantage_norm.
Statistics of scope batch are over all minibatches and ranks of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from areal_ray.algorithms.distillation import reverse_kl_rewards
from areal_ray.algorithms.gae import token_gae, trajectory_lambdas, turn_gae
from areal_ray.algorithms.kl import kl_estimate
from areal_ray.algorithms.normalise import SumOverRanks, normalise
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import RewardShapingConfig
from areal_ray.algorithms.shaping import shape_rewards
from areal_ray.core.numeric import is_flat
from areal_ray.engines.train_rows import Line, RowShare

Column = NDArray[np.float64]

_AS_SCORED = RewardShapingConfig()


@dataclass(frozen=True, slots=True)
class ShareScores:
    """What the rewards of one rank's share of a minibatch say, before tokens are looked at."""

    by_line: Column
    """[L] of each line: its episode's, less for a sub-agent."""
    equal_groups: int
    """Groups whose shaped rewards are as good as equal."""
    sums: dict[str, float]
    """For metrics."""


def score_step(
    shares: Sequence[RowShare], objective: ObjectiveConfig, sum_over_ranks: SumOverRanks
) -> list[ShareScores]:
    """Shaped and normalised rewards of all minibatches of a step."""
    assert objective.reward_norm is not None, "filled in by the kind"
    shaped = [_shaped(share, objective) for share in shares]
    rewards = _end_to_end([column for groups in shaped for column in groups])
    sizes = [len(column) for groups in shaped for column in groups]
    scores = normalise(
        rewards,
        ~np.isnan(rewards),
        np.repeat(np.arange(len(sizes)), sizes),
        objective.reward_norm,
        min_spread=objective.min_reward_spread,
        sum_over_ranks=sum_over_ranks,
    )
    found, start = [], 0
    for share, groups in zip(shares, shaped, strict=True):
        starts = start + np.cumsum([0, *map(len, groups)])
        by_line = [_line_score(line, scores, starts, objective) for line in share.lines]
        found.append(
            ShareScores(
                np.array(by_line, np.float64),
                sum(_is_equal(group, objective.min_reward_spread) for group in groups),
                _reward_sums(groups, objective),
            )
        )
        start = int(starts[-1])
    return found


def _shaped(share: RowShare, objective: ObjectiveConfig) -> list[Column]:
    """[group] -> [E] of each; NaN = left out."""
    return [
        shape_rewards(rewards, lengths, objective.reward_shaping)
        for rewards, lengths in zip(share.rewards, share.lengths, strict=True)
    ]


def _line_score(
    line: Line, scores: Column, starts: NDArray[np.int64], objective: ObjectiveConfig
) -> float:
    score = float(scores[starts[line.group] + line.episode])
    return score * objective.branch_discount**line.num_edges


def _is_equal(rewards: Column, min_spread: float) -> bool:
    return is_flat(rewards[~np.isnan(rewards)].tolist(), min_spread)


def _reward_sums(groups: Sequence[Column], objective: ObjectiveConfig) -> dict[str, float]:
    if objective.reward_shaping == _AS_SCORED:
        return {}
    known = _end_to_end([group[~np.isnan(group)] for group in groups])
    return {"shaped_reward": float(known.sum()), "shaped_episodes": float(len(known))}


def line_lengths(lines: Sequence[Line]) -> NDArray[np.int64]:
    """[L] trained tokens of each line."""
    return np.array([line.num_trained for line in lines], np.int64)


def step_normalised(
    shares: Sequence[RowShare],
    columns: Sequence[Column],
    objective: ObjectiveConfig,
    sum_over_ranks: SumOverRanks,
) -> list[Column]:
    """The advantages [M] of each minibatch after advantage_norm, over all trained tokens."""
    config = objective.advantage_norm
    assert config is not None, "filled in by the kind"
    if config.mean == config.std == "none":
        return list(columns)
    values, groups, offset = _end_to_end(columns), [], 0
    for share in shares:
        owners = np.array([line.group for line in share.lines], np.int64)
        groups.append(np.repeat(owners + offset, line_lengths(share.lines)))
        offset += len(share.rewards)
    normal = normalise(
        values,
        np.ones(len(values), bool),
        np.concatenate(groups) if groups else np.zeros(0, np.int64),
        config,
        min_spread=objective.min_reward_spread,
        sum_over_ranks=sum_over_ranks,
    )
    return np.split(normal, np.cumsum([len(column) for column in columns])[:-1])


@dataclass(frozen=True, slots=True)
class Signals:
    """What other models say of a share's M trained tokens; None where none is asked."""

    policy: Column | None = None
    """[M] log-probs of the policy at the start of the step."""
    reference: Column | None = None
    """[M] of the reference model."""
    teacher: Column | None = None
    """[M] of the teacher."""
    values: Column | None = None
    """[M] of the critic."""
    bootstraps: Column | None = None
    """[L] of the critic, beyond the end of truncated lines."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """Advantages of a share, token by token."""

    advantages: Column
    """[M]"""
    returns: Column
    """[M] what a critic should say."""
    sums: dict[str, float] = field(default_factory=dict)
    """For metrics."""


def token_advantages(
    share: RowShare, scores: Column, signals: Signals, objective: ObjectiveConfig
) -> TokenAdvantages:
    """Rewards of tokens, then GAE over each trajectory's trained tokens.

    The score stands at the last trained token, the other models' signals at their own; without a
    critic values are 0 and lambda is 1. Where an episode's first tokens are too old to train,
    GAE begins behind them.

    Args:
        share: Lines of whole groups.
        scores: [L] of `score_step`.
        signals: Of other models.
        objective: Weights, discount and lambda.
    """
    lengths = line_lengths(share.lines)
    ends = np.cumsum(lengths)
    rewards, sums = _token_rewards(int(ends[-1]) if len(ends) else 0, signals, objective)
    weight = 1.0 if objective.distillation is None else objective.distillation.rl_weight
    rewards[ends - 1] += weight * scores
    values = np.zeros(len(rewards)) if signals.values is None else signals.values
    advantages, returns = np.zeros(len(rewards)), np.zeros(len(rewards))
    lambdas = np.ones(len(lengths))
    if signals.values is not None:
        steps = [_num_steps(line, objective) for line in share.lines]
        lambdas = trajectory_lambdas(objective.gae, steps)
    bootstraps = np.zeros(len(lengths)) if signals.bootstraps is None else signals.bootstraps
    for number, line in enumerate(share.lines):
        own = slice(int(ends[number] - lengths[number]), int(ends[number]))
        advantages[own], returns[own] = _line_gae(
            line, rewards[own], values[own], float(lambdas[number]), float(bootstraps[number]),
            objective,
        )  # fmt: skip
    if signals.values is not None:
        sums |= _value_sums(returns, returns - values)
    return TokenAdvantages(advantages, returns, sums)


def _token_rewards(
    num_tokens: int, signals: Signals, objective: ObjectiveConfig
) -> tuple[Column, dict[str, float]]:
    """[M] what other models add to each token's reward."""
    rewards, sums = np.zeros(num_tokens), {"judged_tokens": float(num_tokens)}
    if signals.policy is None:
        return rewards, sums
    if signals.reference is not None and objective.kl is not None:
        estimates = kl_estimate(signals.policy, signals.reference, objective.kl.estimator)
        rewards -= objective.kl.kl_ctl * estimates
        sums["reward_kl"] = float(estimates.sum())
    if signals.teacher is not None and objective.distillation is not None:
        config = objective.distillation
        rewards += reverse_kl_rewards(
            signals.teacher, signals.policy, weight=config.weight, clip=config.clip
        )
        sums["teacher_kl"] = float((signals.policy - signals.teacher).sum())
    return rewards, sums


def _num_steps(line: Line, objective: ObjectiveConfig) -> int:
    if objective.gae.unit == "token":
        return line.num_trained
    return len(np.unique(line.trajectory.turn_ids[line.trained]))


def _line_gae(
    line: Line,
    rewards: Column,
    values: Column,
    gae_lambda: float,
    bootstrap: float,
    objective: ObjectiveConfig,
) -> tuple[Column, Column]:
    discount = objective.gae.discount
    if objective.gae.unit == "turn":
        turns = line.trajectory.turn_ids[line.trained]
        return turn_gae(
            rewards, values, turns, discount=discount, gae_lambda=gae_lambda, bootstrap=bootstrap
        )
    return token_gae(rewards, values, discount=discount, gae_lambda=gae_lambda, bootstrap=bootstrap)


def _value_sums(returns: Column, errors: Column) -> dict[str, float]:
    return {
        "returns": float(returns.sum()),
        "returns_squared": float(np.square(returns).sum()),
        "value_error": float(errors.sum()),
        "value_error_squared": float(np.square(errors).sum()),
    }


def _end_to_end(columns: Sequence[Column]) -> Column:
    return np.concatenate(columns) if columns else np.zeros(0)
