"""Penalties, biases, grammars: logits other than the policy's own, for the rows that ask for them.

Called by the running batch once per step, before temperature and filters, and only where a row
asks; all such rows in a few operations. In the order bias, repetition, frequency and presence
(vLLM's), then grammars: repetition as in CTRL (arXiv:1909.05858) and Hugging Face's processor, the
next two as OpenAI's API defines them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.engines.grammar_rows import mask_logits
from areal_ray.engines.protocols import GenerationRequest, SamplingConfig
from areal_ray.engines.row_table import RowTable


def adjusted_logits(
    logits: torch.Tensor, which: torch.Tensor, rows: RowTable, first: int
) -> torch.Tensor:
    """[a, vocabulary] float32 what the rows first + which [a] draw from; `logits` stay.

    The masks of rows with a grammar are those of their next token: see `GrammarRows.settle`.
    """
    changed = logits[which].float()
    chosen = first + which.cpu().numpy()
    requests = [rows.requests[row] for row in chosen.tolist()]
    if any(request.sampling.logit_bias for request in requests):
        _add_biases(changed, requests)
    has_penalties = (rows.column("repetition")[chosen] != 1.0).any() or any(
        rows.column(name)[chosen].any() for name in ("presence", "frequency")
    )
    if has_penalties:
        changed = _with_penalties(changed, chosen, rows)
    mask_logits(changed, requests)
    return changed


def _with_penalties(
    changed: torch.Tensor, chosen: NDArray[np.int64], rows: RowTable
) -> torch.Tensor:
    """[a, vocabulary] the logits of the chosen rows [a] after their penalties."""
    tokens, counts = (torch.from_numpy(a).to(changed.device) for a in rows.seen_tokens(chosen))
    repetition, presence, frequency = (
        torch.from_numpy(rows.column(name)[chosen, None]).to(changed.device)
        for name in ("repetition", "presence", "frequency")
    )
    seen = changed.gather(1, tokens)
    seen = torch.where(seen < 0, seen * repetition, seen / repetition)
    seen -= frequency * counts + presence * (counts > 0)
    return changed.scatter_(1, tokens, seen)  # a token that is there twice gets the same twice


def _add_biases(logits: torch.Tensor, requests: Sequence[GenerationRequest]) -> None:
    """Add each row's biases in place; shorter ones are filled up with nothing to token 0."""
    widest = max(len(request.sampling.logit_bias) for request in requests)
    tokens = np.zeros((len(requests), widest), np.int64)
    values = np.zeros((len(requests), widest), np.float32)
    for row, request in enumerate(requests):
        bias = request.sampling.logit_bias
        tokens[row, : len(bias)] = [int(key) for key in bias]
        values[row, : len(bias)] = list(bias.values())
    logits.scatter_add_(
        1, torch.from_numpy(tokens).to(logits.device), torch.from_numpy(values).to(logits.device)
    )


def why_bias_refused(sampling: SamplingConfig, vocab_size: int) -> str:
    """Empty if logit_bias names tokens of the vocabulary, else what is wrong."""
    beyond = [key for key in sampling.logit_bias if int(key) >= vocab_size]
    if not beyond:
        return ""
    return (
        f"logit_bias: names token {beyond[0]}; must be in 0..{vocab_size - 1}. "
        "Use the tokenizer of the model."
    )
