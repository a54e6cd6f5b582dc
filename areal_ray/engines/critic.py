"""Critic: a value model beside the policy, with its own optimizer.

A value stands at the token that *predicts* a trained one: what reward the episode still brings
before that token is sampled. Values have no temperature. Alike on every rank; collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from areal_ray.algorithms.packing import MicroBatch, TrainSequence
from areal_ray.algorithms.values import clipped_value_loss
from areal_ray.engines.model_export import UNREADABLE, why_unreadable
from areal_ray.engines.model_loading import load_causal_model
from areal_ray.engines.optimizer import learning_rate
from areal_ray.engines.row_forward import placed_rows
from areal_ray.engines.sharding import Sharding
from areal_ray.engines.train_config import CriticConfig, TrainEngineConfig
from areal_ray.engines.train_rows import Line
from areal_ray.errors import DataError

_STATE_FILE = "critic_state.pt"


@dataclass(frozen=True, slots=True)
class ValueShare:
    """One rank's share of a minibatch as the critic sees it, with the values it had before."""

    micro_batches: list[MicroBatch]
    predicted: Tensor
    """[V] values at the start of the step: of the M trained tokens in order, with the value
    beyond its end after each truncated trajectory."""
    is_trained: NDArray[np.bool_]
    """[V] False on those values beyond an end."""
    is_truncated: NDArray[np.bool_]
    """[L] lines that have one."""

    @property
    def values(self) -> NDArray[np.float64]:
        """[M] before each trained token."""
        return self._all()[self.is_trained]

    @property
    def bootstraps(self) -> NDArray[np.float64]:
        """[L] beyond the end of a line; 0 where its episode ended by itself."""
        beyond = np.zeros(len(self.is_truncated))
        beyond[self.is_truncated] = self._all()[~self.is_trained]
        return beyond

    def _all(self) -> NDArray[np.float64]:
        return self.predicted.double().cpu().numpy()


class Critic:
    """Holds value model and optimizer of one rank."""

    def __init__(
        self,
        path: Path | str,
        config: CriticConfig,
        engine: TrainEngineConfig,
        sharding: Sharding,
        *,
        total_steps: int,
    ) -> None:
        """Load the body; rank 0's weights are taken by all. Collective.

        Args:
            path: Hugging Face folder or hub name.
            config: Optimizer and clip.
            engine: Type, device, tokens of a pass; the policy's.
            sharding: Places it over the ranks.
            total_steps: Of the run, for schedules that end.
        """
        model = load_causal_model(path, engine, key="critic.path", device=sharding.loads_to)
        self._config = config
        self._total_steps = total_steps
        width = int(model.config.get_text_config().hidden_size)
        self._head = nn.Linear(width, 1, device=model.device, dtype=model.dtype)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self.forward = placed_rows(model, engine, sharding, config.optimizer, value_head=self._head)
        self._placed = self.forward.placed
        self._is_sharded = sharding.is_sharded
        self._steps_taken = 0

    def begin_step(self) -> None:
        """A step begins: its updates share one learning rate."""
        self._steps_taken += 1

    @torch.no_grad()
    def judge(self, lines: Sequence[Line]) -> ValueShare:
        """Values of all trained tokens of the lines, and beyond the end of truncated ones."""
        truncated = [line.is_truncated for line in lines]
        sequences = [_value_sequence(*pair) for pair in zip(lines, truncated, strict=True)]
        is_trained = np.ones(sum(s.num_trained for s in sequences), bool)
        ends = np.cumsum([s.num_trained for s in sequences], dtype=np.int64) - 1
        is_truncated = np.array(truncated, bool)
        is_trained[ends[is_truncated]] = False
        micro_batches = self.forward.micro_batches(sequences)
        predicted = self.forward.new_column(len(is_trained))
        for micro in micro_batches:
            predicted[self._places(micro)] = self._values(micro)
        return ValueShare(micro_batches, predicted, is_trained, is_truncated)

    def fit(self, share: ValueShare, returns: NDArray[np.float64], num_tokens: int) -> float:
        """One update towards the returns; this rank's part of the loss. Collective.

        Args:
            share: From `judge`, at the start of the step.
            returns: [M] of the trained tokens.
            num_tokens: Trained tokens of the minibatch over all ranks; at least 1.
        """
        targets = torch.zeros_like(share.predicted)
        mask = torch.from_numpy(share.is_trained).to(targets.device)
        targets[mask] = torch.from_numpy(returns).to(targets)
        total = 0.0
        for number, micro in enumerate(share.micro_batches, 1):
            at = self._places(micro)
            loss, _ = clipped_value_loss(
                self._values(micro),
                share.predicted[at],
                targets[at],
                mask[at],
                torch.full_like(targets[at], 1.0 / num_tokens),
                eps_clip=self._config.eps_clip,
            )
            self.forward.backward(loss, is_last=number == len(share.micro_batches))
            total += float(loss.detach())
        step = self._steps_taken - 1
        rate = learning_rate(step, self._total_steps, self._config.optimizer)
        self._placed.update(rate)
        return total

    def state(self) -> dict[str, Any]:
        """What `load` needs to go on exactly, on rank 0. Collective."""
        return {
            "weights": self._placed.gathered(),
            "optimizer": self._placed.state_dict(),
            "steps_taken": self._steps_taken,
        }

    @staticmethod
    def write(state: dict[str, Any], folder: Path) -> None:
        """Write `state` where `load` looks for it."""
        torch.save(state, folder / _STATE_FILE)

    def load(self, folder: Path) -> None:
        """Restore what `write` wrote. Collective.

        Raises:
            DataError: The folder has no critic, or one of another model.
        """
        file = folder / _STATE_FILE
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=self._is_sharded)
            self._placed.take(state["weights"])
            self._placed.load_state_dict(state["optimizer"])
            self._steps_taken = int(state["steps_taken"])
        except UNREADABLE as error:
            raise DataError(
                f"{file}: cannot resume the critic from it: {why_unreadable(error)}; it must be "
                "of this model. Resume from another step."
            ) from error

    def _values(self, micro: MicroBatch) -> Tensor:
        """[N] in the micro-batch's own order."""
        values: Tensor = self._head(self.forward.hidden(micro).to(self._head.weight.dtype))
        return values[:, 0].to(self.forward.new_column(0))  # from bfloat16 where the head is so

    def _places(self, micro: MicroBatch) -> Tensor:
        return torch.from_numpy(micro.origins).to(self.forward.device)


def _value_sequence(line: Line, is_truncated: bool) -> TrainSequence:
    tokens, trained = line.trajectory.token_ids, line.trained
    if is_truncated:  # a token that is never read, predicted from all that was seen
        tokens, trained = np.append(tokens, tokens[-1:]), np.append(trained, True)
    return TrainSequence(tokens, trained, line.group)
