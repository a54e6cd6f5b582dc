"""What becomes of a scored group, and when failing or filtering has become the rule."""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal_ray.core.numeric import is_flat
from areal_ray.core.summaries import GroupSummary, ScoreSummary
from areal_ray.core.versions import AdmissionConfig
from areal_ray.errors import TooManyFailures

EQUAL_REWARDS = "equal_rewards"
TRUNCATED = "truncated"
TOO_STALE = "too_stale"
_WAYS_OUT = {
    EQUAL_REWARDS: "The tasks are all solved or all out of reach: change the tasks, or set "
    "admission.drop_equal_rewards=false",
    TRUNCATED: "A limit cuts nearly all episodes short, and objective.mask_truncated leaves them "
    "out: raise rollout.sampling.max_new_tokens or agent.max_turns, or set it to false",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Trainable unless one of the two is set."""

    is_failure: bool = False
    """No usable result: the task is tried again."""
    is_drop: bool = False
    """A result that teaches nothing: another task takes its place."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the objective compares the siblings of a group; what is filtered must agree with it."""

    min_spread: float
    """Rewards that lie no further apart count as equal; in the unit of `shaped`."""
    leaves_out_truncated: bool
    """Episodes that a limit cut short do not count."""
    shaped: Callable[[Sequence[float]], Sequence[float]] = tuple
    """Rewards on the scale on which they are compared."""


def judge(
    made: GroupSummary, scored: ScoreSummary, config: AdmissionConfig, comparison: Comparison
) -> Verdict:
    """Whether a scored group is trained on.

    What the objective leaves out, or cannot tell apart, is no difference here either; but for the
    length penalty, which must not make a group look useful that is not.
    """
    if made.oldest_version < 0:
        return Verdict(is_failure=True, reason=_commonest(made, scored) or "nothing was sampled")
    if not scored.needs_rewards:
        is_failure = made.num_usable == 0
        return Verdict(is_failure, reason=_commonest(made, scored) if is_failure else "")
    rewards = scored.scored_rewards()
    if len(rewards) < config.scored_samples_needed:
        return Verdict(
            is_failure=True, reason=_commonest(made, scored) or "no sibling has a reward"
        )
    compared = scored.scored_rewards(with_truncated=not comparison.leaves_out_truncated)
    if config.drop_equal_rewards and is_flat(comparison.shaped(compared), comparison.min_spread):
        is_cut = len(compared) < 2 <= len(rewards)
        return Verdict(is_drop=True, reason=TRUNCATED if is_cut else EQUAL_REWARDS)
    return Verdict()


def _commonest(made: GroupSummary, scored: ScoreSummary) -> str:
    counts: Counter[str] = Counter()
    for failure in (*made.failures, *scored.failures):
        counts[f"{failure.outcome}: {failure.reason}"] += failure.count
    return counts.most_common(1)[0][0] if counts else ""


class FailureGuard:
    """Stops a run in which most groups fail, or that finds nothing to learn from."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        # Enough groups to tell a rule from bad luck, few enough to stop early.
        window = max(8, 4 * config.groups_per_step)
        self._recent: deque[str] = deque(maxlen=window)
        self._refilled = 0
        self._lost_s = -math.inf

    def succeeded(self) -> None:
        """A group was committed."""
        self._recent.append("")

    def step_began(self) -> None:
        """A step found enough groups: its refill budget starts anew."""
        self._refilled = 0

    def failed(self, reason: str) -> None:
        """A group failed.

        Raises:
            TooManyFailures: The share of failures is above `max_failed_share`.
        """
        self._recent.append(reason)
        reasons = Counter(reason for reason in self._recent if reason)
        enough = len(self._recent) >= max(8, self._config.groups_per_step)
        if enough and reasons.total() > self._config.max_failed_share * len(self._recent):
            reason, count = reasons.most_common(1)[0]
            raise TooManyFailures(
                f"{reasons.total()} of the last {len(self._recent)} groups failed; admission."
                f"max_failed_share is {self._config.max_failed_share:g}. Most frequent, {count} "
                f"times: {reason}"
            )

    def lost(self, admitted_s: float, lost_s: float, reason: str) -> None:
        """A group went down with an actor. One death takes many along, and counts once.

        Args:
            admitted_s: When the group was admitted (monotonic clock). Before the last death that
                was counted: it may have gone down with that one.
            lost_s: When it was lost.
            reason: Which actor, and why it died.

        Raises:
            TooManyFailures: As of `failed`.
        """
        if admitted_s > self._lost_s:
            self._lost_s = lost_s
            self.failed(reason)

    def refilled(self, reason: str) -> None:
        """A group was dropped since it teaches nothing, and another one is admitted for it.

        Raises:
            TooManyFailures: One step lost `max_refill_rounds` steps' worth of groups that way.
        """
        self._refilled += 1
        budget = self._config.max_refill_rounds * self._config.groups_per_step
        if self._refilled >= budget:
            raise TooManyFailures(
                f"{self._refilled} groups in a row were dropped ({reason}), the budget of one step "
                f"(admission.max_refill_rounds = {self._config.max_refill_rounds}). "
                + _WAYS_OUT.get(reason, _WAYS_OUT[EQUAL_REWARDS])
            )
