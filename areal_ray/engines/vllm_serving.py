"""Turns on vLLM's event loop: handed over, awaited, and reported one call for each of its steps."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input

from areal_ray.engines.protocols import (
    GenerationChunk,
    GenerationRequest,
    GenerationResult,
    OnChunks,
    OnResults,
)
from areal_ray.engines.row_table import aborted_result, failed_result
from areal_ray.engines.vllm_lora import VllmAdapters
from areal_ray.engines.vllm_model import ServedModel
from areal_ray.engines.vllm_turns import (
    Turn,
    sampling_params,
    scored_logprobs,
    scoring_params,
)


class TurnService:
    """Serves turns; every method but `counts` and `busy_s` is called on the event loop."""

    def __init__(
        self, llm: Any, model: ServedModel, version: int, adapters: VllmAdapters | None = None
    ) -> None:
        self.cache_version = version
        """Of the weights whose keys and values turns that begin now may share."""
        self._adapters = adapters
        self._llm = llm
        self._model = model
        self._turns: dict[str, Turn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_results: OnResults | None = None
        self._on_chunks: OnChunks | None = None
        self._finished: list[GenerationResult] = []
        self._chunks: list[GenerationChunk] = []
        self._is_flush_due = False
        self._ended_tokens = 0
        self._clock = _BusyClock()

    def start(self, on_results: OnResults, on_chunks: OnChunks | None) -> None:
        """Report to these from now on."""
        self._on_results, self._on_chunks = on_results, on_chunks

    def enter(
        self, requests: Iterable[GenerationRequest], refused: Iterable[GenerationResult]
    ) -> None:
        """Take turns in; those that are refused are reported with their reason."""
        for request in requests:
            if request.request_id in self._turns:
                self._report(failed_result(request.request_id, "a turn of this id is running."))
                continue
            turn = Turn(request, request.is_streamed and self._on_chunks is not None)
            self._turns[request.request_id] = turn
            task = asyncio.get_running_loop().create_task(self._serve(turn))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for result in refused:
            self._report(result)
        self._clock.set(has_work=bool(self._turns))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End turns now, all of them where none are named; unknown ids are ignored."""
        wanted = list(self._turns) if request_ids is None else request_ids
        turns = [self._turns[name] for name in wanted if name in self._turns]
        for turn in turns:
            turn.is_aborted = True
        handed = [turn.internal_id for turn in turns if turn.internal_id]
        if handed:
            await self._llm.abort(handed, internal=True)

    async def begin_unstarted_anew(self) -> None:
        """Hand turns without a token over again, under `cache_version`. Only while paused."""
        turns = [t for t in self._turns.values() if t.internal_id and t.num_sampled == 0]
        for turn in turns:
            turn.begins_anew = True
        if turns:
            await self._llm.abort([turn.internal_id for turn in turns], internal=True)

    async def end(self, deadline_s: float) -> None:
        """Abort every turn, and report those that vLLM does not end in time as aborted too."""
        await self.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
        for task in self._tasks:
            task.cancel()
        for name in list(self._turns):
            self._report(aborted_result(name))
        self._turns = {}
        self._flush()

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T-1] log-probs at temperature 1 of all tokens [T] but the first."""
        if len(token_ids) == 1:
            return np.empty(0, np.float32)
        # The last one is forced, so that a prompt may fill the window.
        prompt, last = tokens_input(token_ids[:-1].tolist()), int(token_ids[-1])
        name = f"score-{uuid4().hex}"
        outputs = await self._handed(name, prompt, scoring_params(last))
        return scored_logprobs(await outputs.get(), token_ids)

    def release(self) -> None:
        """Let go of vLLM, after `end`."""
        self._llm = None

    def set_paused(self, is_paused: bool) -> None:
        """Whether vLLM stands still: that is no busy time."""
        self._clock.set(is_paused=is_paused)

    def counts(self) -> tuple[int, int, int]:
        """Turns that have begun, that wait, and tokens sampled since start. Any thread."""
        sampled = [turn.num_sampled for turn in list(self._turns.values())]
        begun = sum(count > 0 for count in sampled)
        return begun, len(sampled) - begun, self._ended_tokens + sum(sampled)

    @property
    def busy_s(self) -> float:
        """Seconds with turns to serve and not paused. Any thread."""
        return self._clock.seconds

    async def _serve(self, turn: Turn) -> None:
        name = turn.request.request_id
        try:
            result = await self._sample(turn)
            while result is None:
                result = await self._sample(turn)
        except Exception as error:
            told = str(error).strip().splitlines() or [type(error).__name__]
            is_refused = isinstance(error, VLLMValidationError)
            why = f"vLLM could not serve it: {told[0]}"
            result = failed_result(name, why, is_refused=is_refused)
        del self._turns[name]
        self._ended_tokens += len(result.token_ids)
        self._report(result)
        self._clock.set(has_work=bool(self._turns))

    async def _sample(self, turn: Turn) -> GenerationResult | None:
        """Hand a turn over and follow it to its end; None where it has to begin anew."""
        request = turn.request
        if turn.is_aborted:
            return aborted_result(request.request_id)
        turn.begins_anew = False
        version = self.cache_version
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=f"v{version}")
        params = sampling_params(turn, self._model.stop_ids, self._model.window_tokens)
        outputs = await self._handed(request.request_id, prompt, params)
        turn.internal_id = outputs.request_id
        turn.state = self._llm.output_processor.request_states.get(outputs.request_id)
        if turn.is_aborted or self.cache_version != version:  # while it was handed over
            turn.begins_anew = True
            await self._llm.abort(outputs.request_id, internal=True)
        while True:
            output = outputs.get_nowait() or await outputs.get()
            completion = output.outputs[0]
            chunk = turn.take(completion)
            if turn.is_broken:
                await self._llm.abort(outputs.request_id, internal=True)
                return turn.result(completion)
            if chunk is not None and turn.is_streamed:
                self._chunks.append(chunk)
                self._flush_soon()
            if output.finished:
                is_over = turn.is_aborted or not turn.begins_anew
                turn.internal_id, turn.state = "", None
                return turn.result(completion) if is_over else None

    async def _handed(self, name: str, prompt: Any, params: Any) -> Any:
        adapter = None if self._adapters is None else self._adapters.request
        return await self._llm.add_request(name, prompt, params, lora_request=adapter)

    def _report(self, result: GenerationResult) -> None:
        self._finished.append(result)
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Report once every turn that vLLM's last step reached has been woken."""
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        chunks, self._chunks = self._chunks, []
        finished, self._finished = self._finished, []
        if chunks and self._on_chunks is not None:
            self._on_chunks(chunks)
        if finished and self._on_results is not None:
            self._on_results(finished)


class _BusyClock:
    """Seconds during which there was work and nothing held it up."""

    def __init__(self) -> None:
        self._has_work = False
        self._is_paused = False
        self._done_s = 0.0
        self._since: float | None = None

    def set(self, *, has_work: bool | None = None, is_paused: bool | None = None) -> None:
        """Note a change of one of them."""
        self._has_work = self._has_work if has_work is None else has_work
        self._is_paused = self._is_paused if is_paused is None else is_paused
        now = time.perf_counter()
        if self._since is not None:
            self._done_s += now - self._since
        self._since = now if self._has_work and not self._is_paused else None

    @property
    def seconds(self) -> float:
        """Until now."""
        since = self._since
        return self._done_s + (0.0 if since is None else time.perf_counter() - since)
