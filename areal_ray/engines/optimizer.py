"""AdamW, learning-rate schedules, and the guarded update the train engine takes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.train_config import OptimizerConfig
from areal_ray.errors import EngineError


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """Rate of step `step` (from 0): linear warm-up, then the schedule down to 0 at the end.

    Args:
        step: Steps taken before this one.
        total_steps: Steps of the whole run; beyond it the rate stays at its end.
        config: Peak, shape and warm-up.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.lr_scheduler_type == "constant":
        return config.lr
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.lr_scheduler_type == "linear":
        return config.lr * (1.0 - progress)
    return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What one call of `GuardedOptimizer.update` did."""

    grad_norm: float
    """Before clipping; may be infinite or NaN."""
    was_taken: bool
    """False where the gradient was not finite: weights and moments are untouched."""


class GuardedOptimizer:
    """AdamW that clips, and leaves everything alone when a gradient is not finite."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        self._config = config
        self._parameters = [p for p in parameters if p.requires_grad]
        matrices = [p for p in self._parameters if p.dim() >= 2]
        vectors = [p for p in self._parameters if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adamw = _torch_optimizer([group for group in groups if group["params"]], config)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """What takes the steps: matrices with weight decay, then vectors without."""
        return self._adamw

    def zero_grad(self) -> None:
        """Forget the gradient; its memory is kept."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def flat_gradient(self) -> Tensor:
        """[P] the whole gradient as one vector; zeros where a parameter has none."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return torch.cat([p.grad.reshape(-1) for p in self._parameters if p.grad is not None])

    def set_flat_gradient(self, flat: Tensor) -> None:
        """Inverse of `flat_gradient`."""
        offset = 0
        for parameter in self._parameters:
            assert parameter.grad is not None
            count = parameter.numel()
            parameter.grad.copy_(flat[offset : offset + count].view_as(parameter))
            offset += count

    def update(self, rate: float, grad_norm: float | None = None) -> UpdateStats:
        """Clip the gradient and take one step at learning rate `rate`.

        `grad_norm`: L2 norm of the whole gradient, where these parameters are a part of it.
        """
        if grad_norm is None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            grad_norm = float(nn.utils.get_total_norm(gradients))
        if not math.isfinite(grad_norm):
            return UpdateStats(grad_norm, was_taken=False)
        limit = self._config.gradient_clipping
        nn.utils.clip_grads_with_norm_(self._parameters, limit, torch.tensor(grad_norm))
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        return UpdateStats(grad_norm, was_taken=True)

    def update_together(self, rate: float, ranks: RankGroup) -> UpdateStats:
        """Sum the gradient over ranks, `update` and forget it; all come to the same weights."""
        if ranks.size > 1:
            self.set_flat_gradient(ranks.sum_(self.flat_gradient()))
        stats = self.update(rate)
        self.zero_grad()
        return stats

    @property
    def in_order(self) -> list[nn.Parameter]:
        """The parameters as `state_dict` counts them."""
        return [p for group in self._adamw.param_groups for p in group["params"]]

    def held_bytes(self) -> int:
        """Of moments and counts."""
        held = [v for state in self._adamw.state.values() for v in state.values()]
        return sum(t.numel() * t.element_size() for t in held if isinstance(t, Tensor))

    def state_dict(self) -> dict[str, Any]:
        """Moments and counts, for a checkpoint."""
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore moments and counts; rates, decay and the like stay as they are set here."""
        ours = [{k: v for k, v in g.items() if k != "params"} for g in self._adamw.param_groups]
        self._adamw.load_state_dict(state)
        for group, settings in zip(self._adamw.param_groups, ours, strict=True):
            group.update(settings)


def _torch_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """What `name` says.

    Raises:
        EngineError: Its package is missing, or cannot work where the parameters are.
    """
    how: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    devices = {p.device.type for group in groups for p in group["params"]}
    if config.name == "adamw":
        return torch.optim.AdamW(groups, **how, fused=devices <= {"cpu", "cuda"})
    if devices != {"cuda"}:
        raise EngineError(
            f"optimizer.name: is {config.name} with parameters on {', '.join(sorted(devices))}; "
            "must be adamw there."
        )
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise EngineError(
            f"optimizer.name: {config.name} needs the package bitsandbytes ({error}). Install "
            "areal-ray[adamw-8bit], or use adamw."
        ) from error
    found: torch.optim.Optimizer = AdamW8bit(groups, **how)
    return found
