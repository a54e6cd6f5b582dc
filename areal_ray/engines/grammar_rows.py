"""Turns that are held to a grammar, in the embedded engine: no step waits for a grammar's sake.

Grammars are compiled on one thread of their own, and their turns wait for that alone. What may
follow a sampled token is found on another thread, beside the next forward pass; only what is not
ready by its end is waited for.

`GrammarRows` waits for: its own thread, at the end of a step; unblocked by it within llguidance's
bounds on the work of one token.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.core.grammars import Grammars, Matcher
from areal_ray.engines.protocols import GenerationRequest, GenerationResult
from areal_ray.engines.row_table import RowTable, failed_result

_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class HeldRequest(GenerationRequest):
    """A request whose grammar is compiled."""

    matcher: Matcher | None = None
    """Where its turn is in the grammar; changes as the turn goes on."""


OnCompiled = Callable[[list[GenerationRequest], list[GenerationResult]], None]


class GrammarDesk:
    """Requests with grammars, from their coming until they may enter.

    Args:
        grammars: Compiles.
        changed: The engine's lock, under which all but `prepare` is called.
    """

    def __init__(self, grammars: Grammars, changed: threading.Condition) -> None:
        self._grammars = grammars
        self._changed = changed
        self._waiting: dict[int, GenerationRequest] = {}
        self._thread: ThreadPoolExecutor | None = None

    @property
    def ids(self) -> list[str]:
        """Of requests whose grammars are being compiled."""
        return [request.request_id for request in self._waiting.values()]

    def prepare(
        self, requests: Sequence[GenerationRequest], on_compiled: OnCompiled
    ) -> list[GenerationRequest]:
        """Requests that may enter now; `on_compiled` gets the others, or why they cannot be served.

        Args:
            requests: Those without a grammar come back as they are.
            on_compiled: Called on the compiling thread, under the engine's lock.
        """
        ready: list[GenerationRequest] = []
        for request in requests:
            found = self._grammars.begin(request.grammar) if request.grammar else None
            if not request.grammar:
                ready.append(request)
            elif isinstance(found, Matcher):
                ready.append(_held(request, found))
            else:
                self._compile(request, on_compiled)
        return ready

    def take(self, wanted: Collection[str]) -> list[str]:
        """Give up requests that are being compiled; their ids."""
        gone = {key: r for key, r in self._waiting.items() if r.request_id in wanted}
        for key in gone:
            del self._waiting[key]
        return [request.request_id for request in gone.values()]

    def close(self) -> list[str]:
        """Compile no more; ids of the requests that are given up."""
        ids = self.ids
        self._waiting.clear()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        return ids

    def _compile(self, request: GenerationRequest, on_compiled: OnCompiled) -> None:
        def work() -> None:
            made = self._grammars.compile(request.grammar)
            with self._changed:
                if self._waiting.pop(id(request), None) is None:
                    return  # given up
                if isinstance(made, Matcher):
                    on_compiled([_held(request, made)], [])
                else:
                    why = f"its grammar: {made}"
                    on_compiled([], [failed_result(request.request_id, why, is_refused=True)])

        with self._changed:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
            self._waiting[id(request)] = request
        self._thread.submit(work)


def _held(request: GenerationRequest, matcher: Matcher) -> HeldRequest:
    plain = {field.name: getattr(request, field.name) for field in fields(GenerationRequest)}
    return HeldRequest(**plain, matcher=matcher)


class GrammarRows:
    """Follows the grammars of the running rows. For the engine's loop thread."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._thread: ThreadPoolExecutor | None = None
        self._step: Future[None] | None = None

    def settle(self) -> None:
        """Return once the masks of all rows are those of their next token."""
        step, self._step = self._step, None
        if step is not None:
            step.result()

    def lost(self, first: int) -> dict[int, str]:
        """Rows first.. whose grammars cannot follow them any more, and why. After `settle`."""
        held = self._held(first)
        return {row: matcher.problem for row, matcher in held.items() if matcher.problem}

    def follow(self, first: int, tokens: NDArray[np.int64], leaving: Collection[int]) -> None:
        """Go on by the tokens that rows first.. sampled; those that leave are done."""
        work = [
            (matcher, int(tokens[row - first]))
            for row, matcher in self._held(first).items()
            if row not in leaving
        ]
        if work:
            self.settle()
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="grammar-rows")
            self._step = self._thread.submit(_take_all, work)

    def _held(self, first: int) -> dict[int, Matcher]:
        requests = self._rows.requests
        return {
            row: request.matcher
            for row in range(first, self._rows.num_rows)
            if isinstance(request := requests[row], HeldRequest) and request.matcher is not None
        }


def _take_all(work: Sequence[tuple[Matcher, int]]) -> None:
    for matcher, token in work:
        matcher.take(token)


def mask_logits(logits: torch.Tensor, requests: Sequence[GenerationRequest]) -> None:
    """Leave each row's logits [a, vocabulary], in place, to the tokens its grammar allows."""
    held = {
        row: request.matcher.mask
        for row, request in enumerate(requests)
        if isinstance(request, HeldRequest) and request.matcher is not None
    }
    if not held:
        return
    words = torch.from_numpy(np.stack(list(held.values()))).to(logits.device)
    bits = torch.arange(_WORD_BITS, dtype=torch.int32, device=logits.device)
    forbidden = ((words[:, :, None] >> bits) & 1 == 0).flatten(1)[:, : logits.shape[1]]
    which = torch.tensor(list(held), device=logits.device)
    logits[which] = logits[which].masked_fill(forbidden, float("-inf"))
