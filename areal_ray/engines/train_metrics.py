"""Sums that ranks and micro-batches add up to, and the metrics made of them."""

from collections.abc import Mapping

from torch import Tensor

from areal_ray.engines.process_group import RankGroup

_MEANS = {
    "clipped": "learner/clipped_share",
    "dual_clipped": "learner/dual_clipped_share",
    "ratio": "learner/ratio_mean",
    "policy_kl": "learner/policy_kl_nats",
    "rejected": "learner/rejected_share",
    "behaviour_weight": "learner/behaviour_weight_mean",
    "used_behaviour_weight": "learner/used_behaviour_weight_mean",
    "behaviour_kl": "learner/behaviour_kl_nats",
    "entropy": "learner/entropy_nats",
    "correct": "learner/token_accuracy_share",
}
_MAXIMA = {
    "max_ratio": "learner/ratio_max",
    "max_behaviour_weight": "learner/behaviour_weight_max",
}


class TokenTally:
    """Running sums and maxima over the computed tokens of one step, for one rank."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add [] tensors; names that start with `max_` keep the larger. Nothing leaves the GPU."""
        for name, value in sums.items():
            value = value.detach().double()
            known = self._tensors.get(name)
            if known is None:
                self._tensors[name] = value
            else:
                is_max = name.startswith("max_")
                self._tensors[name] = known.maximum(value) if is_max else known + value

    def over_ranks(self, ranks: RankGroup) -> dict[str, float]:
        """Metrics over all ranks. Means are over computed tokens; collective.

        Groups that were skipped because nothing of them can change the gradient are not in the
        means: their ratios were not computed.
        """
        # Every rank sends the same names, also one that had nothing to compute.
        names = ["tokens", *_MEANS]
        sums = ranks.sum_numbers([self._number(n) for n in names] + [self._number("loss")])
        known = ranks.max_numbers([float(n in self._tensors) for n in [*names, *_MAXIMA]])
        present = {n for n, k in zip([*names, *_MAXIMA], known, strict=True) if k}
        maxima = ranks.max_numbers([self._number(n) for n in _MAXIMA])
        metrics = {"learner/loss": sums[-1]}
        tokens = sums[0]
        for name, value in zip(names[1:], sums[1:-1], strict=True):
            if name in present and tokens:
                metrics[_MEANS[name]] = value / tokens
        for (name, metric), value in zip(_MAXIMA.items(), maxima, strict=True):
            if name in present:
                metrics[metric] = value
        return metrics

    def _number(self, name: str) -> float:
        return float(self._tensors[name]) if name in self._tensors else 0.0
