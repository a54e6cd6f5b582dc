"""Sums that ranks and micro-batches add up to, and the metrics made of them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from areal_ray.algorithms.packing import MicroBatch
from areal_ray.engines.optimizer import UpdateStats
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.train_rows import TrainCounts

_TOKENS = "tokens"
_MEANS = {
    "clipped": ("learner/clipped_fraction", _TOKENS),
    "dual_clipped": ("learner/dual_clipped_fraction", _TOKENS),
    "ratio": ("learner/ratio_mean", _TOKENS),
    "policy_kl": ("learner/policy_kl_nats", _TOKENS),
    "outside": ("learner/rejected_fraction", _TOKENS),
    "raw_weight": ("learner/behaviour_weight_mean", _TOKENS),
    "used_weight": ("learner/used_behaviour_weight_mean", _TOKENS),
    "behaviour_kl": ("learner/behaviour_kl_nats", _TOKENS),
    "entropy": ("learner/entropy_nats", _TOKENS),
    "correct": ("learner/token_accuracy_fraction", _TOKENS),
    "kl_reference": ("learner/kl_reference_nats", _TOKENS),
    "reward_kl": ("learner/kl_reference_nats", "judged_tokens"),
    "teacher_kl": ("learner/kl_teacher_nats", "judged_tokens"),
    "shaped_reward": ("reward/shaped_mean", "shaped_episodes"),
    "pair_accuracy": ("learner/pair_accuracy_fraction", "pairs"),
    "chosen_reward": ("reward/chosen_mean", "pairs"),
    "rejected_reward": ("reward/rejected_mean", "pairs"),
    "reward_margin": ("reward/margin_mean", "pairs"),
    "value_loss": ("learner/value_loss", "value_updates"),
    "fresh_kl": ("mismatch/kl_nats", "fresh_tokens"),
    "fresh_ratio": ("mismatch/ratio_mean", "fresh_tokens"),
    "aged_kl": ("mismatch/stale_kl_nats", "aged_tokens"),
    "aged_ratio": ("mismatch/stale_ratio_mean", "aged_tokens"),
}
"""Sum -> its metric, and what it is divided by."""
_LARGEST = {
    "max_ratio": ("learner/ratio_max", _TOKENS),
    "max_raw_weight": ("learner/behaviour_weight_max", _TOKENS),
    "max_fresh_ratio": ("mismatch/ratio_max", "fresh_tokens"),
    "max_aged_ratio": ("mismatch/stale_ratio_max", "aged_tokens"),
}
_SPREADS = ("returns", "returns_squared", "value_error", "value_error_squared")
_COUNTS = tuple({count: None for _, count in _MEANS.values()})
_SUMS = ("loss", *_COUNTS, *_MEANS, *_SPREADS)


class TokenTally:
    """Running sums and extremes over the computed tokens of one step, for one rank."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add [] tensors; `max_*` keep the larger. Nothing leaves the device."""
        for name, value in sums.items():
            value = value.detach().double()
            known = self._tensors.get(name)
            if known is None:
                self._tensors[name] = value
            elif name.startswith("max_"):
                self._tensors[name] = known.maximum(value)
            else:
                self._tensors[name] = known + value

    def add_numbers(self, sums: Mapping[str, float]) -> None:
        """The same for plain numbers."""
        self.add({name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()})

    def over_ranks(self, ranks: RankGroup) -> dict[str, float]:
        """The same over all ranks; names that no rank has are absent. Collective."""
        # Every rank sends the same names, also one that had nothing to compute.
        local = {name: float(value) for name, value in self._tensors.items()}
        names = [*_LARGEST, *_SUMS]
        found = ranks.max_numbers([float(name in local) for name in names])
        largest = ranks.max_numbers([local.get(name, 0.0) for name in _LARGEST])
        sums = ranks.sum_numbers([local.get(name, 0.0) for name in _SUMS])
        values = zip(names, [*largest, *sums], found, strict=True)
        return {name: value for name, value, is_known in values if is_known}


@dataclass(slots=True)
class Progress:
    """What happened to the updates of one step."""

    taken: int = 0
    empty: int = 0
    """Nothing to learn from on any rank."""
    non_finite: int = 0
    grad_norm_max: float = 0.0
    """Before clipping, over the updates taken."""

    rate: float = 0.0
    """Learning rate of the step."""

    def note(self, stats: UpdateStats) -> None:
        """Count an update that was tried."""
        self.taken += stats.was_taken
        self.non_finite += not stats.was_taken
        if stats.was_taken:
            self.grad_norm_max = max(self.grad_norm_max, stats.grad_norm)

    def metrics(self) -> dict[str, float]:
        """Updates taken and not taken."""
        return {
            "learner/lr": self.rate,
            "learner/updates": self.taken,
            "learner/empty_updates": self.empty,
            "learner/non_finite_updates": self.non_finite,
            "learner/skipped_steps": float(self.taken == 0),
            "learner/grad_norm_max": self.grad_norm_max,
        }


def token_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of what `TokenTally` gathered: means over the tokens that were computed.

    Where episodes with advantage 0 are skipped, their ratios and log-probs are not known.
    """
    metrics = {}
    for name, (metric, count) in _MEANS.items():
        if name in sums and sums.get(count):
            metrics[metric] = sums[name] / sums[count]
    for name, (metric, count) in _LARGEST.items():
        if name in sums and sums.get(count):
            metrics[metric] = sums[name]
    explained = _explained_fraction(sums)
    return metrics if explained is None else {**metrics, **explained}


def _explained_fraction(sums: Mapping[str, float]) -> dict[str, float] | None:
    """1 - variance of (return - value) / variance of the return; None where that has none."""
    count = sums.get("judged_tokens", 0.0)
    if not count or "returns" not in sums:
        return None
    variance = sums["returns_squared"] / count - (sums["returns"] / count) ** 2
    error = sums["value_error_squared"] / count - (sums["value_error"] / count) ** 2
    if variance <= 1e-12:
        return None
    return {"learner/value_explained_variance_fraction": 1.0 - error / variance}


def sum_counts(counts: Sequence[TrainCounts], ranks: RankGroup) -> list[TrainCounts]:
    """Counts of each minibatch over all ranks, in one exchange."""
    flat = [float(number) for c in counts for number in astuple(c)]
    summed = [round(number) for number in ranks.sum_numbers(flat)]
    width = len(astuple(TrainCounts()))
    return [TrainCounts(*summed[i : i + width]) for i in range(0, len(summed), width)]


def count_metrics(totals: Sequence[TrainCounts], max_staleness: int) -> dict[str, float]:
    """Metrics of what the minibatches of a step held, over all ranks."""
    tokens = sum(t.tokens for t in totals)
    return {
        "learner/trained_tokens": tokens,
        "learner/teaching_tokens": sum(t.teaching_tokens for t in totals),
        "learner/sequences": sum(t.sequences for t in totals),
        "learner/left_out_episodes": sum(t.left_out for t in totals),
        "learner/equal_reward_groups": sum(t.equal_groups for t in totals),
        "learner/masked_stale_tokens": sum(t.stale_tokens for t in totals),
        "staleness/mixed_episodes": sum(t.mixed_sequences for t in totals),
        "staleness/token_mean_versions": sum(t.staleness for t in totals) / max(1, tokens),
        "staleness/token_max_versions": max_staleness,
    }


def given_metrics(
    sums: Mapping[str, float],
    progress: Progress,
    work: Mapping[str, float],
    *,
    tokens: int,
    sequences: int,
) -> dict[str, float]:
    """Metrics of a step on given conversations or pairs.

    Args:
        sums: Of the step's `TokenTally`, over all ranks.
        progress: Of the step, at its end.
        work: `work_metrics` of it.
        tokens: Trained ones over all ranks.
        sequences: Over all ranks.
    """
    return {
        "learner/loss": sums.get("loss", 0.0),
        "learner/trained_tokens": tokens,
        "learner/sequences": sequences,
        **token_metrics(sums),
        **progress.metrics(),
        **work,
    }


def work_metrics(
    batches: Sequence[MicroBatch], tokens: int, started: float, ranks: RankGroup
) -> dict[str, float]:
    """Metrics of the forward passes of all ranks; collective.

    Args:
        batches: This rank's micro-batches.
        tokens: Trained tokens over all ranks.
        started: time.monotonic() at the start of the step.
        ranks: The other ranks.
    """
    batches = [b for b in batches if not b.is_empty]
    work = [float(len(batches)), float(sum(b.num_tokens for b in batches))]
    count, real, whole = ranks.sum_numbers([*work, float(sum(b.token_ids.size for b in batches))])
    seconds = time.monotonic() - started
    return {
        "learner/micro_batches": count,
        "learner/computed_tokens": real,
        "learner/padded_tokens": whole,
        "learner/step_s": seconds,
        "learner/tokens_per_s": tokens / max(1e-9, seconds),
    }
