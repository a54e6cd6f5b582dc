"""What a rank's memory holds: parameters, optimizer state, and what passes keep for backward."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.protocols import StepStats


@runtime_checkable
class CountsBytes(Protocol):
    """A placed model that can say what it holds on this rank."""

    def held_bytes(self) -> tuple[int, int]:
        """Of parameters and buffers, and of the optimizer's state."""


class ActivationMeter:
    """Bytes that the largest pass so far has kept for its backward pass.

    On CUDA what the allocator says. On CPU the tensors that autograd saves, each storage once;
    those with the shape of a parameter count as such.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.most_bytes = 0
        self._largest_tokens = 0
        self.device = device
        shapes = [tuple(p.shape) for p in module.parameters()]
        self._parameter_shapes = {*shapes, *(shape[::-1] for shape in shapes)}

    @contextmanager
    def over(self, num_tokens: int) -> Iterator[None]:
        """Around a forward pass; costs nothing where a larger one was seen."""
        if not torch.is_grad_enabled() or num_tokens <= self._largest_tokens:
            yield
            return
        self._largest_tokens = num_tokens
        if self.device.type == "cuda":
            before = torch.cuda.memory_allocated()
            yield
            self.most_bytes = max(self.most_bytes, torch.cuda.memory_allocated() - before)
            return
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            if tuple(tensor.shape) not in self._parameter_shapes:
                local: Tensor = getattr(tensor, "_local_tensor", tensor)  # of a distributed one
                storage = local.untyped_storage()
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        self.most_bytes = max(self.most_bytes, sum(saved.values()))


class Metered(Protocol):
    """Forward passes of one model."""

    meter: ActivationMeter
    placed: Any


class HasForward(Protocol):
    """A model beside the policy."""

    @property
    def forward(self) -> Metered:
        """Its passes."""


class MemoryReport:
    """The metrics, over all models of a train engine."""

    def __init__(
        self, policy: Metered, beside: Sequence[HasForward | None], ranks: RankGroup
    ) -> None:
        """`beside`: the other models; one may be the policy itself without its adapters."""
        others = [model.forward for model in beside if model is not None]
        forwards = {id(forward): forward for forward in (policy, *others)}.values()
        self._placed = [f.placed for f in forwards if isinstance(f.placed, CountsBytes)]
        self._meters = [forward.meter for forward in forwards]
        self._ranks = ranks

    def told(self, stats: StepStats) -> StepStats:
        """The stats of a step with what the fullest rank holds. Collective."""
        held = [p.held_bytes() for p in self._placed]
        numbers = {
            "learner/parameter_bytes": sum(parameters for parameters, _ in held),
            "learner/optimizer_bytes": sum(state for _, state in held),
            "learner/activation_bytes": max(meter.most_bytes for meter in self._meters),
        }
        if self._meters[0].device.type == "cuda":
            numbers["learner/device_memory_bytes"] = torch.cuda.max_memory_allocated()
        largest = self._ranks.max_numbers([float(number) for number in numbers.values()])
        return replace(stats, metrics={**stats.metrics, **dict(zip(numbers, largest, strict=True))})


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of plain tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)
