"""What is known of each running sequence, as numpy arrays with one row a sequence.

Rows 0..num_rows-1 are in use, in the same order as the rows of the KV cache; when one leaves, the
last ones move into the gaps.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import TopTokens, joined_tops
from areal_ray.engines.protocols import GenerationChunk, GenerationRequest, GenerationResult
from areal_ray.engines.sampling import SamplingRows, stream
from areal_ray.engines.seen_tokens import SeenTokens
from areal_ray.engines.stop_strings import StopStrings

_SCALARS = np.dtype(
    [
        ("length", "i8"),  # tokens known; the cache holds one less
        ("prompt", "i8"),
        ("end", "i8"),  # length at which the turn is cut
        ("stream", "u8"),
        ("temperature", "f4"),
        ("top_p", "f4"),
        ("top_k", "i8"),
        ("min_p", "f4"),
        ("is_adjusted", "?"),  # has penalties, biases or a grammar
        ("repetition", "f4"),
        ("presence", "f4"),
        ("frequency", "f4"),
        ("cache_version", "i8"),  # weights that computed its keys and values
        ("has_stop_strings", "?"),
        ("num_told", "i8"),  # likeliest tokens told at each place
        ("unsent", "i8"),  # first token that no chunk holds yet; _NEVER_SENT where not streamed
    ]
)
_NEVER_SENT = 2**62


class RowTable:
    """Tokens, log-probs, versions, limits and sampling settings of running sequences."""

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        stop_ids: Sequence[int],
        stop_strings: StopStrings,
    ) -> None:
        self.num_rows = 0
        self.requests: list[GenerationRequest] = []
        self._tops: list[list[TopTokens]] = []
        """Of each row, one for each token sampled; empty where it asks for none."""
        self.tokens = np.empty((max_rows, max_tokens), dtype=np.int32)
        self._logprobs = np.empty((max_rows, max_tokens), dtype=np.float32)
        self._versions = np.empty((max_rows, max_tokens), dtype=np.int32)
        self._scalars = np.zeros(max_rows, dtype=_SCALARS)
        self._stop_ids = tuple(stop_ids)
        self._stop_strings = stop_strings
        self._stops = np.full((max_rows, max(1, len(stop_ids))), -1, dtype=np.int32)
        self._last_chunks: list[GenerationChunk] = []
        self._seen: SeenTokens | None = None

    def column(self, name: str, first: int = 0) -> NDArray[Any]:
        """[num_rows - first] one scalar of rows first.. in use, a view."""
        return self._scalars[name][first : self.num_rows]

    def sampling_rows(self, first: int, device: torch.device) -> SamplingRows:
        """How rows first.. are sampled."""
        return SamplingRows.of(
            self.column("temperature", first),
            self.column("top_p", first),
            self.column("top_k", first),
            self.column("min_p", first),
            self.column("is_adjusted", first),
            self.column("num_told", first),
            device,
        )

    def append(self, request: GenerationRequest, end: int, version: int) -> None:
        """Add a row that knows its prompt and is cut when it knows `end` tokens."""
        row, sampling = self.num_rows, request.sampling
        length = len(request.prompt_ids)
        self.tokens[row, :length] = request.prompt_ids
        self._scalars[row] = (
            length,
            length,
            end,
            stream(request.seed),
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            bool(sampling.adjustments or request.grammar),
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            version,
            bool(sampling.stop),
            request.top_logprobs,
            length if request.is_streamed else _NEVER_SENT,
        )
        if self._seen is not None:
            self._seen.forget(row)
        stops = {*self._stop_ids, *sampling.stop_token_ids}
        if len(stops) > self._stops.shape[1]:
            wider = np.full((len(self._stops), len(stops)), -1, dtype=np.int32)
            wider[:, : self._stops.shape[1]] = self._stops
            self._stops = wider
        self._stops[row] = -1
        self._stops[row, : len(stops)] = list(stops)
        self.requests.append(request)
        self._tops.append([])
        self.num_rows += 1

    def record(
        self,
        first: int,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        version: int,
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Add a sampled token to each of rows first..; whether each stopped, and was cut."""
        length = self.column("length", first)
        rows = np.arange(first, self.num_rows)
        self.tokens[rows, length] = tokens
        self._logprobs[rows, length] = logprobs
        self._versions[rows, length] = version
        length += 1
        is_stopped = (self._stops[first : self.num_rows] == tokens[:, None]).any(1)
        for i in np.flatnonzero(self.column("has_stop_strings", first)).tolist():
            stop = self.requests[first + i].sampling.stop
            is_stopped[i] |= self._stop_strings.is_reached(self.sampled(first + i), stop)
        return is_stopped, length >= self.column("end", first)

    def record_tops(
        self, rows: NDArray[np.int64], token_ids: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> None:
        """Add what was likeliest [t, k] where rows [t] sampled last; each keeps what it wants."""
        for row, ids, found in zip(
            rows.tolist(), token_ids.astype(np.int32), logprobs, strict=True
        ):
            count = self.requests[row].top_logprobs
            self._tops[row].append(TopTokens(ids[None, :count], found[None, :count]))

    def _top(self, row: int, start: int, end: int) -> TopTokens | None:
        """Of the tokens known from `start` to `end`."""
        prompt = int(self._scalars["prompt"][row])
        return joined_tops(self._tops[row][start - prompt : end - prompt])

    def sampled(self, row: int) -> NDArray[np.int32]:
        """[N] the tokens sampled in a row so far, a view."""
        return self.tokens[row, self._scalars["prompt"][row] : self._scalars["length"][row]]

    def seen_tokens(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """[a, k] distinct tokens of rows [a], and how often each is in the turn; see SeenTokens."""
        if self._seen is None:
            self._seen = SeenTokens(len(self.tokens))
        return self._seen.update(
            rows, self.tokens, self._scalars["prompt"][rows], self._scalars["length"][rows]
        )

    def result(self, row: int, reason: StopReason) -> GenerationResult:
        """The turn sampled in a row so far."""
        sampled = slice(int(self._scalars["prompt"][row]), int(self._scalars["length"][row]))
        return GenerationResult(
            request_id=self.requests[row].request_id,
            token_ids=self.sampled(row).copy(),
            logprobs=self._logprobs[row, sampled].copy(),
            versions=self._versions[row, sampled].copy(),
            stop_reason=reason,
            top=self._top(row, sampled.start, sampled.stop),
        )

    def fail(self, row: int, why: str, *, is_refused: bool = False) -> GenerationResult:
        """What comes back for a row that sampled what nobody should get."""
        self._scalars["unsent"][row] = _NEVER_SENT
        return failed_result(self.requests[row].request_id, why, is_refused=is_refused)

    def take_chunks(self) -> list[GenerationChunk]:
        """What streamed rows, those that left included, sampled since the last call."""
        chunks, self._last_chunks = self._last_chunks, []
        unsent = self.column("unsent")
        rows = np.flatnonzero(unsent < self.column("length"))
        chunks += [self._chunk(row) for row in rows.tolist()]
        unsent[rows] = self.column("length")[rows]
        return chunks

    def _chunk(self, row: int) -> GenerationChunk:
        new = slice(int(self._scalars["unsent"][row]), int(self._scalars["length"][row]))
        return GenerationChunk(
            self.requests[row].request_id,
            self.tokens[row, new].copy(),
            self._logprobs[row, new].copy(),
            self._versions[row, new].copy(),
            self._top(row, new.start, new.stop),
        )

    def remove(self, leaving: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Drop rows; returns [k] the rows that moved from the end and [k] the gaps they filled."""
        is_unsent = self.column("unsent")[leaving] < self.column("length")[leaving]
        self._last_chunks += [self._chunk(row) for row in leaving[is_unsent].tolist()]
        remaining = self.num_rows - len(leaving)
        stays = np.ones(self.num_rows, dtype=bool)
        stays[leaving] = False
        movers = remaining + np.flatnonzero(stays[remaining:])
        gaps = leaving[leaving < remaining]
        if len(gaps):
            longest = int(self._scalars["length"][movers].max())
            for table in (self.tokens, self._logprobs, self._versions):
                table[gaps, :longest] = table[movers, :longest]
            self._scalars[gaps] = self._scalars[movers]
            self._stops[gaps] = self._stops[movers]
            if self._seen is not None:
                self._seen.move(movers, gaps)
            for gap, mover in zip(gaps, movers, strict=True):
                self.requests[gap] = self.requests[mover]
                self._tops[gap] = self._tops[mover]
        del self.requests[remaining:]
        del self._tops[remaining:]
        self.num_rows = remaining
        return movers, gaps


def failed_result(request_id: str, why: str, *, is_refused: bool = False) -> GenerationResult:
    """What comes back for a request the engine could not serve, or would not for what it asks."""
    return GenerationResult(
        request_id=request_id,
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        versions=np.empty(0, np.int32),
        stop_reason=StopReason.ABORT,
        error=f"request {request_id}: {why}",
        is_refused=is_refused,
    )


def aborted_result(request_id: str) -> GenerationResult:
    """What comes back for a request that was ended before its first token."""
    return replace(failed_result(request_id, ""), error="")
