"""The sequences a generation engine is sampling now: who enters, one step for all, who leaves.

Called by the torch generation engine's loop thread alone; knows no threads. Sequences sit in rows
0..num_rows-1 of the KV cache and of plain numpy arrays; when one leaves, the last row moves into
its place, so every tensor op reads a slice. A step costs what the longest running row costs.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.cached_model import CachedModel
from areal_ray.engines.generation_model import GenerationModel
from areal_ray.engines.kv_cache import CacheLimits, KVCache
from areal_ray.engines.logit_adjustments import adjusted_logits
from areal_ray.engines.prefix_reuse import PrefixReuse, Reused
from areal_ray.engines.protocols import GenerationRequest, GenerationResult
from areal_ray.engines.row_table import RowTable, aborted_result, failed_result
from areal_ray.engines.sampling import PLAIN_SAMPLING, SamplingRows, sample, uniforms
from areal_ray.engines.torch_generation_config import TorchGenerationConfig


@dataclass(slots=True)
class _LongPrompt:
    """A turn that waits for its prompt, computed a part a step in a row beyond the running ones."""

    request: GenerationRequest
    row: int
    """Where its keys and values are; running rows only leave meanwhile, so it stays free."""
    num_computed: int


class RunningBatch:
    """Rows of running sequences over one KV cache."""

    def __init__(self, model: GenerationModel, config: TorchGenerationConfig) -> None:
        shape = model.forward.cache_shape
        self._token_bytes = shape.token_bytes(model.dtype)
        bounds = CacheLimits(config.max_slots, model.window_tokens, config.kv_cache_bytes)
        kept_bounds = CacheLimits(
            config.kept_sequences, model.window_tokens, config.kv_cache_bytes // 4
        )
        self._cache = KVCache(shape, bounds, model.dtype, model.device)
        self._model = CachedModel(model.forward, self._cache)
        self._config = config
        self._window_tokens = model.window_tokens
        self.version = 0
        self.sampled_tokens = 0
        self.prefilled_tokens = 0
        self._rows = RowTable(
            config.max_slots, model.window_tokens, model.stop_ids, model.stop_strings
        )
        self._prefixes = PrefixReuse(self._rows, self._cache, kept_bounds)
        self._sampling: SamplingRows | None = None
        self._long: _LongPrompt | None = None

    @property
    def num_rows(self) -> int:
        """Turns being sampled."""
        return self._rows.num_rows

    @property
    def num_entering(self) -> int:
        """Turns whose prompt is computed in part."""
        return int(self._long is not None)

    # -- entering -------------------------------------------------------------------------------

    def admit(self, entering: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Start turns that `take` chose; returns those that end with their first token.

        A prompt of more than one step's prefill, which `take` gives alone, is computed a part a
        call; its turn starts when the rest fits.
        """
        if self._long is not None:
            return self._go_on(self._long)
        if not entering:
            return []
        leaders, leader_of = _distinct_prompts(entering)
        reused = self._prefixes.find(leaders, self.version)
        limit = self._config.max_prefill_tokens_per_step
        if len(entering) == 1 and len(entering[0].prompt_ids) - reused[0][1] > limit:
            self._long = self._begin_long(entering[0], reused[0])
            return self._go_on(self._long)
        return self._start(entering, leaders, leader_of, reused)

    def _start(
        self,
        entering: Sequence[GenerationRequest],
        leaders: Sequence[GenerationRequest],
        leader_of: Sequence[int],
        reused: Sequence[Reused],
    ) -> list[GenerationResult]:
        order = sorted(
            range(len(leaders)),
            key=lambda i: (reused[i][1] > 0, reused[i][1] - len(leaders[i].prompt_ids)),
        )
        place = {leader: position for position, leader in enumerate(order)}
        first = self.num_rows
        siblings = [i for i, leader in enumerate(leader_of) if entering[i] is not leaders[leader]]
        self._cache.reserve(first + len(entering), max(len(r.prompt_ids) for r in entering))
        in_row_order = [leaders[i] for i in order] + [entering[i] for i in siblings]
        for request in in_row_order:
            self._rows.append(request, self._end(request), self.version)
        self._sampling = None
        self._prefixes.copy([reused[i] for i in order], first)
        starts = np.array([reused[i][1] for i in order], dtype=np.int64)
        logits = self._prefill(first, starts, self._rows.column("length", first)[: len(starts)])
        if siblings:
            rows_of_leaders = np.array([place[leader_of[i]] for i in siblings], dtype=np.int64)
            self._cache.copy_rows(
                self._cache,
                first + rows_of_leaders,
                first + len(order) + np.arange(len(siblings)),
                max(len(entering[i].prompt_ids) for i in siblings),
            )
            everyone = np.concatenate((np.arange(len(order)), rows_of_leaders))
            logits = logits.index_select(0, torch.from_numpy(everyone).to(self._model.device))
        return self._accept(logits, first)

    def _begin_long(self, request: GenerationRequest, reused: Reused) -> _LongPrompt:
        row, prompt = self.num_rows, request.prompt_ids
        self._cache.reserve(row + 1, len(prompt))
        self._rows.tokens[row, : len(prompt)] = prompt
        self._prefixes.copy([reused], row)
        return _LongPrompt(request, row, reused[1])

    def _go_on(self, long: _LongPrompt) -> list[GenerationResult]:
        """Compute the next part of a long prompt, or start its turn over what is computed."""
        start = long.num_computed
        end = start + self._config.max_prefill_tokens_per_step
        if end < len(long.request.prompt_ids):
            self._prefill(long.row, np.array([start]), np.array([end]))
            long.num_computed = end
            return []
        first, source = self.num_rows, (long.row, start, False)
        finished = self._start([long.request], [long.request], [0], [source])
        if long.row != first:
            self._cache.clear_row(long.row)
        self._long = None
        return finished

    def take(self, waiting: deque[GenerationRequest]) -> list[GenerationRequest]:
        """Pop what fits rows, cache bytes and one step's prefill; at least one when idle.

        None while a long prompt is computed, which takes each step's prefill whole.
        """
        if self._long is not None:
            return []
        taken: list[GenerationRequest] = []
        longest = int(self._rows.column("end").max(initial=0))
        new_tokens, seen = 0, set()
        while waiting and self.num_rows + len(taken) < self._config.max_slots:
            request = waiting[0]
            prompt = len(request.prompt_ids)
            longest = max(longest, self._end(request))
            num_rows = self.num_rows + len(taken) + 1
            fits_bytes = num_rows * longest * self._token_bytes <= self._config.kv_cache_bytes
            content = request.prompt_ids.tobytes()
            cost = 0 if content in seen else prompt
            fits_step = new_tokens + cost <= self._config.max_prefill_tokens_per_step
            if num_rows > 1 and not (fits_bytes and (fits_step or not taken)):
                break
            seen.add(content)
            new_tokens += cost
            taken.append(waiting.popleft())
        return taken

    def _end(self, request: GenerationRequest) -> int:
        wanted = len(request.prompt_ids) + request.sampling.max_new_tokens
        return min(wanted, self._window_tokens)

    def _prefill(
        self, first: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> torch.Tensor:
        """[m, vocabulary] after lengths [m] tokens of rows first.., starts [m] of them cached."""
        self.prefilled_tokens += int((lengths - starts).sum())
        return self._model.prefill(
            self._rows.tokens, first, starts, lengths, self._config.max_prefill_tokens_per_step
        )

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
        adjusted = None
        if rows.adjusted is not None:
            adjusted = adjusted_logits(logits, rows.adjusted, self._rows, first)
        drawn, drawn_logprobs = sample(
            logits, rows, torch.from_numpy(uniform).to(self._model.device), adjusted
        )
        tokens, logprobs = drawn.cpu().numpy(), drawn_logprobs.cpu().numpy()
        is_stopped, is_cut = self._rows.record(first, tokens, logprobs, self.version)
        self.sampled_tokens += len(tokens)
        is_broken = ~np.isfinite(logprobs)
        leaving = first + np.flatnonzero(is_stopped | is_cut | is_broken)
        if not len(leaving):
            return []
        finished, ended = [], []
        for row in leaving.tolist():
            if is_broken[row - first]:
                request_id = self._rows.requests[row].request_id
                finished.append(failed_result(request_id, _NOT_FINITE.format(self.version)))
                self._cache.clear_row(row)
            else:
                reason = StopReason.STOP if is_stopped[row - first] else StopReason.LENGTH
                finished.append(self._rows.result(row, reason))
                ended.append(row)
        self._prefixes.keep(ended, self.version)
        self._remove(leaving)
        return finished

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
        if len(gaps):
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
        if self._long is not None and self._long.request.request_id in request_ids:
            aborted.append(aborted_result(self._long.request.request_id))
            self._cache.clear_row(self._long.row)
            self._long = None
        return aborted

    def running_ids(self) -> list[str]:
        """Ids of the turns being sampled, and of one whose prompt is computed in part."""
        ids = [request.request_id for request in self._rows.requests]
        if self._long is not None and self._long.request.request_id not in ids:
            ids.append(self._long.request.request_id)
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
        if self._long is not None:
            self._long.num_computed = 0
        if recompute and self.num_rows:
            length = self._rows.column("length")
            length -= 1  # the last token is the next step's input
            self._prefill(0, np.zeros(self.num_rows, dtype=np.int64), length)
            length += 1
            self._rows.column("cache_version")[:] = version


_NOT_FINITE = (
    "version {} of the weights gave logits that are not finite; the training step that made them "
    "diverged. Lower the learning rate or resume from an earlier checkpoint."
)


def _distinct_prompts(
    entering: Sequence[GenerationRequest],
) -> tuple[list[GenerationRequest], list[int]]:
    """The first request of each distinct prompt, and for every request the index of that first."""
    leaders: list[GenerationRequest] = []
    index: dict[bytes, int] = {}
    leader_of = []
    for request in entering:
        content = request.prompt_ids.tobytes()
        if content not in index:
            index[content] = len(leaders)
            leaders.append(request)
        leader_of.append(index[content])
    return leaders, leader_of
