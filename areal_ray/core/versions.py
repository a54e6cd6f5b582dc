"""How far rollouts may run ahead of the learner: the arithmetic of staleness, all of it."""

from typing import Literal

from pydantic import Field, model_validator

from areal_ray.core.config import Config

UNLIMITED = "unlimited"


class AdmissionConfig(Config):
    """What may start, what is too old to train on, and when failures stop the run."""

    groups_per_step: int = Field(ge=1)
    """Groups consumed by one learner step."""
    n_samples: int = Field(8, ge=1)
    """Sibling episodes of one task in a group."""
    max_head_offpolicyness: int | Literal["unlimited"] = 2
    """Largest learner version - oldest behaviour version of a consumed group. 0 = synchronous."""
    max_concurrent_rollouts: int | None = Field(None, ge=1)
    """Groups in flight at most. null = as many as max_head_offpolicyness allows. Where that is
    unlimited, twice as many and a step's may be in flight or wait for the learner."""
    at_consumption: Literal["drop", "wait", "mask"] = "drop"
    """A group that would be too old when the learner takes it: drop it, wait so that it never
    gets that old, or mask its old tokens. Holds the bound in every case."""
    drop_equal_rewards: bool = False
    """Leave out groups whose siblings all got the same reward, as the objective compares them
    (mask_truncated, min_reward_spread), and admit others in their place."""
    max_refill_rounds: int = Field(10, ge=1)
    """Steps' worth of groups that one step may lose to drop_equal_rewards before the run stops."""
    min_scored_samples: int | None = Field(None, ge=1)
    """Siblings with a reward that a group needs. null = 2, or 1 where n_samples is 1."""
    max_attempts: int = Field(3, ge=1)
    """Times a task is tried before it is given up."""
    max_failed_share: float = Field(0.5, gt=0.0, le=1.0)
    """Share of failed groups, over the last 4 steps' worth, that stops the run."""

    @model_validator(mode="after")
    def _check(self) -> "AdmissionConfig":
        bound = self.max_head_offpolicyness
        if isinstance(bound, int) and bound < 0:
            raise ValueError(
                f"max_head_offpolicyness: is {bound}; must be >= 0. 0 = synchronous, "
                "'unlimited' = no bound"
            )
        if bound == UNLIMITED and self.at_consumption != "drop":
            raise ValueError(
                f"at_consumption: is {self.at_consumption!r} with max_head_offpolicyness "
                "'unlimited'; without a bound there is nothing to hold. Set a bound, or 'drop'"
            )
        if bound == UNLIMITED and self.max_concurrent_rollouts is None:
            raise ValueError(
                "max_concurrent_rollouts: is null with max_head_offpolicyness 'unlimited'; "
                "something must bound the groups in flight. Set a number"
            )
        needed = self.min_scored_samples
        if needed is not None and needed > self.n_samples:
            raise ValueError(
                f"min_scored_samples: is {needed}; must be <= n_samples = {self.n_samples}"
            )
        if self.drop_equal_rewards and self.n_samples == 1:
            raise ValueError(
                "drop_equal_rewards: is true with n_samples = 1; a single sample always equals "
                "itself, so every group would be dropped. Set it to false or raise n_samples"
            )
        return self

    @property
    def scored_samples_needed(self) -> int:
        """Siblings with a reward below which a group teaches nothing."""
        return self.min_scored_samples or min(2, self.n_samples)

    @property
    def concurrent_groups(self) -> int:
        """Groups that may be in flight at once."""
        if self.max_concurrent_rollouts is not None:
            return self.max_concurrent_rollouts
        assert self.max_head_offpolicyness != UNLIMITED
        return (int(self.max_head_offpolicyness) + 1) * self.groups_per_step

    @property
    def unconsumed_groups(self) -> int:
        """Groups that may be in flight or wait for the learner at once."""
        return 2 * self.concurrent_groups + self.groups_per_step


def admissible_groups(version: int, admitted: int, running: int, config: AdmissionConfig) -> int:
    """How many more groups (>= 0) may start now without any becoming too stale to train on.

    Group n (from 0) is consumed at version n // groups_per_step, so it is fresh enough while
    n < (version + max_head_offpolicyness + 1) * groups_per_step.  AReaL, arXiv:2505.24298, 5.1.
    Without such a bound a learner that is slower than the rollouts still holds them up.

    Args:
        version: Version the rollout fleet samples from now.
        admitted: Groups admitted since version 0, less those released unconsumed.
        running: Groups in flight: admitted, and neither in the queue nor ended.
    """
    free = config.concurrent_groups - running
    bound = config.max_head_offpolicyness
    if bound == UNLIMITED:
        consumed = version * config.groups_per_step
        return max(0, min(free, config.unconsumed_groups - (admitted - consumed)))
    return max(0, min(free, (version + int(bound) + 1) * config.groups_per_step - admitted))


def oldest_allowed(version: int, config: AdmissionConfig) -> int:
    """Oldest behaviour version that a learner at `version` may train on; may be negative."""
    if config.max_head_offpolicyness == UNLIMITED:
        return 0
    return version - int(config.max_head_offpolicyness)


def must_wait_for(
    taken: list[int], left: list[int], running: list[int], config: AdmissionConfig, version: int
) -> list[int]:
    """Indices into `running` of groups that this step must wait for, so that none gets too old.

    All arguments are behaviour versions (for running groups the version they were admitted at, a
    lower bound). A group of version b is due at step b + max_head_offpolicyness. If the step took
    `taken` now, every later step u could still take (u - version) * groups_per_step groups; where
    more than that are due by u, and waiting could put one of them in place of a taken group that
    is due later, the step has to wait. Running groups always end, so this cannot deadlock; where
    waiting cannot help (too many finished groups are due at once) the surplus is dropped.
    """
    if config.max_head_offpolicyness == UNLIMITED:
        return []
    bound = int(config.max_head_offpolicyness)
    for step in range(version, version + bound + 1):
        newest_due = step - bound
        due = sum(b <= newest_due for b in left) + sum(b <= newest_due for b in running)
        capacity = (step - version) * config.groups_per_step
        replaceable = any(b > newest_due for b in taken)
        short = len(taken) < config.groups_per_step
        if due > capacity and (replaceable or short):
            waited = [i for i, b in enumerate(running) if b <= newest_due]
            if waited:
                return waited
    return []
