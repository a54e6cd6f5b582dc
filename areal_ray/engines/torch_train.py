"""TorchTrainEngine: one rank of a Hugging Face model trained by RL or supervised.

Called by the learner actor, alike on every rank; `rl_step` is its RL half. Ranks are exact: all
counts a loss divides by are summed over ranks first, so any number takes the same step as one.
Waits for: the other ranks inside every method but `weights` and `close`.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.core.trajectory import Group
from areal_ray.engines.critic import Critic
from areal_ray.engines.frozen import FrozenModel
from areal_ray.engines.judge import Judge
from areal_ray.engines.model_export import ModelExtras, saving
from areal_ray.engines.optimizer import GuardedOptimizer, learning_rate
from areal_ray.engines.pair_step import DpoLoss, PairLoss, PairStep, ScoreLoss
from areal_ray.engines.preference import PairEvaluation, PairTask, PreferencePair
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.protocols import StepStats
from areal_ray.engines.reward_model import load_score_model
from areal_ray.engines.rl_step import RlStep
from areal_ray.engines.row_forward import RowForward, load_causal_model
from areal_ray.engines.sft import OfflineDistillationConfig, SftEvaluation, SftExample
from areal_ray.engines.sft_evaluation import evaluate_examples
from areal_ray.engines.sft_loss import SftLoss
from areal_ray.engines.train_config import Companions, LearnerConfig
from areal_ray.engines.train_metrics import (
    Progress,
    TokenTally,
    token_metrics,
    work_metrics,
)
from areal_ray.engines.train_rows import sft_sequences
from areal_ray.errors import DataError

_STATE_FILE = "trainer_state.pt"


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
        companions: Companions | None = None,
        pairs: PairTask | None = None,
        distillation: OfflineDistillationConfig | None = None,
    ) -> None:
        """Load the model; rank 0's weights are taken by all. Collective.

        Args:
            model_path: Hugging Face folder or hub name.
            learner: Engine, optimizer and minibatches.
            objective: What `train_step` maximises; not needed for supervised training.
            temperature: Of sampling; 0 (greedy) counts as 1.
            total_steps: Of the run, for schedules that end.
            ranks: The other ranks; None = alone.
            companions: Reference, teacher and critic, as far as the objective needs them.
            pairs: What `pair_step` learns, and whether the model is a reward model.
            distillation: How `sft_step` learns from the teacher; None = from the answers alone.
        """
        torch.set_num_threads(learner.engine.num_threads)
        self._extras = ModelExtras.read(model_path)
        self._learner = learner
        self._total_steps = total_steps
        self._ranks = ranks or RankGroup()
        self._load = load_score_model if pairs and pairs.is_scored else load_causal_model
        self._model = self._load(model_path, learner.engine)
        self._ranks.broadcast_(self._tensors())
        self._forward = RowForward(self._model, learner.engine)
        self._optimizer = GuardedOptimizer(self._model.parameters(), learner.optimizer)
        self._steps_taken = 0
        objective = objective or ObjectiveConfig()
        beside = companions or Companions()
        self._critic = self._load_critic(beside)
        reference = self._load_frozen(beside.reference_path, "reference.path")
        teacher = self._load_frozen(beside.teacher_path, "teacher.path")
        self._pairs = None if pairs is None else self._pair_step(pairs, reference)
        self._sft = SftLoss(self._forward, teacher, distillation)
        judge = Judge(
            objective,
            self._forward,
            temperature=temperature or 1.0,
            reference=reference,
            teacher=teacher,
            critic=self._critic,
            ranks=self._ranks,
        )
        self._rl = RlStep(self._forward, objective, judge, temperature or 1.0, self._ranks)

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
        progress = Progress(rate=self._next_rate())
        return self._rl.run(
            minibatches, version, oldest_version, progress, lambda: self._update(progress)
        )

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
        tally, progress = TokenTally(), Progress(rate=self._next_rate())
        if num_tokens:
            for micro in micro_batches:
                loss, parts = self._sft(micro, num_tokens)
                loss.backward()  # type: ignore[no-untyped-call]
                tally.add({**parts, "loss": loss})
            self._update(progress)
        else:
            progress.empty += 1
        sums = tally.over_ranks(self._ranks)
        metrics = {
            "learner/loss": sums.get("loss", 0.0),
            "learner/trained_tokens": num_tokens,
            "learner/sequences": num_examples,
            **token_metrics(sums),
            **progress.metrics(),
            **work_metrics(micro_batches, num_tokens, started, self._ranks),
        }
        return StepStats(metrics, num_tokens, progress.taken)

    def evaluate_sft(self, examples: Sequence[SftExample]) -> SftEvaluation:
        """Teacher-forced accuracy on this rank's share of held-out examples, over all ranks."""
        return evaluate_examples(self._forward, examples, self._ranks)

    def pair_step(self, pairs: Sequence[PreferencePair]) -> StepStats:
        """One update towards telling pairs apart: the mean loss over the pairs of all ranks.

        Args:
            pairs: This rank's share of the batch; may be empty.
        """
        assert self._pairs is not None, "only runs of kind dpo and reward_model learn from pairs"
        progress = Progress(rate=self._next_rate())
        return self._pairs.run(pairs, progress, lambda: self._update(progress))

    def evaluate_pairs(self, pairs: Sequence[PreferencePair]) -> PairEvaluation:
        """How well this rank's share of held-out pairs is told apart, over all ranks."""
        assert self._pairs is not None, "only runs of kind dpo and reward_model learn from pairs"
        return self._pairs.evaluate(pairs)

    def weights(self) -> Mapping[str, Tensor]:
        """The full parameters by Hugging Face name, tied ones once; valid until the next step."""
        return {name: tensor.detach() for name, tensor in self._model.named_parameters()}

    def export(self, folder: Path) -> None:
        """Write what AutoModelForCausalLM and AutoTokenizer load; rank 0 writes."""
        if self._ranks.rank == 0:
            with saving(folder):
                self._extras.export(self._model, folder)
        self._ranks.barrier()

    def save(self, folder: Path) -> None:
        """`export`, and beside it what `load` needs to go on exactly."""
        if self._ranks.rank == 0:
            state = {
                "steps_taken": self._steps_taken,
                "optimizer": self._optimizer.state_dict(),
                "random_state": torch.get_rng_state(),
            }
            with saving(folder):
                self._extras.export(self._model, folder)
                torch.save(state, folder / _STATE_FILE)
                if self._critic is not None:
                    self._critic.save(folder)
        self._ranks.barrier()

    def load(self, folder: Path) -> None:
        """Restore weights, optimizer, schedule and random state; any number of ranks.

        Raises:
            DataError: The folder was not written by `save`, or for another model.
        """
        file = folder / _STATE_FILE
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
            restored = self._load(folder, self._learner.engine)
            self._model.load_state_dict(restored.state_dict())
            self._optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
            raise DataError(
                f"{file}: cannot resume from it: {error}; it must be a checkpoint of this model. "
                "Resume from another step."
            ) from error
        if self._critic is not None:
            self._critic.load(folder)
        self._steps_taken = int(state["steps_taken"])
        torch.set_rng_state(state["random_state"])

    def close(self) -> None:
        """Leave the other ranks."""
        self._ranks.close()

    def _load_frozen(self, path: str, key: str) -> FrozenModel | None:
        return FrozenModel(path, self._learner.engine, key=key) if path else None

    def _pair_step(self, pairs: PairTask, reference: FrozenModel | None) -> PairStep:
        loss: PairLoss
        if pairs.is_scored:
            loss = ScoreLoss(self._forward, self._model.score)
        else:
            assert reference is not None, "the recipe gives kind dpo a reference"
            loss = DpoLoss(self._forward, reference, pairs.config)
        limit = self._learner.engine.max_tokens_per_mb
        return PairStep(self._forward, loss, self._ranks, limit)

    def _load_critic(self, companions: Companions) -> Critic | None:
        if not companions.critic_path:
            return None
        return Critic(
            companions.critic_path,
            companions.critic,
            self._learner.engine,
            total_steps=self._total_steps,
            ranks=self._ranks,
        )

    def _tensors(self) -> list[Tensor]:
        return [*(p.detach() for p in self._model.parameters()), *self._model.buffers()]

    def _next_rate(self) -> float:
        rate = learning_rate(self._steps_taken, self._total_steps, self._learner.optimizer)
        self._steps_taken += 1
        return rate

    def _update(self, progress: Progress) -> None:
        progress.note(self._optimizer.update_together(progress.rate, self._ranks))
