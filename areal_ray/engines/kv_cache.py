"""Keys and values of running sequences, one tensor, a row for each sequence.

Row r holds positions 0..length-1 of one sequence, left-aligned: a token's position is its column.
The engine keeps running sequences in rows 0..n-1 so that attention reads plain slices. One more
column than asked for is kept at the end, where the padding of a prefill is written.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one position of one sequence needs."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one position in all layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """How far a cache grows; beyond `max_bytes` only where a sequence cannot do with less."""

    max_rows: int
    max_tokens: int
    max_bytes: int


class KVCache:
    """Grows by doubling within its limits; contents survive growth."""

    def __init__(
        self, shape: CacheShape, limits: CacheLimits, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self._limits = limits
        self.device = device
        self.dtype = dtype
        self.num_rows = 0
        self.num_tokens = 0
        self._planes = torch.empty(0)
        self._allocate(0, 0)

    def _allocate(self, num_rows: int, num_tokens: int) -> None:
        layers, heads, width = (
            self.shape.num_layers,
            self.shape.num_kv_heads,
            self.shape.head_dim,
        )
        # Zeros, not empty: columns beyond a row's length get weight 0, and 0 * NaN is NaN.
        planes = torch.zeros(
            (layers, 2, num_rows, heads, num_tokens + 1, width),
            dtype=self.dtype,
            device=self.device,
        )
        if self.num_rows:
            planes[:, :, : self.num_rows, :, : self.num_tokens] = self._planes[..., :-1, :]
        self._planes = planes
        self.num_rows, self.num_tokens = num_rows, num_tokens
        columns = num_tokens + 1
        self._flat = [planes[i].view(-1, width) for i in range(layers)]
        self._keys = [planes[i, 0] for i in range(layers)]
        self._values = [planes[i, 1] for i in range(layers)]
        row = torch.arange(num_rows, device=self.device)[:, None] * (heads * columns)
        head = torch.arange(heads, device=self.device)[None, :] * columns
        plane = num_rows * heads * columns
        self._offsets = torch.cat((row + head, row + head + plane), 1)

    def reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make room for rows of so many tokens, doubling where the limits leave room for that."""
        if num_rows <= self.num_rows and num_tokens <= self.num_tokens:
            return
        rows = min(_doubled(max(self.num_rows, 8), num_rows), self._limits.max_rows)
        tokens = min(_doubled(max(self.num_tokens, 64), num_tokens), self._limits.max_tokens)
        token_bytes = self.shape.token_bytes(self.dtype)
        if rows * tokens * token_bytes > self._limits.max_bytes:
            tokens = max(num_tokens, self.num_tokens)
        if rows * tokens * token_bytes > self._limits.max_bytes:
            rows = max(num_rows, self.num_rows)
        self._allocate(max(rows, self.num_rows), max(tokens, self.num_tokens))

    def free(self) -> None:
        """Give all memory back; `reserve` takes it anew."""
        self.num_rows = self.num_tokens = 0
        self._allocate(0, 0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def write_index(self, first_row: int, positions: torch.Tensor) -> torch.Tensor:
        """[m * q * 2 * kv_heads] where `write` puts what it is given, the same for all layers.

        Args:
            first_row: Row of the first sequence; the others follow.
            positions: [m, q] column of each token; `num_tokens` = nowhere.
        """
        offsets = self._offsets[first_row : first_row + positions.shape[0]]
        return (offsets.unsqueeze(1) + positions.unsqueeze(2)).view(-1)

    def write(self, layer: int, index: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store [m, q, 2 * kv_heads, head_dim] keys then values of each token."""
        self._flat[layer].index_copy_(0, index, keys_values.reshape(-1, self.shape.head_dim))

    def keys_transposed(
        self, layer: int, first_row: int, num_rows: int, num_tokens: int
    ) -> torch.Tensor:
        """[num_rows * kv_heads, head_dim, num_tokens], a view."""
        heads, width = self.shape.num_kv_heads, self.shape.head_dim
        stride = (self.num_tokens + 1) * width
        return self._keys[layer].as_strided(
            (num_rows * heads, width, num_tokens),
            (stride, 1, width),
            self._keys[layer].storage_offset() + first_row * heads * stride,
        )

    def values(self, layer: int, first_row: int, num_rows: int, num_tokens: int) -> torch.Tensor:
        """[num_rows * kv_heads, num_tokens, head_dim], a view."""
        heads, width = self.shape.num_kv_heads, self.shape.head_dim
        stride = (self.num_tokens + 1) * width
        return self._values[layer].as_strided(
            (num_rows * heads, num_tokens, width),
            (stride, width, 1),
            self._values[layer].storage_offset() + first_row * heads * stride,
        )

    def keys_and_values(
        self, layer: int, first_row: int, num_rows: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both as [num_rows, kv_heads, num_tokens, head_dim] views."""
        rows = self._planes[layer, :, first_row : first_row + num_rows, :, :num_tokens]
        return rows[0], rows[1]

    def copy_rows(
        self,
        source: "KVCache",
        source_rows: NDArray[np.int64],
        rows: NDArray[np.int64],
        num_tokens: int,
    ) -> None:
        """Copy the first tokens of `source_rows` into `rows`, none of which is among them."""
        if self.device.type == "cpu":  # where slices are several times as fast as an index
            for source_row, row in zip(source_rows.tolist(), rows.tolist(), strict=True):
                kept = source._planes[:, :, source_row, :, :num_tokens]
                self._planes[:, :, row, :, :num_tokens] = kept
            return
        gathered = source._planes[..., :num_tokens, :].index_select(
            2, torch.from_numpy(source_rows).to(self.device)
        )
        self._planes[..., :num_tokens, :].index_copy_(
            2, torch.from_numpy(rows).to(self.device), gathered
        )

    def clear_row(self, row: int) -> None:
        """Overwrite what broken weights left: a hidden NaN would still spoil a sum."""
        self._planes[:, :, row] = 0


def _doubled(size: int, wanted: int) -> int:
    """The first of size, 2 * size, 4 * size, ... that is enough."""
    while size < wanted:
        size *= 2
    return size
