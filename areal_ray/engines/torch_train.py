"""TorchTrainEngine: one rank of a Hugging Face model trained by RL or supervised.

Called by the learner actor, alike on every rank; `rl_step` is its RL half. Ranks are exact: all
counts a loss divides by are summed over ranks first, so any number takes the same step as one.
Waits for: the other ranks inside every method but `weights` and `close`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.core.canary import Probe
from areal_ray.core.trajectory import Group
from areal_ray.engines.critic import Critic
from areal_ray.engines.frozen import FrozenModel
from areal_ray.engines.judge import Judge
from areal_ray.engines.lora import Adapters
from areal_ray.engines.lora_config import LoraSetup
from areal_ray.engines.memory_report import MemoryReport
from areal_ray.engines.model_export import UNREADABLE, ModelExtras, saving, why_unreadable
from areal_ray.engines.model_loading import load_causal_model
from areal_ray.engines.optimizer import learning_rate
from areal_ray.engines.pair_step import DpoLoss, PairLoss, PairStep, ScoreLoss
from areal_ray.engines.preference import PairEvaluation, PairTask, PreferencePair
from areal_ray.engines.probe import take_probe
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.protocols import StepStats
from areal_ray.engines.reward_model import load_score_model
from areal_ray.engines.rl_step import RlStep
from areal_ray.engines.row_forward import placed_rows
from areal_ray.engines.sft import OfflineDistillationConfig, SftEvaluation, SftExample
from areal_ray.engines.sft_loss import SftLoss
from areal_ray.engines.sft_step import SftStep
from areal_ray.engines.sharding import ShardedTensor, persistent_tensors
from areal_ray.engines.train_config import Companions, LearnerConfig
from areal_ray.engines.train_kinds import sharding_for
from areal_ray.engines.train_metrics import Progress
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
        lora: LoraSetup | None = None,
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
            lora: Adapters that train in place of all weights; None = all weights.
        """
        torch.set_num_threads(learner.engine.num_threads)
        self._extras = ModelExtras.read(model_path)
        self._learner = learner
        self._total_steps = total_steps
        self._ranks = ranks or RankGroup()
        self._sharding = sharding_for(learner.engine, self._ranks)
        self._counted = self._ranks.every(learner.engine.ranks_per_share)  # those with other data
        self._load = load_score_model if pairs and pairs.is_scored else load_causal_model
        self._model = self._loaded(model_path)
        self._adapters = None if lora is None else Adapters(self._model, lora)
        self._forward = placed_rows(self._model, learner.engine, self._sharding, learner.optimizer)
        self._placed = self._forward.placed
        self._steps_taken = 0
        objective = objective or ObjectiveConfig()
        beside = companions or Companions()
        self._critic = self._load_critic(beside)
        reference = self._reference(beside.reference_path, str(model_path))
        teacher = self._load_frozen(beside.teacher_path, "teacher.path")
        self._memory = MemoryReport(self._forward, [self._critic, reference, teacher], self._ranks)
        self._pairs = None if pairs is None else self._pair_step(pairs, reference)
        loss = SftLoss(self._forward, teacher, distillation)
        self._sft = SftStep(self._forward, loss, self._counted)
        judge = Judge(
            objective, self._forward, temperature=temperature or 1.0, reference=reference,
            teacher=teacher, critic=self._critic, ranks=self._counted,
        )  # fmt: skip
        self._rl = RlStep(self._forward, objective, judge, temperature or 1.0, self._counted)

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
        update = partial(self._update, progress)
        return self._memory.told(
            self._rl.run(minibatches, version, oldest_version, progress, update)
        )

    def sft_step(self, examples: Sequence[SftExample]) -> StepStats:
        """One supervised update: mean negative log-prob over all trained tokens of all ranks.

        Args:
            examples: This rank's share of the batch; may be empty.
        """
        progress = Progress(rate=self._next_rate())
        stats = self._sft.run(examples, progress, partial(self._update, progress))
        return self._memory.told(stats)

    def evaluate_sft(self, examples: Sequence[SftExample]) -> SftEvaluation:
        """Teacher-forced accuracy on this rank's share of held-out examples, over all ranks."""
        return self._sft.evaluate(examples)

    def pair_step(self, pairs: Sequence[PreferencePair]) -> StepStats:
        """One update towards telling pairs apart: the mean loss over the pairs of all ranks.

        Args:
            pairs: This rank's share of the batch; may be empty.
        """
        assert self._pairs is not None, "only runs of kind dpo and reward_model learn from pairs"
        progress = Progress(rate=self._next_rate())
        return self._memory.told(self._pairs.run(pairs, progress, partial(self._update, progress)))

    def evaluate_pairs(self, pairs: Sequence[PreferencePair]) -> PairEvaluation:
        """How well this rank's share of held-out pairs is told apart, over all ranks."""
        assert self._pairs is not None, "only runs of kind dpo and reward_model learn from pairs"
        return self._pairs.evaluate(pairs)

    def weights(self) -> Mapping[str, Tensor | ShardedTensor]:
        """The parameters by Hugging Face name, tied ones once; valid until the next step. With
        adapters these alone, under names as `x.q_proj.lora_A.weight`. Where they are sharded, rank
        0 reads them while the other ranks `serve_weights`."""
        weights = self._placed.weights()
        return weights if self._adapters is None else self._adapters.trained(weights)

    @property
    def is_sharded(self) -> bool:
        """Whether rank 0 needs the others to read `weights`."""
        return self._sharding.is_sharded

    def serve_weights(self) -> None:
        """On the other ranks: give rank 0 what it reads of `weights`, until `release_weights`."""
        self._placed.serve()

    def release_weights(self) -> None:
        """On rank 0: end the others' `serve_weights`."""
        self._placed.release()

    def probe(self, num_tokens: int) -> Probe:
        """Log-probs of a fixed prompt, for engines that sample from these weights. Collective."""
        return take_probe(self._forward, num_tokens)

    def export(self, folder: Path) -> None:
        """Write what AutoModelForCausalLM and AutoTokenizer load; rank 0 writes.

        Adapters are merged, and lie in a folder inside as well, for peft and vLLM.
        """
        weights: Mapping[str, Tensor] = self._placed.gathered()
        if self._ranks.rank == 0:
            with saving(folder):
                if self._adapters is not None:
                    self._adapters.write(folder, weights)
                    weights = self._adapters.merged(weights)
                self._extras.export(self._model, weights, folder)
        self._ranks.barrier()

    def save(self, folder: Path) -> None:
        """A Hugging Face checkpoint, and beside it what `load` needs to go on exactly.

        Of a model with adapters these alone: the model itself does not change.
        """
        weights = self._placed.gathered()
        state = {
            "steps_taken": self._steps_taken,
            "optimizer": self._placed.state_dict(),
            "random_state": torch.get_rng_state(),
        }
        critic = None if self._critic is None else self._critic.state()
        if self._ranks.rank == 0:
            with saving(folder):
                if self._adapters is None:
                    self._extras.export(self._model, weights, folder)
                else:
                    self._adapters.write(folder, weights)
                torch.save(state, folder / _STATE_FILE)
                if critic is not None:
                    Critic.write(critic, folder)
        self._ranks.barrier()

    def load(self, folder: Path) -> None:
        """Restore weights, optimizer, schedule and random state; any number of ranks.

        Raises:
            DataError: The folder was not written by `save`, or for another model.
        """
        file = folder / _STATE_FILE
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=self.is_sharded)
            self._placed.take(self._saved(folder))
            self._placed.load_state_dict(state["optimizer"])
        except UNREADABLE as error:
            raise DataError(
                f"{file}: cannot resume from it: {why_unreadable(error)}; it must be a checkpoint "
                "of this model. Resume from another step."
            ) from error
        if self._critic is not None:
            self._critic.load(folder)
        self._steps_taken = int(state["steps_taken"])
        torch.set_rng_state(state["random_state"])

    def close(self) -> None:
        """Leave the other ranks."""
        self._ranks.close()

    def _saved(self, folder: Path) -> Mapping[str, Tensor]:
        """The weights of a checkpoint, by the model's names."""
        if self._adapters is None:
            saved: Mapping[str, Tensor] = self._loaded(folder).state_dict()
            return saved
        # Ranks that hold the model whole read what they are given, the others rank 0 alone.
        kept = self._placed.gathered() or persistent_tensors(self._model)
        return {**kept, **self._adapters.read(folder)}

    def _reference(self, path: str, model_path: str) -> FrozenModel | None:
        if path == model_path and self._adapters is not None:  # no second copy of the weights
            return FrozenModel(self._forward, self._adapters.set_aside)
        return self._load_frozen(path, "reference.path")

    def _load_frozen(self, path: str, key: str) -> FrozenModel | None:
        if not path:
            return None
        return FrozenModel.load(path, self._learner.engine, self._sharding, key=key)

    def _pair_step(self, pairs: PairTask, reference: FrozenModel | None) -> PairStep:
        loss: PairLoss
        if pairs.is_scored:
            loss = ScoreLoss(self._forward, self._model.score)
        else:
            assert reference is not None, "the recipe gives kind dpo a reference"
            loss = DpoLoss(self._forward, reference, pairs.config)
        limit = self._learner.engine.max_tokens_per_mb
        return PairStep(self._forward, loss, self._counted, limit)

    def _load_critic(self, companions: Companions) -> Critic | None:
        if not companions.critic_path:
            return None
        return Critic(
            companions.critic_path, companions.critic, self._learner.engine, self._sharding,
            total_steps=self._total_steps,
        )  # fmt: skip

    def _loaded(self, path: Path | str) -> Any:
        return self._load(path, self._learner.engine, device=self._sharding.loads_to)

    def _next_rate(self) -> float:
        rate = learning_rate(self._steps_taken, self._total_steps, self._learner.optimizer)
        self._steps_taken += 1
        return rate

    def _update(self, progress: Progress) -> None:
        progress.note(self._placed.update(progress.rate))
