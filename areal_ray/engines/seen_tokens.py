"""The distinct tokens of each running row, for penalties: kept up token by token, all rows at once.

Held by the row table once a row asks for penalties; rows move in it as they do in the table.
"""

import numpy as np
from numpy.typing import NDArray


class SeenTokens:
    """Which tokens a row knows, and how often its turn holds each."""

    def __init__(self, max_rows: int) -> None:
        self._tokens = np.zeros((max_rows, 64), np.int64)
        self._counts = np.zeros((max_rows, 64), np.float32)
        self._num_distinct = np.zeros(max_rows, np.int64)
        self._num_known = np.zeros(max_rows, np.int64)
        """Tokens of each row that were counted; 0 = begin anew."""

    def forget(self, row: int) -> None:
        """Another sequence is in the row from now on."""
        self._num_known[row] = 0

    def move(self, movers: NDArray[np.int64], gaps: NDArray[np.int64]) -> None:
        """Rows that moved from the end into gaps."""
        for table in (self._tokens, self._counts, self._num_distinct, self._num_known):
            table[gaps] = table[movers]

    def update(
        self,
        rows: NDArray[np.int64],
        tokens: NDArray[np.int32],
        prompts: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """[a, k] distinct tokens of these rows [a], and how often the turn holds each.

        A row with fewer than k is filled up with its first. A token of the prompt alone counts 0.

        Args:
            rows: [a]
            tokens: [max_rows, max_tokens] what each row knows.
            prompts: [a] how many of them are its prompt.
            lengths: [a] how many there are.
        """
        behind = lengths - self._num_known[rows]
        is_next = (behind == 1) & (self._num_known[rows] > 0)
        for row, prompt, length in zip(
            *(column[~is_next & (behind != 0)].tolist() for column in (rows, prompts, lengths)),
            strict=True,
        ):
            self._count_anew(row, tokens[row, :length], prompt)
        if is_next.any():
            self._count_next(rows[is_next], tokens[rows[is_next], lengths[is_next] - 1])
        self._num_known[rows] = lengths
        count = self._num_distinct[rows]
        columns = np.arange(int(count.max()))
        columns = np.where(columns < count[:, None], columns, 0)
        return self._tokens[rows[:, None], columns], self._counts[rows[:, None], columns]

    def _count_anew(self, row: int, known: NDArray[np.int32], prompt: int) -> None:
        distinct = np.unique(known)
        sampled, counts = np.unique(known[prompt:], return_counts=True)
        self._make_room(len(distinct))
        self._tokens[row, : len(distinct)] = distinct
        self._counts[row, : len(distinct)] = 0.0
        self._counts[row, np.searchsorted(distinct, sampled)] = counts
        self._num_distinct[row] = len(distinct)

    def _count_next(self, rows: NDArray[np.int64], new: NDArray[np.int32]) -> None:
        """One more sampled token [b] of each of rows [b]."""
        count = self._num_distinct[rows]
        widest = int(count.max())
        self._make_room(widest + 1)
        is_it = self._tokens[rows, :widest] == new[:, None]
        is_it &= np.arange(widest) < count[:, None]
        is_old = is_it.any(1)
        at = np.where(is_old, is_it.argmax(1), count)
        self._counts[rows, at] = np.where(is_old, self._counts[rows, at], 0.0) + 1.0
        self._tokens[rows, at] = new
        self._num_distinct[rows] += ~is_old

    def _make_room(self, width: int) -> None:
        more = width - self._tokens.shape[1]
        if more > 0:
            more = max(more, self._tokens.shape[1])
            self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))
            self._counts = np.pad(self._counts, ((0, 0), (0, more)))
