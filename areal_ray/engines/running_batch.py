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
from areal_ray.engines.logit_adjustments import adjust_
from areal_ray.engines.prefix_store import Ended, PrefixStore, num_shared
from areal_ray.engines.protocols import GenerationRequest, GenerationResult
from areal_ray.engines.row_table import RowTable, aborted_result, failed_result
from areal_ray.engines.sampling import PLAIN_SAMPLING, SamplingRows, sample, uniforms
from areal_ray.engines.torch_generation_config import TorchGenerationConfig

_FEWEST_TOKENS_WORTH_COPYING = 8
_Reused = tuple[int, int, bool]
"""Row to copy from, tokens to copy, whether from a kept sequence."""


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
        self._stop_strings = model.stop_strings
        self._kept = PrefixStore(
            KVCache(shape, kept_bounds, model.dtype, model.device), kept_bounds
        )
        self._config = config
        self._window_tokens = model.window_tokens
        self.version = 0
        self.sampled_tokens = 0
        self.prefilled_tokens = 0
        self._rows = RowTable(config.max_slots, model.window_tokens, model.stop_ids)
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
            assert not entering, "take gives none meanwhile"
            return self._go_on(self._long)
        if not entering:
            return []
        leaders, leader_of = _distinct_prompts(entering)
        reused = self._reuse(leaders)
        if len(entering) == 1 and self._is_too_long(entering[0], reused[0][1]):
            self._long = self._begin_long(entering[0], reused[0])
            return self._go_on(self._long)
        return self._start(entering, leaders, leader_of, reused)

    def _start(
        self,
        entering: Sequence[GenerationRequest],
        leaders: Sequence[GenerationRequest],
        leader_of: Sequence[int],
        reused: Sequence[_Reused],
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
        self._copy_reused([reused[i] for i in order], first)
        starts = np.array([reused[i][1] for i in order], dtype=np.int64)
        logits = self._prefill(first, starts)
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

    def _is_too_long(self, request: GenerationRequest, num_computed: int) -> bool:
        rest = len(request.prompt_ids) - num_computed
        return rest > self._config.max_prefill_tokens_per_step

    def _begin_long(self, request: GenerationRequest, reused: _Reused) -> _LongPrompt:
        row, prompt = self.num_rows, request.prompt_ids
        self._cache.reserve(row + 1, len(prompt))
        self._rows.tokens[row, : len(prompt)] = prompt
        self._copy_reused([reused], row)
        return _LongPrompt(request, row, reused[1])

    def _go_on(self, long: _LongPrompt) -> list[GenerationResult]:
        """Compute the next part of a long prompt, or start its turn over what is computed."""
        if self._is_too_long(long.request, long.num_computed):
            start = long.num_computed
            end = start + self._config.max_prefill_tokens_per_step
            self._prefill_rows(long.row, np.array([start]), np.array([end]))
            long.num_computed = end
            return []
        first, source = self.num_rows, (long.row, long.num_computed, False)
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

    def _reuse(self, leaders: Sequence[GenerationRequest]) -> list[_Reused]:
        """For each prompt: row to copy from, tokens to copy, whether from a kept sequence."""
        running: dict[str, list[int]] = {}
        for row in np.flatnonzero(self._rows.column("cache_version") == self.version).tolist():
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

    def _copy_reused(self, reused: Sequence[_Reused], first: int) -> None:
        for is_kept, source in ((True, self._kept.cache), (False, self._cache)):
            chosen = [
                (row, first + i, shared)
                for i, (row, shared, kept) in enumerate(reused)
                if shared and kept is is_kept and (kept or row != first + i)
            ]
            if chosen:
                rows, targets, lengths = zip(*chosen, strict=True)
                self._cache.copy_rows(source, np.array(rows), np.array(targets), max(lengths))

    def _prefill(self, first: int, starts: NDArray[np.int64]) -> torch.Tensor:
        """[m, vocabulary] after the known tokens of rows first.., `starts` [m] of them cached."""
        return self._prefill_rows(first, starts, self._rows.column("length", first)[: len(starts)])

    def _prefill_rows(
        self, first: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> torch.Tensor:
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
        adjusted = None if rows.adjusted is None else self._adjusted(logits, rows.adjusted, first)
        drawn, drawn_logprobs = sample(
            logits, rows, torch.from_numpy(uniform).to(self._model.device), adjusted
        )
        tokens, logprobs = drawn.cpu().numpy(), drawn_logprobs.cpu().numpy()
        is_stopped, is_cut = self._rows.record(first, tokens, logprobs, self.version)
        self.sampled_tokens += len(tokens)
        for row in np.flatnonzero(self._rows.column("has_stop_strings", first)).tolist():
            stop = self._rows.requests[first + row].sampling.stop
            is_stopped[row] |= self._stop_strings.is_reached(self._rows.sampled(first + row), stop)
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
        self._keep(ended)
        self._remove(leaving)
        return finished

    def _adjusted(self, logits: torch.Tensor, which: torch.Tensor, first: int) -> torch.Tensor:
        """[a, vocabulary] the logits of some of rows first.. with their penalties and biases."""
        changed = logits[which].float()
        for row_logits, i in zip(changed, which.tolist(), strict=True):
            request = self._rows.requests[first + i]
            adjust_(row_logits, request.sampling, request.prompt_ids, self._rows.sampled(first + i))
        return changed

    def _sampling_rows(self, first: int) -> SamplingRows:
        if first == 0 and self._sampling is not None:
            return self._sampling
        made = SamplingRows.of(
            self._rows.column("temperature", first),
            self._rows.column("top_p", first),
            self._rows.column("top_k", first),
            self._rows.column("min_p", first),
            self._rows.column("is_adjusted", first),
            self._model.device,
        )
        if first == 0:
            self._sampling = made
        return made

    # -- leaving --------------------------------------------------------------------------------

    def _keep(self, rows: Sequence[int]) -> None:
        """Keep the ended sequences that have a key and were computed under one version."""
        lengths, versions = self._rows.column("length"), self._rows.column("cache_version")
        ended = []
        for row in rows:
            key = self._rows.requests[row].prefix_key
            if key and versions[row] == self.version:
                tokens = self._rows.tokens[row, : lengths[row] - 1].copy()
                ended.append(Ended(key, tokens, int(row)))
        if ended:
            self._kept.keep(ended, self._cache)

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
        requests = list(self._rows.requests)
        long = self._long
        if long is not None and all(request is not long.request for request in requests):
            requests.append(long.request)
        return [request.request_id for request in requests]

    # -- weights --------------------------------------------------------------------------------

    def change_weights(self, weights: Any, version: int, *, recompute: bool) -> None:
        """Sample from these weights from the next step on; kept sequences are forgotten.

        With `recompute` the keys and values of running rows are computed anew, so that the next
        token's distribution is exactly that of the new weights; else they stay as they are. A
        prompt computed in part begins anew, since its turns have no token of older weights yet.
        """
        self._model.forward.install(weights)
        self.version = version
        self._kept.clear()
        if self._long is not None:
            self._long.num_computed = 0
        if recompute and self.num_rows:
            length = self._rows.column("length")
            length -= 1  # the last token is the next step's input
            self._prefill(0, np.zeros(self.num_rows, dtype=np.int64))
            length += 1
            self._rows.column("cache_version")[:] = version


_NOT_FINITE = (
    "version {} of the weights gave logits that are not finite; the training step that made them "
    "diverged. Lower the learning rate or resume from an earlier checkpoint."
)


def _num_tokens(found: _Reused) -> int:
    return found[1]


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
