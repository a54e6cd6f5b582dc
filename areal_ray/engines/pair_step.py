"""PairStep: a train engine's step on pairs of answers, for a policy (DPO) or a reward model.

Both answers of a pair are computed in the same backward pass, since its loss is about their
difference; their prompt is computed once. Ranks are exact: a pair weighs one over the pairs of all
ranks. Alike on every rank; collective.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from areal_ray.algorithms.packing import MicroBatch, TrainSequence
from areal_ray.algorithms.preference import bradley_terry_loss, dpo_loss, sequence_log_ratios
from areal_ray.algorithms.surrogates import TokenSums
from areal_ray.engines.frozen import FrozenModel
from areal_ray.engines.preference import PairEvaluation, PreferenceConfig, PreferencePair
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.protocols import StepStats
from areal_ray.engines.row_forward import RowForward
from areal_ray.engines.sft import SftExample
from areal_ray.engines.train_metrics import Progress, TokenTally, given_metrics, work_metrics

_ANSWERS = 2


class PairLoss(Protocol):
    """What a pair costs."""

    def sequence(self, answer: SftExample, pair: int) -> TrainSequence:
        """What must be computed of an answer."""

    def __call__(
        self, sequences: Sequence[TrainSequence], micro_batches: Sequence[MicroBatch], weight: float
    ) -> tuple[Tensor, TokenSums]:
        """[] loss and sums of pairs that lie one after the other: better, worse, better, ...

        Args:
            sequences: Of the answers.
            micro_batches: That compute them.
            weight: Of each pair.
        """


class DpoLoss:
    """Log ratios of policy and reference (see `algorithms.preference.dpo_loss`)."""

    def __init__(
        self, forward: RowForward, reference: FrozenModel, config: PreferenceConfig
    ) -> None:
        self._forward = forward
        self._reference = reference
        self._config = config

    def sequence(self, answer: SftExample, pair: int) -> TrainSequence:
        """The whole conversation; the answer's tokens count."""
        trained = answer.loss_mask.copy()
        trained[:1] = False
        return TrainSequence(answer.token_ids, trained, pair)

    def __call__(
        self, sequences: Sequence[TrainSequence], micro_batches: Sequence[MicroBatch], weight: float
    ) -> tuple[Tensor, TokenSums]:
        """See `PairLoss`."""
        config = self._config
        logprobs = torch.cat([self._forward(micro, 1.0).logprobs for micro in micro_batches])
        at = _places(micro_batches, logprobs)
        owners = np.repeat(np.arange(len(sequences)), [s.num_trained for s in sequences])
        ratios = sequence_log_ratios(
            logprobs,
            self._reference.logprobs(sequences, 1.0)[at],
            torch.from_numpy(owners).to(at.device)[at],
            len(sequences),
            length_normalised=config.averages_tokens,
        )
        better, worse = ratios[::_ANSWERS], ratios[1::_ANSWERS]
        loss, sums = dpo_loss(
            better,
            worse,
            torch.full_like(better, weight),
            beta=config.beta,
            kind=config.loss,
            label_smoothing=config.label_smoothing,
        )
        return loss, sums


class ScoreLoss:
    """Scores at the last token of each answer (see `algorithms.preference.bradley_terry_loss`)."""

    def __init__(self, forward: RowForward, head: nn.Module) -> None:
        self._forward = forward
        self._head = head

    def sequence(self, answer: SftExample, pair: int) -> TrainSequence:
        """Up to the end of the answer, where the score stands."""
        end = int(np.flatnonzero(answer.loss_mask)[-1]) + 1
        tokens = answer.token_ids[:end]
        trained = np.zeros(end + 1, bool)
        trained[-1] = True  # a token that is never read, predicted from all that was seen
        return TrainSequence(np.append(tokens, tokens[-1:]), trained, pair)

    def __call__(
        self, sequences: Sequence[TrainSequence], micro_batches: Sequence[MicroBatch], weight: float
    ) -> tuple[Tensor, TokenSums]:
        """See `PairLoss`."""
        hidden = torch.cat([self._forward.hidden(micro) for micro in micro_batches])
        scores: Tensor = self._head(hidden.to(next(self._head.parameters()).dtype))[:, 0]
        scores = scores.to(self._forward.new_column(0))
        at = _places(micro_batches, scores)
        ordered = torch.zeros_like(scores).index_copy(0, at, scores)
        better, worse = ordered[::_ANSWERS], ordered[1::_ANSWERS]
        return bradley_terry_loss(better, worse, torch.full_like(better, weight))


class PairStep:
    """What a train engine does with pairs; holds no weights of its own."""

    def __init__(
        self, forward: RowForward, loss: PairLoss, ranks: RankGroup, max_tokens: int
    ) -> None:
        """`max_tokens`: of the answers that are computed together."""
        self._forward = forward
        self._loss = loss
        self._ranks = ranks
        self._max_tokens = max_tokens

    def run(
        self,
        pairs: Sequence[PreferencePair],
        progress: Progress,
        update: Callable[[], None],
    ) -> StepStats:
        """One update: the mean loss over the pairs of all ranks.

        Args:
            pairs: This rank's share of the batch; may be empty.
            progress: Of this step, still at its beginning.
            update: Updates the model with the gradient that was gathered, and `progress`.
        """
        started = time.monotonic()
        num_tokens = sum(int(a.loss_mask.sum()) for p in pairs for a in (p.chosen, p.rejected))
        counts = [float(len(pairs)), float(num_tokens)]
        num_pairs, num_tokens = map(int, self._ranks.sum_numbers(counts))
        tally = TokenTally()
        work: list[MicroBatch] = []
        parts_of_all = self._parts(pairs)
        for number, sequences in enumerate(parts_of_all, 1):
            micro_batches = self._forward.micro_batches(sequences)
            loss, parts = self._loss(sequences, micro_batches, 1.0 / num_pairs)
            self._forward.backward(loss, is_last=number == len(parts_of_all))
            tally.add({**parts, "loss": loss})
            work += micro_batches
        if num_pairs:
            update()
        else:
            progress.empty += 1
        sums = tally.over_ranks(self._ranks)
        metrics = given_metrics(
            sums,
            progress,
            work_metrics(work, num_tokens, started, self._ranks),
            tokens=num_tokens,
            sequences=_ANSWERS * num_pairs,
        )
        return StepStats(metrics, num_tokens, progress.taken)

    @torch.no_grad()
    def evaluate(self, pairs: Sequence[PreferencePair]) -> PairEvaluation:
        """How well this rank's share of held-out pairs is told apart, over all ranks."""
        started = time.monotonic()
        tally = TokenTally()
        for sequences in self._parts(pairs):
            loss, parts = self._loss(sequences, self._forward.micro_batches(sequences), 1.0)
            tally.add({**parts, "loss": loss})
        sums = tally.over_ranks(self._ranks)
        count = sums.get("pairs", 0.0)
        mean = {name: total / max(1.0, count) for name, total in sums.items()}
        return PairEvaluation(
            int(count),
            mean.get("loss", 0.0),
            mean.get("pair_accuracy", 0.0),
            mean.get("reward_margin", 0.0),
            time.monotonic() - started,
        )

    def _parts(self, pairs: Sequence[PreferencePair]) -> list[list[TrainSequence]]:
        """What is computed together; with empty parts where passes are collective. Collective."""
        found = list(self._whole_pairs(pairs))
        num_parts = self._forward.placed.num_passes(len(found))
        return [*found, *([] for _ in range(num_parts - len(found)))]

    def _whole_pairs(self, pairs: Sequence[PreferencePair]) -> Iterator[list[TrainSequence]]:
        """Whole pairs that fit in `max_tokens`, of similar length; a longer pair goes alone."""
        part: list[TrainSequence] = []
        used = 0
        for number, pair in enumerate(sorted(pairs, key=_num_tokens)):
            size = _num_tokens(pair)
            if part and used + size > self._max_tokens:
                yield part
                part, used = [], 0
            part += [self._loss.sequence(a, number) for a in (pair.chosen, pair.rejected)]
            used += size
        if part:
            yield part


def _num_tokens(pair: PreferencePair) -> int:
    return len(pair.chosen.token_ids) + len(pair.rejected.token_ids)


def _places(micro_batches: Sequence[MicroBatch], like: Tensor) -> Tensor:
    """[N] place of each computed token among those of the sequences, end to end."""
    origins = np.concatenate([micro.origins for micro in micro_batches])
    return torch.from_numpy(origins).to(like.device)
