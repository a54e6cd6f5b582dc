"""Sharding: how the parameters of a learner's models lie over its ranks.

The train engine and all it is made of (policy, critic, frozen models) work through a `PlacedModel`
and know nothing else of ranks but counts. `Replicated` gives each rank the whole model; the other
kinds are in modules of their own, and `train_kinds` picks one.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from areal_ray.engines.memory_report import bytes_of
from areal_ray.engines.optimizer import GuardedOptimizer, UpdateStats
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.sequence_parallel import SequenceRanks
from areal_ray.engines.train_config import OptimizerConfig

T = TypeVar("T")


class ShardedTensor(Protocol):
    """A tensor of which this rank may hold a part, or none."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""

    @property
    def dtype(self) -> Any:
        """Of its elements, a torch dtype."""

    def read(self, start: int, stop: int) -> Tensor:
        """[stop - start] elements of the flattened tensor, on rank 0; the others `serve`."""


class PlacedModel(Protocol):
    """One model as it lies over the ranks; with an optimizer where it trains.

    Alike on every rank and collective, but for `weights`, `release` and `run` where
    `num_passes` changes nothing. Names are those of the module that was placed.
    """

    def run(self, compute: Callable[..., T], *arguments: Any) -> T:
        """`compute(*arguments)` as one forward pass: modules may be called freely inside, and
        parameters that belong to no layer are whole. It must return tensors or a tuple of them."""

    def num_passes(self, own: int) -> int:
        """How many passes this rank has to make where it needs `own` of them.

        More where passes are collective and another rank needs more: then all make as many,
        forward and backward, some of them on nothing.
        """

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """Add to the gradient; `is_last` before the next `update`.

        The gradient is the *sum* over ranks of each one's: a loss is divided by counts of all.
        """

    def update(self, rate: float) -> UpdateStats:
        """Clip by the norm over all ranks, take one step at learning rate `rate`, forget the
        gradient; nothing changes where that was not finite."""

    def weights(self) -> Mapping[str, Tensor | ShardedTensor]:
        """The parameters by name, tied ones once; until the next update. To be read on rank 0."""

    def serve(self) -> None:
        """On the other ranks: give rank 0 what it reads of `weights`, until it calls `release`.

        Returns at once where rank 0 needs nobody. May run beside the passes, on a thread of its
        own, but not beside an update.
        """

    def release(self) -> None:
        """On rank 0: end the others' `serve`."""

    def gathered(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers, whole and in host memory, on rank 0; {} elsewhere."""

    def take(self, source: Mapping[str, Tensor]) -> None:
        """Replace what `gathered` lists by `source`, which is read on ranks that load weights.

        Raises:
            KeyError, ValueError: A name is missing or has another shape.
        """

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, whole and in host memory, on rank 0; {} elsewhere."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`, given on every rank; from any number of ranks."""


class Sharding(Protocol):
    """Places models over the ranks."""

    @property
    def loads_to(self) -> str:
        """Device that this rank loads a checkpoint to; meta = shapes alone."""

    @property
    def is_sharded(self) -> bool:
        """Whether rank 0 needs the other ranks to read a model's weights."""

    @property
    def sequence(self) -> SequenceRanks | None:
        """The ranks that compute each pass together; None = each has passes of its own."""

    def agreed(self, answers: tuple[bool, ...]) -> tuple[bool, ...]:
        """What ranks that hold a model found out about it, on all ranks. Collective."""

    def place(self, module: nn.Module, optimizer: OptimizerConfig | None = None) -> PlacedModel:
        """Take over a module that was loaded to `loads_to`; rank 0's weights count. Collective.

        Args:
            module: A model, or several that are passed through together.
            optimizer: None = it never changes. Only parameters that require a gradient train.
        """


class Replicated:
    """Each rank holds the whole model; gradients are summed at each update."""

    is_sharded = False
    sequence = None

    def __init__(self, ranks: RankGroup | None = None, device: str = "cpu") -> None:
        self._ranks = ranks or RankGroup()
        self.loads_to = device

    def agreed(self, answers: tuple[bool, ...]) -> tuple[bool, ...]:
        """See `Sharding`; each rank has the model and has seen for itself."""
        return answers

    def place(self, module: nn.Module, optimizer: OptimizerConfig | None = None) -> PlacedModel:
        """See `Sharding`."""
        return ReplicatedModel(module, optimizer, self._ranks)


class ReplicatedModel:
    """A module that is whole on every rank."""

    def __init__(
        self, module: nn.Module, optimizer: OptimizerConfig | None, ranks: RankGroup
    ) -> None:
        self._module = module
        self._ranks = ranks
        self._optimizer: GuardedOptimizer | None = None
        if optimizer is not None:  # frozen models are read from the same files by all
            ranks.broadcast_([*(p.detach() for p in module.parameters()), *module.buffers()])
            self._optimizer = GuardedOptimizer(module.parameters(), optimizer)

    def run(self, compute: Callable[..., T], *arguments: Any) -> T:
        """See `PlacedModel`."""
        return compute(*arguments)

    def num_passes(self, own: int) -> int:
        """Its own: passes of different ranks have nothing to do with each other."""
        return own

    def backward(self, loss: Tensor, *, is_last: bool = True) -> None:
        """See `PlacedModel`; ranks meet at the update alone."""
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, rate: float) -> UpdateStats:
        """See `PlacedModel`."""
        return self._trained().update_together(rate, self._ranks)

    def weights(self) -> Mapping[str, Tensor | ShardedTensor]:
        """See `PlacedModel`."""
        return {name: tensor.detach() for name, tensor in self._module.named_parameters()}

    def serve(self) -> None:
        """Rank 0 has all it needs."""

    def release(self) -> None:
        """Nobody waits."""

    def gathered(self) -> dict[str, Tensor]:
        """See `PlacedModel`."""
        if self._ranks.rank:
            return {}
        return {name: t.detach().cpu() for name, t in persistent_tensors(self._module).items()}

    def take(self, source: Mapping[str, Tensor]) -> None:
        """See `PlacedModel`."""
        tensors = persistent_tensors(self._module)
        check_source(tensors, source)
        for name, tensor in tensors.items():
            tensor.detach().copy_(source[name])

    def state_dict(self) -> dict[str, Any]:
        """See `PlacedModel`."""
        return {} if self._ranks.rank else self._trained().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `PlacedModel`."""
        self._trained().load_state_dict(state)

    def held_bytes(self) -> tuple[int, int]:
        """See `memory_report.CountsBytes`."""
        held = bytes_of([*self._module.parameters(), *self._module.buffers()])
        return held, 0 if self._optimizer is None else self._optimizer.held_bytes()

    def _trained(self) -> GuardedOptimizer:
        assert self._optimizer is not None, "placed without an optimizer: a frozen model"
        return self._optimizer


def persistent_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once under their first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def check_source(wanted: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not those of the same model.

    Raises:
        KeyError, ValueError: A name is missing or has another shape.
    """
    for name, tensor in wanted.items():
        if tuple(source[name].shape) != tuple(tensor.shape):
            raise ValueError(
                f"{name} has shape {tuple(source[name].shape)}; must be {tuple(tensor.shape)}"
            )


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The layers that Transformers says must stay in one piece, inner ones first."""
    kinds = {kind for m in module.modules() for kind in getattr(m, "_no_split_modules", None) or ()}
    return [m for m in module.modules() if type(m).__name__ in kinds][::-1]
