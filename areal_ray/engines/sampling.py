"""One token for each row of logits, with the log-prob the learner will compare against.

Called by the torch generation engine once per step. The recorded log-prob is that of the FULL
softmax at the sampling temperature: top-p, top-k and min-p decide which token may be drawn and do
not renormalise what is recorded. The learner does the same, so that on unchanged weights its ratio
to the behaviour policy is exactly 1. Penalties, biases and grammars make another distribution to
draw from; what is recorded is still the policy's own, and what they drew does not train.

Each draw takes one uniform number that depends on nothing but the request's seed and the token's
position, so a request's tokens do not depend on what else is in the batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# 23 bits: the largest value times any float32 sum is below that sum even after rounding, so a
# draw never falls off the end of the cumulative distribution.
_BITS = np.uint64(64 - 23)


def uniforms(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """[n] numbers in [0, 1), a pure function of a request's stream and the token's position.

    A counter hash: splitmix64 (Steele, Lea and Flood, OOPSLA 2014) at step `position`.
    """
    mixed = streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN  # wraps, as it should
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    bits = (mixed ^ (mixed >> np.uint64(31))) >> _BITS
    return bits.astype(np.float32) * np.float32(2.0**-23)


def stream(seed: int) -> int:
    """Where a seed's numbers begin, in 0..2^64-1; neighbouring seeds begin far apart."""
    mask = 2**64 - 1
    mixed = ((seed + 1) * int(_GOLDEN)) & mask
    mixed = ((mixed ^ (mixed >> 30)) * int(_MIX_1)) & mask
    mixed = ((mixed ^ (mixed >> 27)) * int(_MIX_2)) & mask
    return mixed ^ (mixed >> 31)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row of a batch is sampled, sorted once for as long as the rows stay the same."""

    inverse_temperature: torch.Tensor | None
    """[n, 1]; 1 for greedy rows; None where all are 1."""
    greedy: torch.Tensor | None
    """[g] indices of rows at temperature 0."""
    filtered: torch.Tensor | None
    """[f] indices of rows with top-p, top-k or min-p."""
    top_p: torch.Tensor | None
    """[f, 1]"""
    top_k: torch.Tensor | None
    """[f, 1], the vocabulary size where off."""
    min_p: torch.Tensor | None
    """[f, 1]"""
    adjusted: torch.Tensor | None
    """[a] indices of rows with penalties, biases or a grammar."""
    told: torch.Tensor | None
    """[t] indices of rows whose likeliest tokens are told."""
    num_told: int
    """Tokens told of each, the most that a row asks for."""

    @classmethod
    def of(
        cls,
        temperature: NDArray[np.float32],
        top_p: NDArray[np.float32],
        top_k: NDArray[np.int64],
        min_p: NDArray[np.float32],
        is_adjusted: NDArray[np.bool_],
        num_told: NDArray[np.int64],
        device: torch.device,
    ) -> "SamplingRows":
        """Sort rows [n] by what has to be done to their logits."""
        is_filtered = (top_p < 1.0) | (top_k > 0) | (min_p > 0.0)
        is_special = is_filtered | is_adjusted | (num_told > 0)
        if (temperature == 1.0).all() and not is_special.any():
            return PLAIN_SAMPLING
        is_greedy = temperature == 0.0
        inverse = np.where(is_greedy, 1.0, 1.0 / np.where(is_greedy, 1.0, temperature))
        filtered = np.flatnonzero(is_filtered & ~is_greedy)
        some = len(filtered) > 0
        off = np.where(top_k > 0, top_k, np.iinfo(np.int64).max)
        return cls(
            inverse_temperature=None
            if (inverse == 1.0).all()
            else _on_device(inverse.astype(np.float32)[:, None], device),
            greedy=_on_device(np.flatnonzero(is_greedy), device) if is_greedy.any() else None,
            filtered=_on_device(filtered, device) if some else None,
            top_p=_on_device(top_p[filtered, None].astype(np.float32), device) if some else None,
            top_k=_on_device(off[filtered, None], device) if some else None,
            min_p=_on_device(min_p[filtered, None].astype(np.float32), device) if some else None,
            adjusted=_on_device(np.flatnonzero(is_adjusted), device) if is_adjusted.any() else None,
            told=_on_device(np.flatnonzero(num_told), device) if num_told.any() else None,
            num_told=int(num_told.max(initial=0)),
        )


PLAIN_SAMPLING = SamplingRows(None, None, None, None, None, None, None, None, 0)
"""Temperature 1 and the whole vocabulary in every row: what training samples with."""


def _on_device(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    uniform: torch.Tensor,
    adjusted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row by inverting its cumulative distribution.

    Args:
        logits: [n, vocabulary] the policy's own.
        rows: What `SamplingRows.of` made for these rows.
        uniform: [n] float32 in [0, 1), see `uniforms`.
        adjusted: [a, vocabulary] float32 what `rows.adjusted` draw from in place of `logits`.

    Returns:
        [n] int64 token ids and [n] float32 log-probs: log_softmax(logits / temperature) of the
        drawn token, over the whole vocabulary; at temperature 1 for greedy rows.
    """
    if adjusted is not None:
        return _sample_adjusted(logits.float(), rows, uniform, adjusted)
    tokens, probabilities = _draw(logits, rows, uniform)
    return tokens.squeeze(1), probabilities.gather(1, tokens).log_().squeeze(1)


def likeliest(
    logits: torch.Tensor, rows: SamplingRows, tokens: torch.Tensor, logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is told of `rows.told` [t] beside what `sample` drew.

    Args:
        logits: [n, vocabulary] the policy's own, as `sample` got them.
        rows: Of the same rows.
        tokens: [n] that it drew.
        logprobs: [n] that it gave them.

    Returns:
        [t, k] int64 token ids, the likeliest first, and [t, k] float32 log-probs of the
        distribution that `logprobs` are of; of a drawn token exactly its own.
    """
    which = rows.told
    assert which is not None
    own = logits[which].float()
    if rows.inverse_temperature is not None:
        own = own * rows.inverse_temperature[which]
    # Not the log of the probabilities: at low temperatures float32 holds but a few of them.
    whole = torch.log_softmax(own, -1)
    # The drawn one's may differ by rounding; put in before, it cannot break the order.
    whole.scatter_(1, tokens[which, None], logprobs[which, None])
    found, ids = torch.topk(whole, min(rows.num_told, whole.shape[1]), dim=-1)
    return ids, found


def _sample_adjusted(
    logits: torch.Tensor, rows: SamplingRows, uniform: torch.Tensor, adjusted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from other logits than those whose log-probs are recorded."""
    which = rows.adjusted
    assert which is not None
    tokens, probabilities = _draw(logits.index_copy(0, which, adjusted), rows, uniform)
    logprobs = probabilities.gather(1, tokens).log_()  # the other rows', as without these
    own = logits[which]
    if rows.inverse_temperature is not None:
        own = own * rows.inverse_temperature[which]
    # Not the log of a probability: a bias can draw what the policy gives less than float32 holds.
    logprobs[which] = torch.log_softmax(own, -1).gather(1, tokens[which])
    return tokens.squeeze(1), logprobs.squeeze(1)


def _draw(
    logits: torch.Tensor, rows: SamplingRows, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 1] tokens, and [n, vocabulary] the unfiltered probabilities they were drawn from."""
    if logits.dtype != torch.float32:
        logits = logits.float()
    if rows.inverse_temperature is not None:
        logits = logits * rows.inverse_temperature
    probabilities = torch.softmax(logits, -1)
    cumulative = torch.cumsum(probabilities, -1)
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)
    if rows.filtered is not None:
        tokens[rows.filtered] = _sample_filtered(probabilities[rows.filtered], rows, uniform)
    if rows.greedy is not None:
        tokens[rows.greedy] = logits[rows.greedy].argmax(-1, keepdim=True)
    # Non-finite logits leave an index past the end; the caller sees a log-prob that is not finite.
    tokens.clamp_(max=logits.shape[1] - 1)
    return tokens, probabilities


def _sample_filtered(
    probabilities: torch.Tensor, rows: SamplingRows, uniform: torch.Tensor
) -> torch.Tensor:
    """[f, 1] tokens drawn from the likely ones that top-p, top-k and min-p all allow."""
    assert rows.filtered is not None
    assert rows.top_p is not None
    assert rows.top_k is not None
    assert rows.min_p is not None
    largest_k = min(int(rows.top_k.max()), probabilities.shape[1])
    if largest_k < probabilities.shape[1]:
        likely, order = torch.topk(probabilities, largest_k, dim=-1)
    else:
        likely, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    cumulative = torch.cumsum(likely, -1)
    # A token stays while the mass before it is below top_p; the most likely one always does.
    before = torch.cat((torch.zeros_like(cumulative[:, :1]), cumulative[:, :-1]), -1)
    num_kept = (before < rows.top_p).sum(-1, keepdim=True)
    num_probable = (likely >= rows.min_p * likely[:, :1]).sum(-1, keepdim=True)
    num_kept = torch.minimum(torch.minimum(num_kept, num_probable), rows.top_k).clamp_(min=1)
    mass = cumulative.gather(1, num_kept - 1)
    drawn = torch.searchsorted(cumulative, uniform[rows.filtered].unsqueeze(1) * mass, right=True)
    return order.gather(1, torch.minimum(drawn, num_kept - 1))
