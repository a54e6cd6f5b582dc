"""Turns at an SGLang server: sent, cut off before an update, sent again with what they have.

Owned by the adapter; lives on its event loop. A turn is served in pieces: one /generate request
each, over its prompt and all tokens sampled so far. Before weights change the server aborts every
request, which comes back with its tokens; so each piece was sampled by one version, the server says
by which, and a piece that says another one than expected is thrown away and sampled again.

Keys and values: every piece names the version that its turn began under as its cache's namespace
(`extra_key`). So a turn that goes on after an update may find its own again, and one that begins
after it never finds older ones.

A turn waits for: a place among those in flight, the gates below, its piece; unblocked by `abort`
and `close` at any time.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from uuid import uuid4

import numpy as np

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import TopTokens, joined_tops
from areal_ray.engines.protocols import (
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    OnChunks,
    OnResults,
)
from areal_ray.engines.row_table import failed_result
from areal_ray.engines.sglang_api import Sampled, SglangApi
from areal_ray.engines.sglang_model import SglangModel
from areal_ray.errors import EngineError

_log = logging.getLogger(__name__)
_LINGER_S = 0.002
"""What ends or streams in one engine step arrives over many connections; it leaves together."""
_ABORT_AGAIN_S = 0.25
"""An abort that overtook its request finds nothing at the server."""
_WASTED_S = 0.05
_MOST_WASTED = 5
"""Pieces in a row that may bring nothing before the turn fails."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request and what is sampled of it."""

    request: GenerationRequest
    max_tokens: int
    stop_ids: frozenset[int]
    namespace: int = -1
    """Version that it began under; -1 before its first piece."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    tops: list[TopTokens | None] = field(default_factory=list)
    """One for each token, where the request asks for them."""
    rid: str = ""
    """Of the piece at the server; empty while there is none."""
    num_told: int = 0
    """Tokens given out in chunks."""
    is_aborted: bool = False
    num_wasted: int = 0
    reason: StopReason = StopReason.ABORT
    task: "asyncio.Task[None] | None" = None

    def body(self, rid: str) -> dict[str, object]:
        """The request for its next piece."""
        sampling, num_told = self.request.sampling, self.request.top_logprobs
        told = {"top_logprobs_num": num_told} if num_told else {}
        return {
            **told,
            "rid": rid,
            "input_ids": [*self.request.prompt_ids.tolist(), *self.token_ids],
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "max_new_tokens": self.max_tokens - len(self.token_ids),
                "stop_token_ids": sorted(self.stop_ids),
                "sampling_seed": self.request.seed & (2**63 - 1),
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": self.is_read_along,
            "extra_key": f"version-{self.namespace}",
        }

    @property
    def is_read_along(self) -> bool:
        """Whether its tokens are wanted as they come: streamed, or read for a stop string."""
        return self.request.is_streamed or bool(self.request.sampling.stop)

    def chunk(self) -> GenerationChunk:
        """What is new since the last one."""
        new, self.num_told = slice(self.num_told, None), len(self.token_ids)
        return GenerationChunk(
            request_id=self.request.request_id,
            token_ids=np.array(self.token_ids[new], np.int32),
            logprobs=np.array(self.logprobs[new], np.float32),
            versions=np.array(self.versions[new], np.int32),
            top=joined_tops(self.tops[new]),
        )

    def result(self) -> GenerationResult:
        """The turn as far as it came."""
        return GenerationResult(
            request_id=self.request.request_id,
            token_ids=np.array(self.token_ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            stop_reason=self.reason,
            top=joined_tops(self.tops),
        )


class TurnDesk:
    """Takes turns, serves those that may run, and reports."""

    def __init__(self, api: SglangApi, model: SglangModel, max_in_flight: int) -> None:
        self._api = api
        self._model = model
        self._turns: dict[str, Turn] = {}
        self._slots = asyncio.Semaphore(max_in_flight)
        self._pieces: dict[str, asyncio.Task[str]] = {}
        self._may_begin, self._may_go_on = asyncio.Event(), asyncio.Event()
        self._is_idle, self._none_begun = asyncio.Event(), asyncio.Event()
        self._report_due: asyncio.TimerHandle | None = None
        self._results: list[GenerationResult] = []
        self._streaming: dict[str, Turn] = {}
        self._on_results: OnResults = _ignore
        self._on_chunks: OnChunks | None = None
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self.version = 0
        self.sampled_tokens = 0
        self.is_closed = False
        self._is_idle.set()
        self._none_begun.set()
        self.set_gates(begin=True, go_on=True)

    def call(self, on_results: OnResults, on_chunks: OnChunks | None) -> None:
        """Whom to report to."""
        self._on_results, self._on_chunks = on_results, on_chunks

    def set_gates(self, *, begin: bool, go_on: bool) -> None:
        """Whether new turns may begin, and begun ones be sent again."""
        for gate, is_open in ((self._may_begin, begin), (self._may_go_on, go_on)):
            gate.set() if is_open else gate.clear()

    @property
    def num_begun(self) -> int:
        """Turns that have sampled, or may have."""
        return sum(turn.namespace >= 0 for turn in self._turns.values())

    @property
    def num_waiting(self) -> int:
        """Turns that have not begun."""
        return len(self._turns) - self.num_begun

    @property
    def busy_s(self) -> float:
        """Seconds with a piece at the server."""
        running = 0.0 if self._is_idle.is_set() else time.perf_counter() - self._busy_since_s
        return self._busy_s + running

    # -- turns come and go ----------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns."""
        for request in requests:
            room = self._model.window_tokens - len(request.prompt_ids)
            stops = {*self._model.stop_ids, *request.sampling.stop_token_ids}
            turn = Turn(request, min(request.sampling.max_new_tokens, room), frozenset(stops))
            self._turns[request.request_id] = turn
            turn.task = asyncio.ensure_future(self._serve(turn))
            turn.task.add_done_callback(self._closing(turn))

    def refuse(self, refused: Sequence[GenerationResult]) -> None:
        """Report requests that nobody serves."""
        if refused:
            self._results += refused
            self._report_soon()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End turns: at once those that wait, after their current token those at the server."""
        for request_id in request_ids:
            turn = self._turns.get(request_id)
            if turn is None or turn.is_aborted:
                continue
            turn.is_aborted = True
            assert turn.task is not None
            if turn.rid:
                asyncio.ensure_future(self._abort_piece(turn.rid))  # noqa: RUF006 (ends by itself)
            else:
                turn.task.cancel()

    async def idle(self, limit_s: float) -> bool:
        """Wait so long until no piece is at the server; whether that came."""
        try:
            async with asyncio.timeout(limit_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    async def cut_off(self) -> None:
        """Close the connections of all pieces; what they would have brought is sampled again."""
        for piece in self._pieces.values():
            piece.cancel()
        await self._is_idle.wait()

    async def drained(self) -> None:
        """Wait until every turn that has begun has ended."""
        await self._none_begun.wait()

    async def close(self, why: str = "") -> None:
        """End all turns: as aborted, or with the cause."""
        self.is_closed = True
        turns = list(self._turns.values())
        for turn in turns:
            assert turn.task is not None
            if why:
                self._turns.pop(turn.request.request_id)
                self._results.append(failed_result(turn.request.request_id, why))
            turn.task.cancel()
        await asyncio.gather(*(turn.task for turn in turns if turn.task), return_exceptions=True)
        await asyncio.sleep(0)  # lets the turns' closing callbacks run
        self._report()

    def _closing(self, turn: Turn) -> Callable[["asyncio.Task[None]"], None]:
        def closed(task: "asyncio.Task[None]") -> None:
            if self._turns.pop(turn.request.request_id, None) is None:
                return  # reported before
            failure = None if task.cancelled() else task.exception()
            if failure is None:
                self._results.append(turn.result())
            else:
                if not isinstance(failure, EngineError):
                    _log.error("sglang generation engine: a turn failed", exc_info=failure)
                told = str(failure) if isinstance(failure, EngineError) else repr(failure)
                self._results.append(failed_result(turn.request.request_id, told))
            self._note_begun()
            self._report_soon()

        return closed

    # -- one turn -------------------------------------------------------------------------------

    async def _serve(self, turn: Turn) -> None:
        async with self._slots:
            while True:
                await (self._may_begin if turn.namespace < 0 else self._may_go_on).wait()
                if turn.namespace < 0:
                    turn.namespace = self.version
                    self._note_begun()
                before = len(turn.token_ids)
                finish = await self._piece(turn)
                turn.reason = self._reason(turn, finish)
                if turn.reason != StopReason.ABORT or turn.is_aborted:
                    return
                turn.num_wasted = 0 if len(turn.token_ids) > before else turn.num_wasted + 1
                if turn.num_wasted > _MOST_WASTED and self._may_go_on.is_set():
                    raise EngineError(
                        f"the server gave nothing for it {turn.num_wasted} times in a row: it "
                        f"aborts the request, or stamps another version than {self.version}. "
                        "Is another client at work on the same server?"
                    )
                await asyncio.sleep(_WASTED_S * turn.num_wasted)

    def _reason(self, turn: Turn, finish: str) -> StopReason:
        """Why the turn is over; ABORT where it is not, or was aborted.

        A request that is aborted in the very step that samples its last token says abort.
        """
        last = turn.token_ids[-1] if turn.token_ids else -1
        if finish == "stop" or (last in turn.stop_ids and finish):
            return StopReason.STOP
        if finish == "length" or len(turn.token_ids) >= turn.max_tokens:
            return StopReason.LENGTH
        return StopReason.ABORT

    async def _piece(self, turn: Turn) -> str:
        """Have the server sample on; how the piece ended."""
        # Of fixed length, since SGLang aborts every request whose id begins with the given one.
        rid = turn.rid = uuid4().hex
        if self._is_idle.is_set():
            self._busy_since_s = time.perf_counter()
            self._is_idle.clear()
        piece = self._pieces[rid] = asyncio.ensure_future(self._sampled(turn, rid, self.version))
        try:
            await asyncio.wait((piece,))
            return "" if piece.cancelled() else piece.result()
        finally:
            piece.cancel()
            turn.rid = ""
            del self._pieces[rid]
            if not self._pieces:
                self._busy_s += time.perf_counter() - self._busy_since_s
                self._is_idle.set()

    async def _sampled(self, turn: Turn, rid: str, version: int) -> str:
        body = turn.body(rid)
        if not turn.is_read_along:
            return self._take(turn, await self._api.generate(body), version)
        # Left before its end, as for a stop string, the stream is closed and the server aborts.
        async with aclosing(self._api.stream(body)) as stream:
            async for sampled in stream:
                finish = self._take(turn, sampled, version)
                if finish:
                    return finish
        return ""

    def _take(self, turn: Turn, sampled: Sampled, version: int) -> str:
        """Add tokens to a turn; why the piece is over, empty while it goes on."""
        if sampled.token_ids and sampled.version != str(version):
            return "abort"  # not of the weights in force: thrown away
        new = len(sampled.token_ids)
        if len(turn.token_ids) + new > turn.max_tokens:
            raise EngineError(
                f"the server sampled {len(turn.token_ids) + new} tokens, must be at most "
                f"{turn.max_tokens}"
            )
        finish = sampled.finish
        stop = turn.request.sampling.stop
        for place, token in enumerate(sampled.token_ids):
            turn.token_ids.append(token)
            if stop and self._model.stop_strings.is_reached(np.array(turn.token_ids), stop):
                new, finish = place + 1, "stop"
                break
        turn.logprobs += sampled.logprobs[:new]
        turn.versions += [version] * new
        if turn.request.top_logprobs:
            turn.tops += sampled.tops[:new]
        self.sampled_tokens += new
        if new and turn.request.is_streamed and self._on_chunks is not None:
            self._streaming[turn.request.request_id] = turn
            self._report_soon()
        return finish

    async def _abort_piece(self, rid: str) -> None:
        while rid in self._pieces:
            await self._api.post("/abort_request", {"rid": rid})
            await asyncio.sleep(_ABORT_AGAIN_S)

    # -- reporting ------------------------------------------------------------------------------

    def _note_begun(self) -> None:
        self._none_begun.clear() if self.num_begun else self._none_begun.set()

    def _report_soon(self) -> None:
        if self._report_due is None:
            loop = asyncio.get_running_loop()
            self._report_due = loop.call_later(_LINGER_S, self._report)

    def _report(self) -> None:
        if self._report_due is not None:
            self._report_due.cancel()
        self._report_due = None
        chunks = [turn.chunk() for turn in self._streaming.values()]
        self._streaming.clear()
        results, self._results = self._results, []
        if chunks and self._on_chunks is not None:
            self._on_chunks(chunks)
        if results:
            self._on_results(results)


def _ignore(results: list[GenerationResult]) -> None:
    del results
