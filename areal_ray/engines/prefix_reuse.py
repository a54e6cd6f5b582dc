"""What of a new prompt is already computed, in a running row or a sequence that was kept.

Called by the running batch as turns enter and end. Keys and values are reused only where the same
version of the weights computed them.
"""

from collections.abc import Sequence

import numpy as np

from areal_ray.engines.kv_cache import CacheLimits, KVCache
from areal_ray.engines.prefix_store import Ended, PrefixStore, num_shared
from areal_ray.engines.protocols import GenerationRequest
from areal_ray.engines.row_table import RowTable

_FEWEST_TOKENS_WORTH_COPYING = 8

Reused = tuple[int, int, bool]
"""Row to copy from, tokens to copy, whether from a kept sequence."""


class PrefixReuse:
    """Finds, copies and keeps what prompts share."""

    def __init__(self, rows: RowTable, cache: KVCache, kept_limits: CacheLimits) -> None:
        self._rows = rows
        self._cache = cache
        kept_cache = KVCache(cache.shape, kept_limits, cache.dtype, cache.device)
        self._kept = PrefixStore(kept_cache, kept_limits)

    def find(self, leaders: Sequence[GenerationRequest], version: int) -> list[Reused]:
        """For each prompt what to copy, of these weights; no tokens where nothing is worth it."""
        running: dict[str, list[int]] = {}
        for row in np.flatnonzero(self._rows.column("cache_version") == version).tolist():
            running.setdefault(self._rows.requests[row].prefix_key, []).append(row)
        lengths = self._rows.column("length")
        found = []
        for request in leaders:
            best, key = (-1, _FEWEST_TOKENS_WORTH_COPYING - 1, False), request.prefix_key
            if key:
                # The last prompt token is always computed: its logits are wanted.
                prompt = request.prompt_ids[:-1]
                row, shared = self._kept.longest(key, prompt)
                best = max(best, (row, shared, True), key=_num_tokens)
                is_next_turn = shared * 2 > len(prompt)  # of an ended one; no need to look further
                for row in () if is_next_turn else running.get(key, ()):
                    shared = num_shared(self._rows.tokens[row, : lengths[row] - 1], prompt)
                    best = max(best, (row, shared, False), key=_num_tokens)
            found.append(best if best[0] >= 0 else (-1, 0, False))
        return found

    def copy(self, reused: Sequence[Reused], first: int, target: KVCache) -> None:
        """Copy what was found into rows first.. of a cache, that of the running rows or another."""
        for is_kept, source in ((True, self._kept.cache), (False, self._cache)):
            chosen = [
                (row, first + i, shared)
                for i, (row, shared, kept) in enumerate(reused)
                if shared and kept is is_kept
            ]
            if chosen:
                rows, targets, lengths = zip(*chosen, strict=True)
                target.copy_rows(source, np.array(rows), np.array(targets), max(lengths))

    def keep(self, rows: Sequence[int], version: int) -> None:
        """Keep the ended sequences that have a key and were computed under one version."""
        lengths, versions = self._rows.column("length"), self._rows.column("cache_version")
        ended = []
        for row in rows:
            key = self._rows.requests[row].prefix_key
            if key and versions[row] == version:
                tokens = self._rows.tokens[row, : lengths[row] - 1].copy()
                ended.append(Ended(key, tokens, int(row)))
        if ended:
            self._kept.keep(ended, self._cache)

    def clear(self) -> None:
        """Forget what was kept."""
        self._kept.clear()

    def free(self) -> None:
        """Forget what was kept and give its memory back."""
        self._kept.free()


def _num_tokens(found: Reused) -> int:
    return found[1]
