"""FSDP2: each rank holds a part of every parameter, gradient and moment.

`fully_shard` on each decoder layer and on what is left (embedding, last norm, heads): a layer is
whole only while it computes. Gradients are summed, not averaged. Frozen models are sharded too.
Ranks are torch.distributed ranks over gloo on CPU and NCCL on CUDA.

Host memory: rank 0 reads the checkpoint, whole in float32, and hands layer after layer out; each
other rank holds its parts and one layer. Saving gathers weights and moments whole on rank 0.
Waits for: the other ranks, in every pass.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from areal_ray.engines.memory_report import bytes_of
from areal_ray.engines.optimizer import GuardedOptimizer, UpdateStats
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.sequence_parallel import SequenceRanks
from areal_ray.engines.sharding import (
    PlacedModel,
    ShardedTensor,
    check_source,
    decoder_layers,
    persistent_tensors,
)
from areal_ray.engines.tensor_parts import Extent, PartedTensor, PartGroup
from areal_ray.engines.tensor_plan import TensorPlan
from areal_ray.engines.train_config import FsdpConfig, OptimizerConfig
from areal_ray.errors import EngineError

T = TypeVar("T")


class Fsdp:
    """Shards every model over all ranks."""

    def __init__(self, config: FsdpConfig, ranks: RankGroup) -> None:
        """Collective; makes a process group of one where the rank is alone."""
        self._config = config
        self._ranks = ranks
        ranks.initialise_alone()
        width = config.tensor_parallel
        shape, names = (ranks.size // width, width), ("data", "tensor")
        self._mesh = init_device_mesh(config.device, shape, mesh_dim_names=names)
        # Two, since a publish reads on a thread of its own, beside the engine's.
        self._parts = PartGroup(ranks, config.collective_timeout_s)
        self._published = PartGroup(ranks, config.collective_timeout_s)
        self.loads_to = "cpu" if ranks.rank == 0 else "meta"
        self.is_sharded = ranks.size > 1
        width = config.sequence_parallel
        self.sequence = SequenceRanks(ranks, width) if width > 1 else None

    def agreed(self, answers: tuple[bool, ...]) -> tuple[bool, ...]:
        """See `Sharding`; rank 0 has the model, on others nothing is true of it."""
        return tuple(map(bool, self._ranks.max_numbers([float(a) for a in answers])))

    def place(self, module: nn.Module, optimizer: OptimizerConfig | None = None) -> PlacedModel:
        """See `Sharding`."""
        if optimizer is not None and optimizer.name != "adamw":
            raise EngineError(
                f"optimizer.name: is {optimizer.name} with learner.engine.kind fsdp; must be adamw."
            )
        root = _Pass(module)
        plan = TensorPlan(module, self._mesh)
        for part in (*decoder_layers(module), root):
            self._materialise(part)
            if part is not root:
                plan.cut(part)
            sharded = fully_shard(part, **self._how(plan.data_mesh))
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
        groups = (self._parts, self._published)
        return FsdpModel(module, root, optimizer, groups, plan)

    def _how(self, mesh: DeviceMesh) -> dict[str, Any]:
        config = self._config
        precision = MixedPrecisionPolicy()
        if config.dtype == "bfloat16":
            precision = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, config.reduce_dtype)
            )
        return {
            "mesh": mesh,
            # None: what belongs to no layer stays whole between forward and backward pass.
            "reshard_after_forward": None if config.reshard_after_forward else False,
            "mp_policy": precision,
            "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
        }

    def _materialise(self, part: nn.Module) -> None:
        """Bring what of a part is not sharded yet to the device, with rank 0's values."""
        known: dict[int, tuple[Tensor, Tensor]] = {}
        for owner in part.modules():
            for home, name, tensor in _own_tensors(owner):
                if id(tensor) not in known:
                    real = self._real(tensor)
                    known[id(tensor)] = (tensor, real)  # held: its id must not be used again
                home[name] = known[id(tensor)][1]

    def _real(self, tensor: Tensor) -> Tensor:
        device = self._config.device
        if tensor.is_meta:
            real = torch.empty_like(tensor, device=device)
        else:
            real = tensor.detach().to(device)
        self._ranks.broadcast_([real])
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(real, requires_grad=tensor.requires_grad) if is_parameter else real


class _Pass(nn.Module):
    """What is called for a pass: FSDP gathers and frees parameters around calls of modules."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[..., T], *arguments: Any) -> T:
        """Whatever is to be computed; a tensor or a tuple of them."""
        found: Any = compute(*arguments)
        # FSDP hooks into what comes out, which a view would lose.
        return cast(T, tuple(map(_owned, found)) if isinstance(found, tuple) else _owned(found))


def _owned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor._is_view() else tensor


class FsdpModel:
    """A module that lies in parts over the ranks; see `sharding.PlacedModel`."""

    def __init__(
        self,
        module: nn.Module,
        root: nn.Module,
        optimizer: OptimizerConfig | None,
        groups: tuple[PartGroup, PartGroup],
        plan: TensorPlan,
    ) -> None:
        """Take over what was sharded. Collective."""
        self._plan = plan
        self._root = cast(FSDPModule, root)
        self._tensors = persistent_tensors(module)
        """Parameters are DTensors, buffers whole; these objects stay the same."""
        self._parts, self._published = groups
        self._ranks = self._parts.ranks
        self._names = [name for name, _ in module.named_parameters()]
        own = {name: plan.extent(self._tensors[name]) for name in self._names}
        self._extents = self._parts.extents(own)
        self._optimizer: GuardedOptimizer | None = None
        self._trained: dict[str, nn.Parameter] = {}
        if optimizer is not None:
            # The optimizer works on this rank's parts as plain tensors; they share their memory.
            self._trained = {
                name: nn.Parameter(self._local(name))
                for name in self._names
                if self._tensors[name].requires_grad
            }
            self._optimizer = GuardedOptimizer(self._trained.values(), optimizer)

    def run(self, compute: Callable[..., T], *arguments: Any) -> T:
        """See `PlacedModel`."""
        with self._ranks.exchanging("forward pass"):
            return cast(T, cast(nn.Module, self._root)(compute, *arguments))

    def num_passes(self, own: int) -> int:
        """The largest number of any rank."""
        return round(self._ranks.max_numbers([float(own)])[0])

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """See `PlacedModel`; each pass adds to this rank's parts."""
        with self._ranks.exchanging("backward pass"):
            loss.backward()  # type: ignore[no-untyped-call]

    def update(self, rate: float) -> UpdateStats:
        """See `PlacedModel`."""
        square = 0.0
        for name, part in self._trained.items():
            gradient = self._tensors[name].grad
            if gradient is not None:
                part.grad = cast(DTensor, gradient).to_local()
                if self._plan.is_partial(name):
                    self._plan.sum_(part.grad)
                own = float(part.grad.double().square().sum())
                square += own / self._plan.copies(self._tensors[name])
        (square,) = self._ranks.sum_numbers([square])
        stats = self._updates().update(rate, math.sqrt(square))
        for name, part in self._trained.items():
            self._tensors[name].grad = part.grad = None
        self._root.reshard()
        return stats

    def weights(self) -> Mapping[str, Tensor | ShardedTensor]:
        """See `PlacedModel`."""
        return {
            name: PartedTensor(tuple(self._tensors[name].shape), self._tensors[name].dtype, reader)
            for name, reader in zip(self._names, self._readers(), strict=True)
        }

    def serve(self) -> None:
        """See `PlacedModel`."""

        def part_of(index: int) -> tuple[Extent, Tensor]:
            name = self._names[index]
            return self._extents[name][self._ranks.rank], self._local(name).flatten()

        self._published.answer(part_of)

    def release(self) -> None:
        """See `PlacedModel`."""
        self._published.release()

    def gathered(self) -> dict[str, Tensor]:
        """See `PlacedModel`."""
        found = {}
        for name, tensor in self._tensors.items():
            whole = tensor.detach().cpu() if name not in self._extents else self._whole(name)
            if self._ranks.rank == 0:
                found[name] = whole
        return found

    def take(self, source: Mapping[str, Tensor]) -> None:
        """See `PlacedModel`."""
        problem = ""
        if self._ranks.rank == 0:
            try:
                check_source(self._tensors, source)
            except (KeyError, ValueError) as error:
                problem = str(error)
        if self._ranks.max_numbers([float(bool(problem))])[0]:
            raise ValueError(problem or "see what rank 0 says")
        for name, tensor in self._tensors.items():
            given = source[name].detach().flatten() if self._ranks.rank == 0 else Tensor()
            if name in self._extents:
                self._parts.deal(self._extents[name], given, self._local(name).view(-1))
            else:
                if self._ranks.rank == 0:
                    tensor.view(-1).copy_(given)
                self._ranks.broadcast_([tensor])
        self._root.reshard()

    def state_dict(self) -> dict[str, Any]:
        """See `PlacedModel`; the same as that of one rank that holds the model whole."""

        def whole(name: str, value: Any) -> Any:
            if not _is_moment(value):
                return value
            flat = self._parts.collect(self._extents[name], value.flatten())
            return flat if self._ranks.rank else flat.view(self._tensors[name].shape)

        state = self._optimizer_state(whole, self._updates().state_dict())
        return {} if self._ranks.rank else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PlacedModel`; reads this rank's parts alone where the state is a mapped file."""

        def part(name: str, value: Any) -> Any:
            if not _is_moment(value):
                return value
            own, extent = self._trained[name], self._extents[name][self._ranks.rank]
            flat = value.reshape(-1)[extent.places(0, extent.size)]
            return flat.to(own.device, copy=True).view(own.shape)

        self._updates().load_state_dict(self._optimizer_state(part, state))

    def _optimizer_state(
        self, convert: Callable[[str, Any], Any], state: dict[str, Any]
    ) -> dict[str, Any]:
        """A torch optimizer's state with every value of a parameter converted."""
        name_of = {id(part): name for name, part in self._trained.items()}
        names = [name_of[id(part)] for part in self._updates().in_order]
        return {
            **state,
            "state": {
                index: {key: convert(names[index], value) for key, value in held.items()}
                for index, held in state["state"].items()
            },
        }

    def _updates(self) -> GuardedOptimizer:
        assert self._optimizer is not None, "placed without an optimizer: a frozen model"
        return self._optimizer

    def held_bytes(self) -> tuple[int, int]:
        """See `memory_report.CountsBytes`; parts, not what is whole for a moment."""
        parts = [self._local(n) if n in self._extents else t for n, t in self._tensors.items()]
        return bytes_of(parts), 0 if self._optimizer is None else self._optimizer.held_bytes()

    def _whole(self, name: str) -> Tensor:
        flat = self._parts.collect(self._extents[name], self._local(name).flatten())
        return flat if self._ranks.rank else flat.view(self._tensors[name].shape)

    def _local(self, name: str) -> Tensor:
        return cast(DTensor, self._tensors[name]).to_local().detach()

    def _readers(self) -> Iterator[Callable[[int, int], Tensor]]:
        for index, name in enumerate(self._names):

            def read(start: int, stop: int, index: int = index, name: str = name) -> Tensor:
                bounds = Extent(start, stop - start)
                own = self._local(name).flatten()
                return self._published.read(index, bounds, self._extents[name], own)

            yield read


def _own_tensors(owner: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """(home, name in it, tensor) of a module's own parameters and buffers that are not sharded."""
    return [
        (home, name, tensor)
        for home in (owner._parameters, owner._buffers)
        for name, tensor in home.items()
        if tensor is not None and not isinstance(tensor, DTensor)
    ]


def _is_moment(value: Any) -> bool:
    """Whether an optimizer holds one number for each element of a parameter."""
    return isinstance(value, Tensor) and value.dim() > 0
