"""Log-probs and entropy of sampled tokens, without the logits of every position at once.

Alignment, everywhere in this package: the log-prob *at position t* is that of token t given the
tokens before it. Callers pass the hidden state that predicts each token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_BYTES = {"cpu": 192 << 20, "cuda": 512 << 20}
"""Float32 logits above this are made in chunks, and again in the backward pass instead of kept."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What a model says of N given tokens."""

    logprobs: Tensor
    """[N] float32 (float64 for a float64 model); carries the gradient."""
    entropy: Tensor
    """[N] of the whole next-token distribution, in nats; detached unless asked for."""
    is_argmax: Tensor
    """[N] bool: greedy decoding would have taken this token."""


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    head_bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    chunk_bytes: int | None = None,
) -> TokenLogprobs:
    """Log-probs of `targets` under softmax((hidden @ head_weight.T + head_bias) / temperature).

    Memory beyond `hidden` and gradients: about six float32 copies of the logits of one chunk.
    All logits are held only where they fit in `chunk_bytes`.

    Args:
        hidden: [N, H] final hidden state of the position *before* each target.
        head_weight: [V, H].
        head_bias: [V] or None.
        targets: [N] int64 token ids.
        temperature: That of sampling; 0 (greedy) counts as 1.
        entropy_gradient: The entropy carries the gradient too, for an entropy bonus.
        chunk_bytes: Size of one chunk of float32 logits; None = by device.
    """
    if chunk_bytes is None:
        chunk_bytes = _CHUNK_BYTES.get(hidden.device.type, _CHUNK_BYTES["cpu"])
    rows = max(1, chunk_bytes // (4 * head_weight.shape[0]))
    arguments = (head_weight, head_bias, temperature, entropy_gradient)
    if len(targets) <= rows:
        return TokenLogprobs(*_head_chunk(hidden, targets, *arguments))
    parts = [
        checkpoint(_head_chunk, h, t, *arguments, use_reentrant=False)
        for h, t in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
    ]
    return TokenLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def logits_logprobs(
    logits: Tensor, targets: Tensor, temperature: float, *, entropy_gradient: bool = False
) -> TokenLogprobs:
    """The same from [N, V] logits that exist already."""
    return TokenLogprobs(*_from_logits(logits, targets, temperature, entropy_gradient))


def _head_chunk(
    hidden: Tensor,
    targets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return _from_logits(logits, targets, temperature, entropy_gradient)


def _from_logits(
    logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if logits.dtype != torch.float64:
        logits = logits.float()
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    table = torch.log_softmax(logits, dim=-1)
    logprobs = table.gather(-1, targets[:, None])[:, 0]
    # Impossible tokens (log-prob -inf) carry no entropy; -inf * 0 would be NaN.
    if entropy_gradient:
        entropy = -(table.exp() * table.clamp_min(-1e4)).sum(-1)
    with torch.no_grad():
        if not entropy_gradient:
            entropy = -table.exp().mul_(table.clamp_min(-1e4)).sum(-1)
        is_argmax = logprobs >= table.amax(-1)
    return logprobs, entropy, is_argmax
