"""The sequences a generation engine is sampling now: who enters, one step for all, who leaves.

Called by the torch generation engine's loop thread alone; knows no threads. Sequences sit in rows
0..num_rows-1 of the KV cache and of plain numpy arrays; when one leaves, the last row moves into
its place, so every tensor op reads a slice. A step costs what the longest running row costs.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.cached_model import CachedModel
from areal_ray.engines.entrance import Entrance
from areal_ray.engines.generation_model import GenerationModel
from areal_ray.engines.grammar_rows import GrammarRows
from areal_ray.engines.kv_cache import CacheLimits, KVCache
from areal_ray.engines.logit_adjustments import adjusted_logits
from areal_ray.engines.prefix_reuse import PrefixReuse
from areal_ray.engines.protocols import GenerationChunk, GenerationRequest, GenerationResult
from areal_ray.engines.row_table import RowTable, aborted_result
from areal_ray.engines.sampling import (
    PLAIN_SAMPLING,
    SamplingRows,
    likeliest,
    sample,
    uniforms,
)
from areal_ray.engines.torch_generation_config import TorchGenerationConfig


class RunningBatch:
    """Rows of running sequences over one KV cache."""

    def __init__(self, model: GenerationModel, config: TorchGenerationConfig) -> None:
        shape = model.forward.cache_shape
        bounds = CacheLimits(config.max_slots, model.window_tokens, config.kv_cache_bytes)
        kept_bounds = CacheLimits(
            config.kept_sequences, model.window_tokens, config.kv_cache_bytes // 4
        )
        self._cache = KVCache(shape, bounds, model.dtype, model.device)
        self._model = CachedModel(model.forward, self._cache)
        self.version = 0
        self.is_asleep = False
        self.sampled_tokens = 0
        self._rows = RowTable(
            config.max_slots, model.window_tokens, model.stop_ids, model.stop_strings
        )
        self._grammars = GrammarRows(self._rows)
        self._prefixes = PrefixReuse(self._rows, self._cache, kept_bounds)
        self._sampling: SamplingRows | None = None
        self._entrance = Entrance(
            self._model, self._rows, self._prefixes, config, model.window_tokens
        )

    @property
    def num_rows(self) -> int:
        """Turns being sampled."""
        return self._rows.num_rows

    @property
    def num_entering(self) -> int:
        """Turns whose prompt is computed in part."""
        return int(self._entrance.in_parts is not None)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens computed before a turn's first one, since start."""
        return self._entrance.prefilled_tokens

    # -- entering -------------------------------------------------------------------------------

    def take(self, waiting: deque[GenerationRequest]) -> list[GenerationRequest]:
        """Pop the turns that enter next; see `Entrance.take`."""
        return self._entrance.take(waiting, self.version)

    def admit(self, entering: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Start turns that `take` chose; returns those that end with their first token."""
        first = self.num_rows
        logits = self._entrance.admit(entering, self.version)
        if logits is None:
            return []
        self._sampling = None
        return self._accept(logits, first)

    # -- one step -------------------------------------------------------------------------------

    def decode(self) -> list[GenerationResult]:
        """Sample one token for every running row; returns the turns that ended."""
        if self.num_rows == 0:
            return []
        n = self.num_rows
        positions = self._rows.column("length") - 1
        self._cache.reserve(n, int(positions.max()) + 1)
        tokens = self._rows.tokens[np.arange(n), positions]
        return self._accept(self._model.step(tokens, positions), 0)

    def _accept(self, logits: torch.Tensor, first: int) -> list[GenerationResult]:
        """Sample for rows first..num_rows-1, record the tokens, let finished rows leave."""
        uniform = uniforms(self._rows.column("stream", first), self._rows.column("length", first))
        rows = self._sampling_rows(first)
        adjusted, lost = None, {}
        if rows.adjusted is not None:
            self._grammars.settle()
            lost = self._grammars.lost(first)
            adjusted = adjusted_logits(logits, rows.adjusted, self._rows, first)
        drawn, drawn_logprobs = sample(
            logits, rows, torch.from_numpy(uniform).to(self._model.device), adjusted
        )
        tokens, logprobs = drawn.cpu().numpy(), drawn_logprobs.cpu().numpy()
        is_stopped, is_cut = self._rows.record(first, tokens, logprobs, self.version)
        if rows.told is not None:
            tops = likeliest(logits, rows, drawn, drawn_logprobs)
            self._rows.record_tops(*(one.cpu().numpy() for one in (first + rows.told, *tops)))
        self.sampled_tokens += len(tokens)
        failed = {row: self._rows.fail(row, why, is_refused=True) for row, why in lost.items()}
        for row in (first + np.flatnonzero(~np.isfinite(logprobs))).tolist():
            failed[row] = self._rows.fail(row, _NOT_FINITE.format(self.version))
        is_leaving = is_stopped | is_cut
        is_leaving[[row - first for row in failed]] = True
        leaving = first + np.flatnonzero(is_leaving)
        if rows.adjusted is not None:
            self._grammars.follow(first, tokens, set(leaving.tolist()))
        if not len(leaving):
            return []
        return self._leave(leaving, is_stopped[leaving - first], failed)

    def _leave(
        self,
        leaving: NDArray[np.int64],
        is_stopped: NDArray[np.bool_],
        failed: Mapping[int, GenerationResult],
    ) -> list[GenerationResult]:
        """Let rows [k] leave that have stopped [k], were cut, or failed."""
        finished, ended = [], []
        for row, has_stopped in zip(leaving.tolist(), is_stopped.tolist(), strict=True):
            if row in failed:
                finished.append(failed[row])
                self._cache.clear_row(row)
            else:
                reason = StopReason.STOP if has_stopped else StopReason.LENGTH
                finished.append(self._rows.result(row, reason))
                ended.append(row)
        self._prefixes.keep(ended, self.version)
        self._remove(leaving)
        return finished

    def take_chunks(self) -> list[GenerationChunk]:
        """What streamed turns sampled since the last call."""
        return self._rows.take_chunks()

    def _sampling_rows(self, first: int) -> SamplingRows:
        if first == 0 and self._sampling is not None:
            return self._sampling
        made = self._rows.sampling_rows(first, self._model.device)
        if first == 0:
            self._sampling = made
        return made

    # -- leaving --------------------------------------------------------------------------------

    def _remove(self, leaving: NDArray[np.int64]) -> None:
        movers, gaps = self._rows.remove(leaving)
        if len(gaps) and not self.is_asleep:
            longest = int(self._rows.column("length")[gaps].max()) - 1
            self._cache.copy_rows(self._cache, movers, gaps, longest)
        if self._sampling is not PLAIN_SAMPLING:  # which fits any rows
            self._sampling = None

    def abort(self, request_ids: Collection[str]) -> list[GenerationResult]:
        """End these turns, with what was sampled so far; unknown ids are ignored."""
        requests = self._rows.requests
        rows = [row for row in range(self.num_rows) if requests[row].request_id in request_ids]
        aborted = [self._rows.result(row, StopReason.ABORT) for row in rows]
        if rows:
            self._remove(np.array(rows, dtype=np.int64))
        long = self._entrance.in_parts
        if long is not None and long.request.request_id in request_ids:
            aborted.append(aborted_result(long.request.request_id))
            self._entrance.in_parts = None
        return aborted

    def running_ids(self) -> list[str]:
        """Ids of the turns being sampled, and of one whose prompt is computed in part."""
        ids = [request.request_id for request in self._rows.requests]
        long = self._entrance.in_parts
        if long is not None and long.request.request_id not in ids:
            ids.append(long.request.request_id)
        return ids

    # -- weights --------------------------------------------------------------------------------

    def change_weights(self, weights: Any, version: int, *, recompute: bool) -> None:
        """Sample from these weights from the next step on; kept sequences are forgotten.

        With `recompute` the keys and values of running rows are computed anew, so that the next
        token's distribution is exactly that of the new weights; else they stay as they are. A
        prompt computed in part begins anew, since its turns have no token of older weights yet.
        """
        self._model.forward.install(weights)
        self.version = version
        self._prefixes.clear()
        if self._entrance.in_parts is not None:
            self._entrance.in_parts.forget()
        if recompute and not self.is_asleep:
            self._recompute()

    def sleep(self) -> None:
        """Give the cache's memory back; turns stay, and only leave until `wake`."""
        self._prefixes.free()
        self._cache.free()
        if self._entrance.in_parts is not None:
            self._entrance.in_parts.forget()
        self.is_asleep = True

    def wake(self) -> None:
        """Take the memory anew and compute the keys and values of all turns under these weights."""
        if not self.is_asleep:
            return
        if self.num_rows:
            self._cache.reserve(self.num_rows, int(self._rows.column("length").max()))
        self._recompute()
        self.is_asleep = False

    def _recompute(self) -> None:
        """Make the keys and values of running rows those of the weights in force."""
        if self.num_rows:
            length = self._rows.column("length")
            length -= 1  # the last token is the next step's input
            self._entrance.prefill(0, np.zeros(self.num_rows, dtype=np.int64), length)
            length += 1
            self._rows.column("cache_version")[:] = self.version


_NOT_FINITE = (
    "version {} of the weights gave logits that are not finite; the training step that made them "
    "diverged. Lower the learning rate or resume from an earlier checkpoint."
)
