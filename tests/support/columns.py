"""Token columns in float64, and derivatives by finite differences."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from areal_ray.algorithms.losses import TokenColumns
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import RejectionSamplingConfig
from areal_ray.algorithms.presets import PRESETS


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.float64)


def every(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


def columns_of(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    sequence_ids: Sequence[int] | None = None,
    **more: Tensor | None,
) -> TokenColumns:
    """One micro-batch with weights 1 / T, in one sequence unless told otherwise."""
    count = len(logprobs)
    ids = torch.tensor([0] * count if sequence_ids is None else sequence_ids, dtype=torch.int64)
    more.setdefault("token_weights", torch.full_like(advantages, 1.0 / max(1, count)))
    return TokenColumns(logprobs, behaviour, advantages, sequence_ids=ids, **more)


def gradient(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """By autograd."""
    point = at.detach().clone().requires_grad_(True)
    value(point).backward()
    return point.grad


def finite_differences(value: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Central differences, one coordinate at a time."""
    slopes, step = torch.zeros_like(at), 1e-6
    for place in range(len(at)):
        nudge = torch.zeros_like(at)
        nudge[place] = step
        slopes[place] = (value(at + nudge) - value(at - nudge)).detach() / (2 * step)
    return slopes


def every_correction() -> list[RejectionSamplingConfig]:
    """Each level, aggregation, metric and action that may stand together."""
    metrics = ("ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl")
    found = [RejectionSamplingConfig(metric=metric) for metric in metrics]
    found += [
        RejectionSamplingConfig(metric=metric, level="sequence", aggregation=aggregation)
        for metric in metrics
        for aggregation in ("sum", "mean", "max")
    ]
    found += [
        RejectionSamplingConfig(action="clamp", lower=0.5, level=level, aggregation=aggregation)
        for level, aggregation in (("token", "mean"), ("sequence", "sum"), ("sequence", "mean"))
    ]
    return found


def every_objective() -> dict[str, ObjectiveConfig]:
    """Each kind, decoupled PPO and REINFORCE with each correction, GSPO around the proximal."""
    found = {kind: ObjectiveConfig(kind=kind) for kind in PRESETS}
    for number, bounds in enumerate(every_correction()):
        whole = RejectionSamplingConfig(**bounds.model_dump())  # nothing left to the kind
        for kind in ("decoupled_ppo", "reinforce"):
            found[f"{kind}-{number}"] = ObjectiveConfig(kind=kind, rejection_sampling=whole)
    found["gspo-proximal"] = ObjectiveConfig(kind="gspo", clip_centre="proximal")
    found["full"] = ObjectiveConfig(kind="decoupled_ppo", behaviour_weight="full")
    return found
