"""ZeroModel: a model in the hands of DeepSpeed; see `sharding.PlacedModel`.

DeepSpeed averages the gradient over ranks where its sum is meant: each loss is first multiplied by
their number. Optimizer state is saved as torch's AdamW writes it, so that any kind of engine on
any number of ranks goes on from it.
Host memory: with stage 3 rank 0 alone reads the checkpoint, whole in float32, and hands out layer
after layer; below it each rank does. Saving gathers weights and moments whole on rank 0.
Waits for: the other ranks, in all but `weights`, `release` and `held_bytes`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from areal_ray.engines.deepspeed_settings import settings
from areal_ray.engines.memory_report import bytes_of
from areal_ray.engines.optimizer import GuardedOptimizer, UpdateStats
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.sharding import (
    ShardedTensor,
    check_source,
    decoder_layers,
    persistent_tensors,
)
from areal_ray.engines.tensor_parts import Extent, PartedTensor, PartGroup
from areal_ray.engines.train_config import DeepspeedConfig, OptimizerConfig

T = TypeVar("T")

_GATHERED_BYTES = 256 << 20
"""Weights that are whole at once while all are gathered, on each rank."""


class _Within(nn.Module):
    """Runs a computation as the forward pass of a module, so that ZeRO's hooks are around it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.compute: Callable[[], Any] = tuple

    def forward(self) -> Any:
        """What `compute` returns: tensors or a tuple of them."""
        return self.compute()


class _Together(torch.autograd.Function):
    """Identity of several tensors: the gradient of any one of them reaches all."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Alias each."""
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Autograd has put zeros where there was none."""
        return gradients


class ZeroModel:
    """A module whose optimizer state (stage 1) and gradient (stage 2) are shared out."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerConfig | None,
        config: DeepspeedConfig,
        ranks: RankGroup,
    ) -> None:
        """Hand the module over; rank 0's weights are taken by all. Collective."""
        import deepspeed

        self._module = module
        self._ranks = ranks
        self._splits_state = config.zero_stage > 0
        self._guarded: GuardedOptimizer | None = None
        self._trained: list[nn.Parameter] = []
        self._layout: list[dict[str, Any]] = []
        clipping = 0.0 if optimizer is None else optimizer.gradient_clipping
        told = settings(config.config, config.keys, gradient_clipping=clipping)
        _stand_in(module)
        ranks.broadcast_(module.buffers())
        if optimizer is not None:
            self._guarded = GuardedOptimizer(module.parameters(), optimizer)
            # DeepSpeed will put flat tensors of its own in the place of these.
            self._trained = self._guarded.in_order
            self._layout = self._guarded.state_dict()["param_groups"]
        self._split(told, config.device)
        self._within = _Within(module)
        self._engine: Any = deepspeed.initialize(
            model=self._within,
            optimizer=None if self._guarded is None else self._guarded.inner,
            config=told,
            dist_init_required=False,
        )[0]

    def run(self, compute: Callable[..., T], *arguments: Any) -> T:
        """See `PlacedModel`."""
        self._within.compute = partial(compute, *arguments)
        try:
            found: Any = self._engine()
        finally:
            self._within.compute = tuple
        if isinstance(found, tuple) and torch.is_grad_enabled():
            # ZeRO-3 counts by hooks what it fetches for the backward pass: each rank must come by
            # the same ones, although a pass on nothing uses less of what came out.
            moved = [n for n, tensor in enumerate(found) if tensor.requires_grad]
            joined: Any = ()
            if moved:
                joined = _Together.apply(*(found[n] for n in moved))  # type: ignore[no-untyped-call]
            known = dict(zip(moved, joined, strict=True))
            found = tuple(known.get(n, tensor) for n, tensor in enumerate(found))
        return cast(T, found)

    def num_passes(self, own: int) -> int:
        """The most of any rank: ZeRO exchanges gradients (and weights) in the passes."""
        return round(self._ranks.max_numbers([float(own)])[0])

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """See `PlacedModel`; DeepSpeed takes the mean over ranks, where the sum is meant."""
        self._engine.backward(loss * self._ranks.size)

    def update(self, rate: float) -> UpdateStats:
        """See `PlacedModel`."""
        guarded = self._trains()
        if not self._splits_state:
            self._engine.buffered_allreduce_fallback()
            stats = guarded.update(rate)
            guarded.zero_grad()
            return stats
        for group in guarded.inner.param_groups:
            group["lr"] = rate
        self._engine.step()
        return UpdateStats(
            float(self._engine.get_global_grad_norm()), was_taken=self._engine.was_step_applied()
        )

    def weights(self) -> Mapping[str, Tensor | ShardedTensor]:
        """See `PlacedModel`."""
        return {name: tensor.detach() for name, tensor in self._module.named_parameters()}

    def serve(self) -> None:
        """Rank 0 has all it needs."""

    def release(self) -> None:
        """Nobody waits."""

    def gathered(self) -> dict[str, Tensor]:
        """See `PlacedModel`."""
        found: dict[str, Tensor] = {}
        tensors = persistent_tensors(self._module)
        for names in _parts(tensors):
            with self._whole([tensors[name] for name in names]):
                if self._ranks.rank == 0:
                    found |= {name: tensors[name].detach().cpu().clone() for name in names}
        return found

    def take(self, source: Mapping[str, Tensor]) -> None:
        """See `PlacedModel`."""
        tensors = persistent_tensors(self._module)
        if self._reads_source:
            check_source({name: self._like(tensor) for name, tensor in tensors.items()}, source)
        for names in _parts(tensors):
            with self._whole([tensors[name] for name in names], is_changed=True):
                for name in names if self._reads_source else ():
                    tensors[name].detach().copy_(source[name])
        self._ranks.broadcast_(self._module.buffers())
        if self._guarded is not None and self._splits_state:
            self._engine.optimizer.refresh_fp32_params()

    def state_dict(self) -> dict[str, Any]:
        """See `PlacedModel`; as torch's AdamW writes it, so that any kind of engine can go on."""
        from deepspeed.utils import safe_get_full_optimizer_state

        guarded = self._trains()
        if not self._splits_state:
            return guarded.state_dict() if self._ranks.rank == 0 else {}
        states = [state for state in guarded.inner.state.values() if "step" in state]
        found: dict[int, dict[str, Tensor]] = {}
        if states:  # a step has been taken
            self._link_state()
            for number, parameter in enumerate(self._trained):
                whole = {
                    key: safe_get_full_optimizer_state(parameter, key)
                    for key in ("exp_avg", "exp_avg_sq")
                }
                if self._ranks.rank == 0:
                    found[number] = {key: tensor.cpu() for key, tensor in whole.items()}
                    found[number]["step"] = states[0]["step"].detach().cpu().clone()
        return {} if self._ranks.rank else {"state": found, "param_groups": self._layout}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PlacedModel`."""
        guarded = self._trains()
        if not self._splits_state:
            guarded.load_state_dict(state)
            return
        known = state["state"]
        guarded.inner.state.clear()
        if not known:
            return
        for flat in self._flat_parts():
            step = torch.tensor(float(known[0]["step"]), device=flat.device)
            guarded.inner.state[flat] = {
                "step": step,
                "exp_avg": torch.zeros_like(flat, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(flat, requires_grad=False),
            }
        self._link_state()
        for number, parameter in enumerate(self._trained):
            for key in ("exp_avg", "exp_avg_sq"):
                value = known[number][key]
                if tuple(value.shape) != tuple(self._like(parameter).shape):
                    raise ValueError(f"the state of parameter {number} has another shape")
                self._set_state(parameter, value.to(parameter.device), key)

    def held_bytes(self) -> tuple[int, int]:
        """See `memory_report.CountsBytes`; DeepSpeed steps on a copy of this rank's part."""
        tensors: list[Any] = [*self._module.parameters(), *self._module.buffers()]
        held = bytes_of([getattr(tensor, "ds_tensor", tensor) for tensor in tensors])
        if self._guarded is None:
            return held, 0
        copied = self._flat_parts() if self._splits_state else []
        return held, self._guarded.held_bytes() + bytes_of(copied)

    @property
    def _reads_source(self) -> bool:
        """Whether this rank copies what it is to `take`."""
        return True

    def _trains(self) -> GuardedOptimizer:
        assert self._guarded is not None, "placed without an optimizer: a frozen model"
        return self._guarded

    def _split(self, told: dict[str, Any], device: str) -> None:
        """Share the weights out, before DeepSpeed is given the module."""

    def _flat_parts(self) -> Sequence[Tensor]:
        """What AdamW keeps state of on this rank."""
        parts: Sequence[Tensor] = self._engine.optimizer.single_partition_of_fp32_groups
        return parts

    def _link_state(self) -> None:
        """Let `safe_*_optimizer_state` find the state of all groups.

        DeepSpeed links them once, when the first group alone has taken its first step.
        """
        self._engine.optimizer._hp_optimizer_states_linked = False
        self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _set_state(self, parameter: Any, whole: Tensor, key: str) -> None:
        """Take this rank's part of one parameter's state."""
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(parameter, whole, key)

    def _whole(self, tensors: Sequence[Tensor], *, is_changed: bool = False) -> Any:
        """A context in which these are whole on this rank."""
        return torch.no_grad()

    def _like(self, tensor: Tensor) -> Tensor:
        """A tensor with the shape of the whole."""
        return tensor


class WeightShardedModel(ZeroModel):
    """A module whose weights are shared out too (stage 3); each is whole where it is used."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerConfig | None,
        config: DeepspeedConfig,
        published: PartGroup,
    ) -> None:
        """See `ZeroModel`."""
        self._published = published
        super().__init__(module, optimizer, config, published.ranks)
        named: Iterator[tuple[str, Any]] = module.named_parameters()
        self._parameters = dict(named)

    def _split(self, told: dict[str, Any], device: str) -> None:
        import deepspeed

        # One part after the other, so that no device and no other rank holds the whole module.
        for part in (*decoder_layers(self._module), self._module):
            for parameter in part.parameters():
                if self._ranks.rank and not hasattr(parameter, "ds_id"):
                    parameter.data = torch.empty(parameter.shape, device=device)
            deepspeed.zero.Init(module=part, config_dict_or_path=told, dtype=torch.float32)
        for name, buffer in list(self._module.named_buffers()):
            owner, _, last = name.rpartition(".")
            setattr(self._module.get_submodule(owner), last, buffer.to(device))

    def weights(self) -> Mapping[str, Tensor | ShardedTensor]:
        """See `PlacedModel`."""

        def reader(index: int, parameter: Any) -> Callable[[int, int], Tensor]:
            extents = [_extent(parameter, rank) for rank in range(self._ranks.size)]

            def read(start: int, stop: int) -> Tensor:
                bounds = Extent(start, stop - start)
                return self._published.read(index, bounds, extents, parameter.ds_tensor.detach())

            return read

        return {
            name: PartedTensor(tuple(parameter.ds_shape), parameter.dtype, reader(index, parameter))
            for index, (name, parameter) in enumerate(self._parameters.items())
        }

    def serve(self) -> None:
        """See `PlacedModel`."""
        parameters = list(self._parameters.values())

        def part_of(index: int) -> tuple[Extent, Tensor]:
            parameter = parameters[index]
            return _extent(parameter, self._ranks.rank), parameter.ds_tensor.detach()

        self._published.answer(part_of)

    def release(self) -> None:
        """See `PlacedModel`."""
        self._published.release()

    @property
    def _reads_source(self) -> bool:
        return self._ranks.rank == 0  # DeepSpeed takes rank 0's

    def _flat_parts(self) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = self._engine.optimizer.fp32_partitioned_groups_flat
        return parts

    def _link_state(self) -> None:
        """Stage 3 looks the state up each time."""

    def _set_state(self, parameter: Any, whole: Tensor, key: str) -> None:
        from deepspeed.utils import safe_set_local_optimizer_state

        # DeepSpeed's own way from the whole fails where the last part is padded.
        extent = _extent(parameter, self._ranks.rank)
        own = torch.zeros_like(parameter.ds_tensor)
        own[: extent.count] = whole.flatten()[extent.start : extent.start + extent.count]
        safe_set_local_optimizer_state(parameter, own, key)

    def _whole(self, tensors: Sequence[Tensor], *, is_changed: bool = False) -> Any:
        from deepspeed.runtime.zero import GatheredParameters

        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        return GatheredParameters(parameters, modifier_rank=0 if is_changed else None)

    def _like(self, tensor: Tensor) -> Tensor:
        shape = getattr(tensor, "ds_shape", tensor.shape)
        return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _stand_in(module: nn.Module) -> None:
    """Give what has no weights here real tensors of their shapes, parameters of one element."""
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for owner in module.modules():
        for home in (owner._parameters, owner._buffers):
            for name, tensor in home.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    real: Tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        one = torch.empty(1, dtype=tensor.dtype).expand(tensor.shape)
                        real = nn.Parameter(one, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = (tensor, real)  # held: its id must not be used again
                home[name] = made[id(tensor)][1]  # type: ignore[assignment]


def _extent(parameter: Any, rank: int) -> Extent:
    """Where a rank's part of a parameter that ZeRO has split lies, without the padding."""
    size = parameter.ds_tensor.numel()
    start = min(rank * size, parameter.ds_numel)
    return Extent(start, min(size, parameter.ds_numel - start))


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of tensors that are whole at the same time."""
    part: list[str] = []
    used = 0
    for name, tensor in tensors.items():
        size = getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size()
        if part and used + size > _GATHERED_BYTES:
            yield part
            part, used = [], 0
        part.append(name)
        used += size
    if part:
        yield part
