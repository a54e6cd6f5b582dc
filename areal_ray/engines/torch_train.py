"""TorchTrainEngine: one rank of a Hugging Face model trained by RL or supervised.

Called by the learner actor, alike on every rank. Ranks are exact: all counts a loss divides by
are summed over ranks first, so any number of ranks takes the same step as one.
Waits for: the other ranks inside every method but `weights` and `close`.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from areal_ray.algorithms.losses import mean_weights, policy_loss
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.packing import MicroBatch
from areal_ray.core.trajectory import Group
from areal_ray.engines.model_export import ModelExtras
from areal_ray.engines.optimizer import GuardedOptimizer, learning_rate
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.protocols import StepStats
from areal_ray.engines.row_forward import RowForward, load_causal_model
from areal_ray.engines.sft import SftEvaluation, SftExample
from areal_ray.engines.sft_evaluation import evaluate_examples
from areal_ray.engines.train_config import LearnerConfig
from areal_ray.engines.train_metrics import (
    Progress,
    TokenTally,
    count_metrics,
    sum_counts,
    token_metrics,
    work_metrics,
)
from areal_ray.engines.train_rows import TrainBatch, TrainCounts, sft_sequences, train_batch
from areal_ray.errors import DataError

_STATE_FILE = "trainer_state.pt"


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """One rank's share of an update, on the device."""

    micro_batches: list[MicroBatch]
    behaviour_logprobs: Tensor
    advantages: Tensor
    token_weights: Tensor
    is_empty: bool
    """No rank has anything to learn from."""


class TorchTrainEngine:
    """Holds model and optimizer of one data-parallel rank."""

    def __init__(
        self,
        model_path: Path | str,
        learner: LearnerConfig,
        *,
        objective: ObjectiveConfig | None = None,
        temperature: float = 1.0,
        total_steps: int = 1,
        ranks: RankGroup | None = None,
    ) -> None:
        """Load the model; rank 0's weights are taken by all. Collective.

        Args:
            model_path: Hugging Face folder or hub name.
            learner: Engine, optimizer and minibatches.
            objective: What `train_step` maximises; not needed for supervised training.
            temperature: Of sampling; 0 (greedy) counts as 1.
            total_steps: Of the run, for schedules that end.
            ranks: The other ranks; None = alone.
        """
        torch.set_num_threads(learner.engine.num_threads)
        self._extras = ModelExtras.read(model_path)
        self._learner = learner
        self._objective = objective or ObjectiveConfig()
        self._temperature = temperature or 1.0
        self._total_steps = total_steps
        self._ranks = ranks or RankGroup()
        self._model = load_causal_model(model_path, learner.engine)
        self._ranks.broadcast_(self._tensors())
        self._forward = RowForward(self._model, learner.engine)
        self._optimizer = GuardedOptimizer(self._model.parameters(), learner.optimizer)
        self._steps_taken = 0
        dtype = torch.float64 if learner.engine.dtype == "float64" else torch.float32
        self._like = torch.zeros((), dtype=dtype, device=learner.engine.device)

    @property
    def steps_taken(self) -> int:
        """Steps since the beginning of the run, resumed ones included."""
        return self._steps_taken

    def train_step(
        self,
        minibatches: Sequence[Sequence[Group]],
        version: int,
        oldest_version: int | None = None,
    ) -> StepStats:
        """One RL step: an optimizer update for each minibatch.

        Args:
            minibatches: [minibatch] this rank's whole groups; the same number of minibatches on
                each rank, any of them may be empty here.
            version: The learner's, to measure staleness.
            oldest_version: Tokens of older versions do not train; None keeps all.
        """
        started = time.monotonic()
        batches = [train_batch(g, self._objective, version, oldest_version) for g in minibatches]
        totals = sum_counts([batch.counts for batch in batches], self._ranks)
        prepared = [self._prepare(b, t) for b, t in zip(batches, totals, strict=True)]
        proximal, proximal_s = self._proximal(prepared)
        rate, tally, progress = self._next_rate(), TokenTally(), Progress()
        for minibatch, old in zip(prepared, proximal, strict=True):
            if minibatch.is_empty:
                progress.empty += 1
                continue
            for micro in minibatch.micro_batches:
                self._backward(minibatch, micro, old if progress.taken else None, tally)
            self._update(rate, progress)
        num_tokens = sum(t.tokens for t in totals)
        work = [m for p in prepared for m in p.micro_batches if not p.is_empty]
        sums = tally.over_ranks(self._ranks)
        (oldest,) = self._ranks.max_numbers(
            [float(max((b.max_staleness for b in batches), default=0))]
        )
        metrics = {
            "learner/loss": sums.get("loss", 0.0) / max(1, len(prepared) - progress.empty),
            **token_metrics(sums),
            **count_metrics(totals, int(oldest)),
            "learner/proximal_s": proximal_s,
            **progress.metrics(rate),
            **work_metrics(work, num_tokens, started, self._ranks),
        }
        return StepStats(metrics, num_tokens, progress.taken)

    def sft_step(self, examples: Sequence[SftExample]) -> StepStats:
        """One supervised update: mean negative log-prob over all trained tokens of all ranks.

        Args:
            examples: This rank's share of the batch; may be empty.
        """
        started = time.monotonic()
        sequences = sft_sequences(
            iter([e.token_ids for e in examples]), iter([e.loss_mask for e in examples])
        )
        counts = [float(sum(s.num_trained for s in sequences)), float(len(sequences))]
        num_tokens, num_examples = map(int, self._ranks.sum_numbers(counts))
        micro_batches = self._forward.micro_batches(sequences)
        rate, tally, progress = self._next_rate(), TokenTally(), Progress()
        if num_tokens:
            for micro in micro_batches:
                self._sft_backward(micro, num_tokens, tally)
            self._update(rate, progress)
        else:
            progress.empty += 1
        sums = tally.over_ranks(self._ranks)
        metrics = {
            "learner/loss": sums.get("loss", 0.0),
            "learner/trained_tokens": num_tokens,
            "learner/sequences": num_examples,
            **token_metrics(sums),
            **progress.metrics(rate),
            **work_metrics(micro_batches, num_tokens, started, self._ranks),
        }
        return StepStats(metrics, num_tokens, progress.taken)

    def _sft_backward(self, micro: MicroBatch, num_tokens: int, tally: TokenTally) -> None:
        scored = self._forward(micro, 1.0)
        loss = -scored.logprobs.sum() / num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        tally.add(
            {
                "tokens": torch.tensor(len(micro.targets)),
                "loss": loss,
                "entropy": scored.entropy.sum(),
                "correct": scored.is_argmax.sum(),
            }
        )

    def evaluate_sft(self, examples: Sequence[SftExample]) -> SftEvaluation:
        """Teacher-forced accuracy on this rank's share of held-out examples, over all ranks."""
        return evaluate_examples(self._forward, examples, self._ranks)

    def weights(self) -> Mapping[str, Tensor]:
        """The full parameters by Hugging Face name, tied ones once; valid until the next step."""
        return {name: tensor.detach() for name, tensor in self._model.named_parameters()}

    def export(self, folder: Path) -> None:
        """Write what AutoModelForCausalLM and AutoTokenizer load; rank 0 writes."""
        if self._ranks.rank == 0:
            self._extras.export(self._model, folder)
        self._ranks.barrier()

    def save(self, folder: Path) -> None:
        """`export`, and beside it what `load` needs to go on exactly."""
        if self._ranks.rank == 0:
            self._extras.export(self._model, folder)
            state = {
                "steps_taken": self._steps_taken,
                "optimizer": self._optimizer.state_dict(),
                "random_state": torch.get_rng_state(),
            }
            torch.save(state, folder / _STATE_FILE)
        self._ranks.barrier()

    def load(self, folder: Path) -> None:
        """Restore weights, optimizer, schedule and random state; any number of ranks.

        Raises:
            DataError: The folder was not written by `save`, or for another model.
        """
        file = folder / _STATE_FILE
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            restored = load_causal_model(folder, self._learner.engine)
            self._model.load_state_dict(restored.state_dict())
            self._optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
            raise DataError(
                f"{file}: cannot resume from it: {error}; it must be a checkpoint of this model. "
                "Resume from another step."
            ) from error
        self._steps_taken = int(state["steps_taken"])
        torch.set_rng_state(state["random_state"])

    def close(self) -> None:
        """Leave the other ranks."""
        self._ranks.close()

    def _tensors(self) -> list[Tensor]:
        return [*(p.detach() for p in self._model.parameters()), *self._model.buffers()]

    def _next_rate(self) -> float:
        rate = learning_rate(self._steps_taken, self._total_steps, self._learner.optimizer)
        self._steps_taken += 1
        return rate

    def _prepare(self, batch: TrainBatch, totals: TrainCounts) -> _Minibatch:
        per_sequence = self._objective.is_sequence_mean
        lengths = torch.from_numpy(batch.sequence_tokens).to(self._like)
        count = totals.sequences if per_sequence else totals.tokens
        return _Minibatch(
            self._forward.micro_batches(batch.sequences),
            torch.from_numpy(batch.behaviour_logprobs).to(self._like),
            torch.from_numpy(batch.advantages).to(self._like),
            mean_weights(lengths, max(1, count), per_sequence=per_sequence),
            is_empty=totals.teaching_tokens == 0,
        )

    @torch.no_grad()
    def _proximal(self, minibatches: Sequence[_Minibatch]) -> tuple[list[Tensor | None], float]:
        """Log-probs at the start of the step, where an update will come before their use.

        Also the seconds that took.

        The first minibatch needs none: its own forward pass is the proximal policy's.
        """
        columns: list[Tensor | None] = [None] * len(minibatches)
        if self._objective.kind != "decoupled_ppo":
            return columns, 0.0
        started = time.monotonic()
        for number, minibatch in enumerate(minibatches[1:], start=1):
            column = torch.zeros_like(minibatch.behaviour_logprobs)
            for micro in minibatch.micro_batches:
                scored = self._forward(micro, self._temperature)
                column[torch.from_numpy(micro.origins).to(column.device)] = scored.logprobs
            columns[number] = column
        return columns, time.monotonic() - started

    def _backward(
        self, minibatch: _Minibatch, micro: MicroBatch, proximal: Tensor | None, tally: TokenTally
    ) -> None:
        scored = self._forward(micro, self._temperature)
        origins = torch.from_numpy(micro.origins).to(scored.logprobs.device)
        loss, sums = policy_loss(
            self._objective,
            scored.logprobs,
            None if proximal is None else proximal[origins],
            minibatch.behaviour_logprobs[origins],
            minibatch.advantages[origins],
            torch.ones_like(origins, dtype=torch.bool),
            minibatch.token_weights[origins],
        )
        loss.backward()  # type: ignore[no-untyped-call]
        tally.add({**sums, "loss": loss, "entropy": scored.entropy.sum()})

    def _update(self, rate: float, progress: Progress) -> None:
        """Sum the gradient over ranks and step; every rank comes to the same weights."""
        if self._ranks.size > 1:
            flat = self._optimizer.flat_gradient()
            self._optimizer.set_flat_gradient(self._ranks.sum_(flat))
        stats = self._optimizer.update(rate)
        self._optimizer.zero_grad()
        progress.taken += stats.was_taken
        progress.non_finite += not stats.was_taken
        if stats.was_taken:
            progress.grad_norm_max = max(progress.grad_norm_max, stats.grad_norm)
