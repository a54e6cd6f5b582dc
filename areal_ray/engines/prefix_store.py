"""Sequences that have ended, kept so that a next turn which extends one need not start over.

An episode's second turn begins with its first; only what is new is then computed. What is kept
was computed under one version of the weights and is forgotten when they change.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from areal_ray.engines.kv_cache import CacheLimits, KVCache


def num_shared(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """How many tokens two sequences have in common at their start."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that just ended in a row of the running cache."""

    prefix_key: str
    token_ids: NDArray[np.int32]
    """[k] the tokens whose keys and values the row holds."""
    row: int


class PrefixStore:
    """The most recently ended sequences by prefix key; the least recently used one gives way."""

    def __init__(self, cache: KVCache, limits: CacheLimits) -> None:
        self.cache = cache
        self._limits = limits
        self._kept: OrderedDict[int, tuple[str, NDArray[np.int32]]] = OrderedDict()
        self._rows_by_key: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, ended: Sequence[Ended], source: KVCache) -> None:
        """Copy ended sequences out of the running cache before their rows are reused."""
        token_bytes = source.shape.token_bytes(source.dtype)
        longest = max((len(e.token_ids) for e in ended), default=0)
        columns = max(self.cache.num_tokens, longest, 1)
        room = min(self._limits.max_rows, self._limits.max_bytes // (columns * token_bytes))
        ended = ended[-room:] if room else []
        if not ended:
            return
        rows = []
        for sequence in ended:
            row = len(self._kept)
            if row >= room:
                row = self._forget_oldest()
            rows.append(row)
            self._kept[row] = (sequence.prefix_key, sequence.token_ids)
            self._rows_by_key.setdefault(sequence.prefix_key, []).append(row)
        self.cache.reserve(max(rows) + 1, longest)
        source_rows = np.array([e.row for e in ended], dtype=np.int64)
        self.cache.copy_rows(source, source_rows, np.array(rows, dtype=np.int64), longest)

    def _forget_oldest(self) -> int:
        row, (key, _) = self._kept.popitem(last=False)
        self._rows_by_key[key].remove(row)
        if not self._rows_by_key[key]:
            del self._rows_by_key[key]
        return row

    def longest(self, prefix_key: str, prompt_ids: NDArray[np.int32]) -> tuple[int, int]:
        """Row and number of tokens of the kept sequence that shares most with a prompt."""
        rows = self._rows_by_key.get(prefix_key, ())
        best_row, best = -1, 0
        # An episode's next turn extends one sequence as a whole: found without reading the others.
        for row in rows:
            kept = self._kept[row][1]
            is_longer = best < len(kept) <= len(prompt_ids)
            if is_longer and np.array_equal(kept, prompt_ids[: len(kept)]):
                best_row, best = row, len(kept)
        if best_row < 0:
            for row in rows:
                shared = num_shared(self._kept[row][1], prompt_ids)
                if shared > best:
                    best_row, best = row, shared
        if best_row >= 0:
            self._kept.move_to_end(best_row)
        return best_row, best

    def clear(self) -> None:
        """Forget all: the weights have changed."""
        self._kept.clear()
        self._rows_by_key.clear()

    def free(self) -> None:
        """Forget all and give the memory back."""
        self.clear()
        self.cache.free()
