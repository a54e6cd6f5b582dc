"""MismatchAlarm: says when rollout engine and learner no longer agree on the same weights."""

from collections.abc import Mapping

MISMATCH = "mismatch/kl_nats"


class MismatchAlarm:
    """One line when the mismatch first lies above the threshold; again after it has been below."""

    def __init__(self, threshold_nats: float | None) -> None:
        """Be silent for ever where the threshold is None."""
        self._threshold = threshold_nats
        self._is_on = False

    def check(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """What to tell after a step with these metrics, if anything."""
        found = metrics.get(MISMATCH)
        if self._threshold is None or found is None:
            return None
        was_on, self._is_on = self._is_on, found > self._threshold
        if was_on or not self._is_on:
            return None
        return (
            f"step {step}: {MISMATCH} is {found:.3g}, above telemetry.mismatch_alarm_nats = "
            f"{self._threshold:g}: rollout engine and learner disagree on tokens of the same "
            "weights. Compare their dtypes and kernels, or correct for it with objective kind "
            "'icepop' or 'kpop'."
        )
