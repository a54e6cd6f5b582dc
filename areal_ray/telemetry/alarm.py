"""Says when rollout engine and learner no longer agree on the same weights.

MismatchAlarm rests upon tokens that the learner's own version sampled, of which an asynchronous run
may train on none; then it says that it is blind. ProbeAlarm rests upon the canary's fixed prompt,
which every publish looks at.
"""

from collections.abc import Iterable, Mapping

MISMATCH = "mismatch/kl_nats"
FRESH_TOKENS = "mismatch/fresh_tokens"
PROBE = "publish/probe_mean_nats"
_BLIND_AFTER_STEPS = 20


class MismatchAlarm:
    """One line when the mismatch first lies above the threshold; again after it has been below."""

    def __init__(self, threshold_nats: float | None) -> None:
        """Be silent for ever where the threshold is None."""
        self._threshold = threshold_nats
        self._is_on = False
        self._blind_steps = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What to tell after a step with these metrics, if anything."""
        found = metrics.get(MISMATCH)
        if self._threshold is None:
            return None
        if found is None:
            return self._count_blind(step) if metrics.get(FRESH_TOKENS) == 0 else None
        was_on, self._is_on = self._is_on, found > self._threshold
        if was_on or not self._is_on:
            return None
        return (
            f"step {step}: {MISMATCH} is {found:.3g}, above telemetry.mismatch_alarm_nats = "
            f"{self._threshold:g}: rollout engine and learner disagree on tokens of the same "
            "weights. Compare their dtypes and kernels, or correct for it with objective kind "
            "'icepop' or 'kpop'."
        )

    def _count_blind(self, step: int) -> str | None:
        self._blind_steps += 1
        if self._blind_steps != _BLIND_AFTER_STEPS:
            return None
        return (
            f"step {step}: note: {MISMATCH}, which tells whether rollout engine and learner agree, "
            f"was not to be had in {_BLIND_AFTER_STEPS} steps so far: all tokens in them were of "
            f"older versions. {PROBE} tells it after each publish, too; for {MISMATCH} run some "
            "steps with admission.max_head_offpolicyness=0."
        )


class ProbeAlarm:
    """One line when the probe's mean difference first lies above the threshold; again after it has
    been below."""

    def __init__(self, threshold_nats: float | None) -> None:
        """Be silent for ever where the threshold is None."""
        self._threshold = threshold_nats
        self._is_on = False

    def check(self, step: int, metrics: Iterable[tuple[str, float]]) -> str | None:
        """What to tell after a publish with these metrics, one of the name for each replica."""
        found = max((value for name, value in metrics if name == PROBE), default=None)
        if self._threshold is None or found is None:
            return None
        was_on, self._is_on = self._is_on, found > self._threshold
        if was_on or not self._is_on:
            return None
        return (
            f"step {step}: {PROBE} is {found:.3g}, above telemetry.probe_alarm_nats = "
            f"{self._threshold:g}: rollout engine and learner disagree on a fixed prompt under the "
            "same weights. Compare their dtypes and kernels."
        )
