"""FrozenModel: a model that is asked for log-probs and never trained: reference and teacher."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from areal_ray.algorithms.packing import MicroBatch, TrainSequence
from areal_ray.engines.model_loading import load_causal_model
from areal_ray.engines.row_forward import RowForward, placed_rows
from areal_ray.engines.sharding import Sharding
from areal_ray.engines.train_config import TrainEngineConfig


class FrozenModel:
    """Log-probs of trained tokens under fixed weights, with the train engine's row packing."""

    def __init__(
        self, forward: RowForward, around: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Ask a model that is there.

        Args:
            forward: Its passes.
            around: Entered around each: where the model is fixed only then.
        """
        self.forward = forward
        self._around = around

    @classmethod
    def load(
        cls, path: Path | str, config: TrainEngineConfig, sharding: Sharding, *, key: str
    ) -> Self:
        """One that lies over the ranks as the policy does. Collective.

        Args:
            path: Hugging Face folder or hub name.
            config: The train engine's: type, device, tokens of a pass.
            sharding: Places it.
            key: Of the recipe, that names the path.
        """
        plain = config.model_copy(update={"gradient_checkpointing": False})
        model = load_causal_model(path, plain, key=key, device=sharding.loads_to)
        model.requires_grad_(False)
        return cls(placed_rows(model, plain, sharding))

    def logprobs(self, sequences: Sequence[TrainSequence], temperature: float) -> Tensor:
        """[N] of the sequences' trained tokens, end to end."""
        with self._around():
            return sequence_logprobs(self.forward, sequences, temperature)

    @torch.no_grad()
    def states(self, micro: MicroBatch) -> Tensor:
        """[N, ...] from which `RowForward.logits_of` makes logits; rows of one sequence each."""
        with self._around():
            return self.forward.states(micro)

    @torch.no_grad()
    def logits_of(self, states: Tensor) -> Tensor:
        """[N, V]"""
        return self.forward.logits_of(states)


@torch.no_grad()
def sequence_logprobs(
    forward: RowForward, sequences: Sequence[TrainSequence], temperature: float
) -> Tensor:
    """[N] log-probs of the sequences' trained tokens, end to end, without gradient."""
    column = forward.new_column(sum(s.num_trained for s in sequences))
    for micro in forward.micro_batches(sequences):
        at = torch.from_numpy(micro.origins).to(column.device)
        column[at] = forward(micro, temperature).logprobs
    return column
