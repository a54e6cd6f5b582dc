"""Penalties and biases: logits other than the policy's own, for the rows that ask for them.

Called by the running batch once per step, before temperature and filters, and only where a row
asks. In the order bias, repetition, frequency and presence (vLLM's): repetition as in CTRL
(arXiv:1909.05858) and Hugging Face's processor, the other two as OpenAI's API defines them.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.engines.protocols import SamplingConfig
from areal_ray.engines.row_table import RowTable


def adjusted_logits(
    logits: torch.Tensor, which: torch.Tensor, rows: RowTable, first: int
) -> torch.Tensor:
    """[a, vocabulary] float32 what the rows first + which [a] draw from; `logits` stay."""
    changed = logits[which].float()
    for row_logits, i in zip(changed, which.tolist(), strict=True):
        request = rows.requests[first + i]
        adjust_(row_logits, request.sampling, request.prompt_ids, rows.sampled(first + i))
    return changed


def adjust_(
    logits: torch.Tensor,
    sampling: SamplingConfig,
    prompt_ids: NDArray[np.int32],
    sampled_ids: NDArray[np.int32],
) -> None:
    """Change one row of logits in place.

    Args:
        logits: [vocabulary] float32.
        sampling: Of the row.
        prompt_ids: [P] what repetition_penalty also counts.
        sampled_ids: [N] the turn so far.
    """
    if sampling.logit_bias:
        ids = _index(np.array([int(key) for key in sampling.logit_bias]), logits)
        logits[ids] += logits.new_tensor(list(sampling.logit_bias.values()))
    if sampling.repetition_penalty != 1.0:
        ids = _index(np.unique(np.concatenate((prompt_ids, sampled_ids))), logits)
        seen, penalty = logits[ids], sampling.repetition_penalty
        logits[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)
    if sampling.presence_penalty or sampling.frequency_penalty:
        tokens, counts = np.unique(sampled_ids, return_counts=True)
        cost = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[_index(tokens, logits)] -= logits.new_tensor(cost)


def why_bias_refused(sampling: SamplingConfig, vocab_size: int) -> str:
    """Empty if logit_bias names tokens of the vocabulary, else what is wrong."""
    beyond = [key for key in sampling.logit_bias if int(key) >= vocab_size]
    if not beyond:
        return ""
    return (
        f"logit_bias: names token {beyond[0]}; must be in 0..{vocab_size - 1}. "
        "Use the tokenizer of the model."
    )


def _index(ids: NDArray[np.int32] | NDArray[np.int64], logits: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(logits.device)
