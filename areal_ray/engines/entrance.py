"""How waiting turns become rows of the running batch: their prompts, computed or copied.

Called by the running batch, once a step. A prompt of more than one step's prefill is computed a
part a step, in a cache of its own, while running turns go on and others enter in between.
"""

from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.engines.cached_model import CachedModel
from areal_ray.engines.kv_cache import CacheLimits, KVCache
from areal_ray.engines.prefix_reuse import PrefixReuse, Reused
from areal_ray.engines.protocols import GenerationRequest
from areal_ray.engines.row_table import RowTable
from areal_ray.engines.torch_generation_config import TorchGenerationConfig

_LOOKED_AT = 64
"""Waiting turns looked at in a step for one that may pass a long prompt."""


class PromptInParts:
    """A turn whose prompt is computed in part."""

    def __init__(self, request: GenerationRequest, model: CachedModel) -> None:
        num_tokens = len(request.prompt_ids)
        main = model.cache
        limits = CacheLimits(1, num_tokens, 2**62)
        self.request = request
        self.num_computed = 0
        self._cache = KVCache(main.shape, limits, main.dtype, main.device)
        self._model = CachedModel(model.forward, self._cache)

    def begin(self, prefixes: PrefixReuse, reused: Reused) -> None:
        """Start over what is there already."""
        self._cache.reserve(1, len(self.request.prompt_ids))
        prefixes.copy([reused], 0, self._cache)
        self.num_computed = reused[1]

    def compute(self, num_tokens: int) -> None:
        """Compute the next tokens."""
        self._cache.reserve(1, len(self.request.prompt_ids))
        start, end = np.array([self.num_computed]), np.array([self.num_computed + num_tokens])
        self._model.prefill(self.request.prompt_ids[None], 0, start, end, num_tokens)
        self.num_computed += num_tokens

    def copy_to(self, cache: KVCache, row: int) -> None:
        """Copy what is computed into a row of the running cache."""
        if self.num_computed:
            cache.copy_rows(self._cache, np.array([0]), np.array([row]), self.num_computed)

    def forget(self) -> None:
        """Begin anew with the next part: the weights have changed, or their memory is wanted."""
        self._cache.free()
        self.num_computed = 0


class Entrance:
    """Chooses who enters, and prefills them into the rows behind the running ones."""

    def __init__(
        self,
        model: CachedModel,
        rows: RowTable,
        prefixes: PrefixReuse,
        config: TorchGenerationConfig,
        window_tokens: int,
    ) -> None:
        self._model = model
        self._cache = model.cache
        self._rows = rows
        self._prefixes = prefixes
        self._config = config
        self._window_tokens = window_tokens
        self._token_bytes = model.cache.shape.token_bytes(model.cache.dtype)
        self._others_were_last = False
        self.in_parts: PromptInParts | None = None
        self.prefilled_tokens = 0

    # -- choosing -------------------------------------------------------------------------------

    def take(self, waiting: deque[GenerationRequest], version: int) -> list[GenerationRequest]:
        """Pop what fits rows, cache bytes and one step's prefill; at least one when idle.

        While a long prompt is computed, its parts and others take turns; those that are long
        themselves wait for its end.
        """
        if self.in_parts is not None and self._others_were_last:
            return []
        passing = waiting if self.in_parts is None else self._passing(waiting, version)
        taken = self._fitting(passing)
        if self.in_parts is None:
            for _ in taken:
                waiting.popleft()
        elif taken:
            chosen = {id(request) for request in taken}
            kept = [request for request in waiting if id(request) not in chosen]
            waiting.clear()
            waiting.extend(kept)
        return taken

    def _passing(
        self, waiting: deque[GenerationRequest], version: int
    ) -> Sequence[GenerationRequest]:
        """The first waiting turns that need no more than one step's prefill."""
        limit, passing = self._config.max_prefill_tokens_per_step, []
        for request in islice(waiting, _LOOKED_AT):
            num_new = len(request.prompt_ids)
            if num_new > limit:
                num_new -= self._prefixes.find([request], version)[0][1]
            if num_new <= limit:
                passing.append(request)
        return passing

    def _fitting(self, waiting: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        taken: list[GenerationRequest] = []
        longest = int(self._rows.column("end").max(initial=0))
        occupied = self._rows.num_rows
        if self.in_parts is not None:
            longest, occupied = max(longest, self._end(self.in_parts.request)), occupied + 1
        new_tokens, seen = 0, set()
        for request in waiting:
            num_rows = occupied + len(taken) + 1
            if num_rows > self._config.max_slots:
                break
            longest = max(longest, self._end(request))
            fits_bytes = num_rows * longest * self._token_bytes <= self._config.kv_cache_bytes
            content = request.prompt_ids.tobytes()
            cost = 0 if content in seen else len(request.prompt_ids)
            fits_step = new_tokens + cost <= self._config.max_prefill_tokens_per_step
            if num_rows > 1 and not (fits_bytes and (fits_step or not taken)):
                break
            seen.add(content)
            new_tokens += cost
            taken.append(request)
        return taken

    def _end(self, request: GenerationRequest) -> int:
        wanted = len(request.prompt_ids) + request.sampling.max_new_tokens
        return min(wanted, self._window_tokens)

    # -- entering -------------------------------------------------------------------------------

    def admit(self, entering: Sequence[GenerationRequest], version: int) -> torch.Tensor | None:
        """[m, vocabulary] after the prompts of the m rows that were added; None where none was.

        A prompt of more than one step's prefill, which `take` gives alone, is computed a part a
        call; its turn starts when the rest fits.
        """
        if not entering:
            return None if self.in_parts is None else self._go_on(self.in_parts, version)
        self._others_were_last = True
        leaders, leader_of = _distinct_prompts(entering)
        reused = self._prefixes.find(leaders, version)
        limit = self._config.max_prefill_tokens_per_step
        num_new = len(entering[0].prompt_ids) - reused[0][1]
        if self.in_parts is None and len(entering) == 1 and num_new > limit:
            self.in_parts = PromptInParts(entering[0], self._model)
            self.in_parts.begin(self._prefixes, reused[0])
            return self._go_on(self.in_parts, version)
        return self._start(entering, leaders, leader_of, reused, version)

    def _start(
        self,
        entering: Sequence[GenerationRequest],
        leaders: Sequence[GenerationRequest],
        leader_of: Sequence[int],
        reused: Sequence[Reused],
        version: int,
    ) -> torch.Tensor:
        order = sorted(
            range(len(leaders)),
            key=lambda i: (reused[i][1] > 0, reused[i][1] - len(leaders[i].prompt_ids)),
        )
        place = {leader: position for position, leader in enumerate(order)}
        first = self._rows.num_rows
        siblings = [i for i, leader in enumerate(leader_of) if entering[i] is not leaders[leader]]
        self._append([leaders[i] for i in order] + [entering[i] for i in siblings], version)
        self._prefixes.copy([reused[i] for i in order], first, self._cache)
        starts = np.array([reused[i][1] for i in order], dtype=np.int64)
        logits = self.prefill(first, starts, self._rows.column("length", first)[: len(starts)])
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
        return logits

    def _append(self, requests: Sequence[GenerationRequest], version: int) -> None:
        num_rows = self._rows.num_rows + len(requests)
        self._cache.reserve(num_rows, max(len(r.prompt_ids) for r in requests))
        for request in requests:
            self._rows.append(request, self._end(request), version)

    def _go_on(self, long: PromptInParts, version: int) -> torch.Tensor | None:
        """Compute the next part of a long prompt, or start its turn over what is computed."""
        self._others_were_last = False
        limit = self._config.max_prefill_tokens_per_step
        if long.num_computed + limit < len(long.request.prompt_ids):
            long.compute(limit)
            self.prefilled_tokens += limit
            return None
        first = self._rows.num_rows
        self._append([long.request], version)
        long.copy_to(self._cache, first)
        self.in_parts = None
        return self.prefill(
            first, np.array([long.num_computed]), self._rows.column("length", first)
        )

    def prefill(
        self, first: int, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> torch.Tensor:
        """[m, vocabulary] after lengths [m] tokens of rows first.., starts [m] of them cached."""
        self.prefilled_tokens += int((lengths - starts).sum())
        return self._model.prefill(
            self._rows.tokens, first, starts, lengths, self._config.max_prefill_tokens_per_step
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
