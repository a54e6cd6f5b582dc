"""Counting by reason, where a reason may quote anything: a run's memory must not grow with it."""

from collections import Counter

OTHER_REASONS = "other reasons"
MOST_REASONS = 256
"""Different ones that are told apart."""


def count_reason(counts: Counter[str], reason: str) -> None:
    """Count one more; once so many reasons are known, a new one counts among the others."""
    is_told = reason in counts or len(counts) < MOST_REASONS
    counts[reason if is_told else OTHER_REASONS] += 1
