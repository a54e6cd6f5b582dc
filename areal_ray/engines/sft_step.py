"""SftStep: a train engine's step on given conversations.

Ranks are exact: a token weighs one over the trained tokens of all ranks. Collective.
"""

import time
from collections.abc import Callable, Sequence

from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.protocols import StepStats
from areal_ray.engines.row_forward import RowForward
from areal_ray.engines.sft import SftEvaluation, SftExample
from areal_ray.engines.sft_evaluation import evaluate_examples
from areal_ray.engines.sft_loss import SftLoss
from areal_ray.engines.train_metrics import Progress, TokenTally, given_metrics, work_metrics
from areal_ray.engines.train_rows import sft_sequences


class SftStep:
    """What a train engine does with examples; holds no weights of its own."""

    def __init__(self, forward: RowForward, loss: SftLoss, ranks: RankGroup) -> None:
        self._forward = forward
        self._loss = loss
        self._ranks = ranks

    def run(
        self, examples: Sequence[SftExample], progress: Progress, update: Callable[[], None]
    ) -> StepStats:
        """One update: the mean loss over the trained tokens of all ranks.

        Args:
            examples: This rank's share of the batch; may be empty.
            progress: Of this step, still at its beginning.
            update: Updates the model with the gradient that was gathered, and `progress`.
        """
        started = time.monotonic()
        sequences = sft_sequences(
            iter([e.token_ids for e in examples]), iter([e.loss_mask for e in examples])
        )
        counts = [float(sum(s.num_trained for s in sequences)), float(len(sequences))]
        num_tokens, num_examples = map(int, self._ranks.sum_numbers(counts))
        micro_batches = self._loss.micro_batches(sequences)
        tally = TokenTally()
        if num_tokens:
            for micro in micro_batches:
                loss, parts = self._loss(micro, num_tokens)
                self._forward.backward(loss, is_last=micro is micro_batches[-1])
                tally.add({**parts, "loss": loss})
            update()
        else:
            progress.empty += 1
        sums = tally.over_ranks(self._ranks)
        work = work_metrics(micro_batches, num_tokens, started, self._ranks)
        metrics = given_metrics(sums, progress, work, tokens=num_tokens, sequences=num_examples)
        return StepStats(metrics, num_tokens, progress.taken)

    def evaluate(self, examples: Sequence[SftExample]) -> SftEvaluation:
        """Teacher-forced accuracy on this rank's share of held-out examples, over all ranks."""
        return evaluate_examples(self._forward, examples, self._ranks)
