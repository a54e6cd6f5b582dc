"""What a forward over the KV cache computes in one call."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """New tokens of neighbouring cache rows, padded on the right to the same count."""

    token_ids: Tensor
    """[m, q] int64"""
    positions: Tensor
    """[m, q] int64, where each token stands in its sequence; the cache's `num_tokens` = padding."""
    last: Tensor | None
    """[m] int64 index of each row's last real token in 0..q-1, whose logits are wanted; None where
    q is 1 or those of all tokens are."""
    first_row: int
    """Cache row of the first sequence."""
    num_tokens: int
    """Longest sequence, new tokens included: how much of the cache attention reads."""
    is_fresh: bool
    """Whether every row starts at position 0."""
