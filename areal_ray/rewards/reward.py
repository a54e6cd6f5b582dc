"""The contract of a reward function, and how what it returns is read.

    def score(task, trajectory, **args) -> float | dict | None      (or async def)

A dict has the number under "reward" and keeps the rest as details; None abstains. What is not a
finite number is no reward: the episode is unscored, with the reason, and never counts as zero.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from areal_ray.core.config import Config
from areal_ray.core.numeric import LARGEST_REWARD, as_number, is_reward
from areal_ray.errors import RecipeError

ABSTAIN = "areal_ray.rewards.reward:abstain"
"""Where nobody but the episodes themselves gives rewards."""

Reward = Callable[..., Any]
"""(task, trajectory, **args) -> number, mapping with "reward", None, or an awaitable of these."""


class RewardConfig(Config):
    """What scores the episodes, and within which limits."""

    score: str
    """`package.module:name` of the reward function."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""
    timeout_s: float = Field(5.0, gt=0.0)
    """Wall time for one episode; then its process is killed and the episode is unscored."""
    replicas: int = Field(1, ge=1)
    """RewardActors."""
    workers: int = Field(1, ge=1)
    """Scoring processes of each; a slow reward wants several."""
    memory_bytes: int | None = Field(None, ge=2**20)
    """Address space of a scoring process; null = unlimited."""
    start_timeout_s: float = Field(120.0, gt=0.0)
    """For a scoring process to import the reward."""
    num_cpus: float = Field(0.0, ge=0.0)
    """CPU cores reserved for each RewardActor."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of scoring one episode."""

    reward: float | None
    reason: str = ""
    """Why there is no reward; one line."""
    details: dict[str, Any] = field(default_factory=dict)
    """JSON values."""
    seconds: float = 0.0


def abstain(task: Any, trajectory: Any) -> None:
    """A reward function that leaves every episode unscored."""


def check_reward(reward: Any, config: RewardConfig) -> None:
    """Refuse, before anything starts, a reward that could not be called.

    Raises:
        RecipeError: It is not a function of (task, trajectory), or does not take `args`.
    """
    if not callable(reward):
        raise RecipeError(
            f"reward.score: '{config.score}' must be a function of (task, trajectory), it is a "
            f"{type(reward).__name__}."
        )
    try:
        inspect.signature(reward).bind(None, None, **config.args)
    except TypeError as error:
        raise RecipeError(
            f"reward.args: '{config.score}' cannot be called with (task, trajectory"
            f"{''.join(f', {name}=' for name in config.args)}): {error}."
        ) from error
    except ValueError:  # some builtins tell no signature
        return


def read_returned(returned: Any) -> Scored:
    """A reward function's return value as a verdict; never raises."""
    details: dict[str, Any] = {}
    if isinstance(returned, Mapping):
        if "reward" not in returned:
            keys = ", ".join(map(str, returned)) or "none"
            return Scored(None, f"the reward's dict has no 'reward'; its keys: {keys}")
        details = {str(k): _plain(v) for k, v in returned.items() if k != "reward"}
        returned = returned["reward"]
    if returned is None:
        return Scored(None, "the reward abstained", details)
    value = as_number(returned)
    if value is None:
        kind = type(returned).__name__
        return Scored(None, f"the reward returned a {kind}, not a number", details)
    if not is_reward(value):
        reason = f"the reward returned {value}, not a finite number within +-{LARGEST_REWARD:g}"
        return Scored(None, reason, details)
    return Scored(value, "", details)


def _plain(value: Any) -> Any:
    """The value as strict JSON can say it."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
