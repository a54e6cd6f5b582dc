"""Teacher-forced evaluation of supervised examples."""

from collections.abc import Sequence

import numpy as np
import torch

from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.row_forward import RowForward
from areal_ray.engines.sft import SftEvaluation, SftExample
from areal_ray.engines.train_rows import sft_sequences


@torch.no_grad()
def evaluate_examples(
    forward: RowForward, examples: Sequence[SftExample], ranks: RankGroup
) -> SftEvaluation:
    """Loss, token accuracy and exact match over the examples of all ranks; collective."""
    sequences = sft_sequences(
        iter([e.token_ids for e in examples]), iter([e.loss_mask for e in examples])
    )
    num_tokens = sum(s.num_trained for s in sequences)
    is_right, loss = np.zeros(num_tokens, bool), 0.0
    for micro in forward.micro_batches(sequences):
        scored = forward(micro, 1.0)
        is_right[micro.origins] = scored.is_argmax.cpu().numpy()
        loss -= float(scored.logprobs.double().sum())
    owners = np.repeat(np.arange(len(sequences)), [s.num_trained for s in sequences])
    spans = [e.span_ids[s.trained] for e, s in zip(examples, sequences, strict=True)]
    span_of = np.concatenate(spans) if spans else np.zeros(0, np.int32)
    (width,) = ranks.max_numbers([float(span_of.max(initial=-1) + 1)])
    numbers = [float(len(set(owners.tolist()))), loss, float(num_tokens), float(is_right.sum())]
    numbers.append(float(_matches(owners, is_right)[1]))
    for span in range(int(width)):
        inside = span_of == span
        numbers += [float(n) for n in _matches(owners[inside], is_right[inside])]
    count, loss, tokens, right, exact, *by_span = ranks.sum_numbers(numbers)
    return SftEvaluation(
        num_examples=int(count),
        loss=loss / max(1.0, tokens),
        token_accuracy=right / max(1.0, tokens),
        exact_match=exact / max(1.0, count),
        span_exact_match=tuple(
            matched / max(1.0, known)
            for known, matched in zip(by_span[::2], by_span[1::2], strict=True)
        ),
    )


def _matches(owners: np.ndarray, is_right: np.ndarray) -> tuple[int, int]:
    """How many owners there are, and of how many all tokens are right."""
    known = set(owners.tolist())
    return len(known), len(known - set(owners[~is_right].tolist()))
