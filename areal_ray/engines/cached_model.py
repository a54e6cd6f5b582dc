"""A forward pass with the KV cache of the running rows: prompts in bulk, then token by token.

Called by the running batch, with the tokens it knows; speaks in rows and positions.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.engines.kv_cache import CacheShape, KVCache
from areal_ray.engines.token_block import TokenBlock


class Forward(Protocol):
    """A model's forward pass over a KV cache; `LeanForward` and `HfForward` are such."""

    cache_shape: CacheShape

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the checkpoint, a tied head left out."""

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Copies of checked tensors, ready to be put in place."""

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Name of a live tensor that is not what `prepare` makes of these; empty if all are."""

    def install(self, weights: Any) -> None:
        """Use what `prepare` made from the next call on."""

    def logits(self, block: TokenBlock, cache: KVCache) -> torch.Tensor:
        """[m, vocabulary] after each row's last token; the cache then holds the new tokens.

        [m * q, vocabulary] where `block.last` is None.
        """


class CachedModel:
    """Logits after the last known token of each row."""

    def __init__(self, forward: Forward, cache: KVCache) -> None:
        self.forward = forward
        self.cache = cache
        self.device = cache.device

    def step(self, tokens: NDArray[np.int32], positions: NDArray[np.int64]) -> torch.Tensor:
        """[n, vocabulary] after one more token [n] of rows 0..n-1, standing at positions [n]."""
        block = TokenBlock(
            token_ids=self._on_device(tokens.astype(np.int64)[:, None]),
            positions=self._on_device(positions[:, None]),
            last=None,
            first_row=0,
            num_tokens=int(positions.max()) + 1,
            is_fresh=False,
        )
        return self.forward.logits(block, self.cache)

    def prefill(
        self,
        tokens: NDArray[np.int32],
        first_row: int,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        max_tokens: int,
    ) -> torch.Tensor:
        """[m, vocabulary] after all known tokens of rows first_row..first_row+m-1.

        Neighbouring rows are computed together where that wastes little on padding.

        Args:
            tokens: [rows, window] what the rows of the cache hold or shall hold.
            starts: [m] how many tokens of each row the cache holds already.
            lengths: [m] how many tokens of each row are known, more than starts.
            max_tokens: Bound on a block, padding included; a single row may exceed it.
        """
        counts = lengths - starts
        parts, begin = [], 0
        while begin < len(starts):
            end = _end_of_block(starts, counts, begin, max_tokens)
            rows = slice(begin, end)
            parts.append(self._compute(tokens, first_row + begin, starts[rows], counts[rows]))
            begin = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _compute(
        self,
        tokens: NDArray[np.int32],
        first_row: int,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> torch.Tensor:
        """[m, vocabulary] after tokens starts..starts+counts-1 of rows first_row.. ."""
        columns = np.arange(int(counts.max()))
        positions = starts[:, None] + columns
        is_real = columns < counts[:, None]
        rows = first_row + np.arange(len(starts))[:, None]
        token_ids = tokens[rows, np.where(is_real, positions, 0)].astype(np.int64)
        block = TokenBlock(
            token_ids=self._on_device(token_ids),
            positions=self._on_device(np.where(is_real, positions, self.cache.num_tokens)),
            last=self._on_device(counts - 1) if len(columns) > 1 else None,
            first_row=first_row,
            num_tokens=int((starts + counts).max()),
            is_fresh=not starts.any(),
        )
        return self.forward.logits(block, self.cache)

    def _on_device(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def _end_of_block(
    starts: NDArray[np.int64], counts: NDArray[np.int64], begin: int, max_tokens: int
) -> int:
    """End of the run of rows from `begin` that are alike enough to be computed together."""
    end, widest = begin + 1, int(counts[begin])
    while end < len(starts):
        count = int(counts[end])
        widest = max(widest, count)
        is_too_big = (end + 1 - begin) * widest > max_tokens
        is_other_kind = (starts[end] > 0) != (starts[begin] > 0)
        is_padding = count * 2 < widest
        if is_too_big or is_other_kind or is_padding:
            break
        end += 1
    return end
