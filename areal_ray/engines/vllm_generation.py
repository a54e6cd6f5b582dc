"""vLLM as a generation engine: one adapter for its builds for GPUs and for the CPU.

Owned by a rollout actor (or a test). vLLM's `AsyncLLM` lives on an event loop in a thread of ours;
scheduler and model are in an engine process that it starts (on several GPUs: in Ray actors of the
replica's placement group). Every public method may be called from any thread.

- Token ids in, token ids out. The log-prob of a token is log_softmax(logits / temperature) over
  the whole vocabulary, as the embedded engine tells it (`vllm_worker.PolicySampler`).
- Versions are vLLM's own per-token spans, labelled when an update is finished.
- A prompt's blocks are cached under the version that computed them (`cache_salt`), so a turn that
  samples its first token after a swap reads no keys and values of older weights; one that was
  handed over before and has no token yet is handed over again.
- Seeds: the same seed, prompt and weights give the same tokens whatever else is in the batch, as
  far as vLLM's logits do not depend on it (float32 on the CPU: seen so; bfloat16 kernels on a GPU
  may round otherwise in another batch). They are not the tokens that the embedded engine draws.

Waits: for the engine process to start (vLLM's own limit), for pause and swap (ended by the engine
process's death), for its end on close (10 s).
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.engines.event_loop import EventLoopThread
from areal_ray.engines.lora_config import LoraSetup
from areal_ray.engines.model_files import check_tensors
from areal_ray.engines.protocols import (
    EngineHealth,
    GenerationRequest,
    OnChunks,
    OnResults,
    OnWeightUpdate,
)
from areal_ray.engines.request_limits import sound_and_refused
from areal_ray.engines.vllm_generation_config import VllmGenerationConfig
from areal_ray.engines.vllm_lora import VllmAdapters
from areal_ray.engines.vllm_model import read_served_model
from areal_ray.engines.vllm_start import start_vllm
from areal_ray.engines.vllm_weights import (
    WeightNote,
    finish_update,
    open_update,
    shared_weights,
)
from areal_ray.errors import ArealRayError, EngineDied, EngineError

T = TypeVar("T")

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
_CLOSE_DEADLINE_S = 10.0
_ABORT_DEADLINE_S = 2.0
_NAME = "vllm generation engine"


class VllmGenerationEngine:
    """A `GenerationEngine` on vLLM; see `protocols.GenerationEngine` for the verbs."""

    def __init__(
        self,
        model_path: str | Path,
        config: VllmGenerationConfig,
        *,
        version: int = 0,
        lora: LoraSetup | None = None,
    ) -> None:
        """Start vLLM on a model of version `version`; with `lora`, later ones are adapters of it.

        Raises:
            DataError: The model folder cannot be used.
            EngineError: vLLM is missing or did not start.
        """
        self._model = read_served_model(model_path, config.max_context_tokens)
        self._on_one_gpu = config.tensor_parallel == 1
        self._version = version
        self._is_closed = False
        self._failure: EngineDied | None = None
        self._idle_for_swap_s = 0.0
        self._thread = EventLoopThread(_NAME)
        try:
            self._adapters = None if lora is None else VllmAdapters(self._model.layers, lora)
            starting = start_vllm(self._model, config, version, self._adapters)
            self._llm, self._processes = self._thread.ask(starting)
            self._dtype = str(self._llm.vllm_config.model_config.dtype).removeprefix("torch.")
            from areal_ray.engines.vllm_serving import TurnService  # imports vllm
            from areal_ray.engines.vllm_standstill import Standstill

            self._turns = TurnService(self._llm, self._model, version, self._adapters)
            self._standstill = Standstill(self._llm, self._turns)
        except BaseException:
            self._thread.stop(_LOOK_S)
            raise

    # -- the verbs ------------------------------------------------------------------------------

    def start(self, on_results: OnResults, on_chunks: OnChunks | None = None) -> None:
        """Begin serving; both are called on the event loop's thread, once for each of its steps."""
        self._turns.start(on_results, on_chunks)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns. A bad request comes back through `on_results` with its error.

        Raises:
            EngineError: The engine has failed or is closed; it takes no more work.
        """
        self._raise_if_over()
        sound, refused = sound_and_refused(requests, self._model.why_refused)
        self._thread.loop.call_soon_threadsafe(self._turns.enter, sound, refused)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End turns now; ids that are not running or waiting are ignored."""
        self._thread.tell(lambda: self._turns.abort(request_ids))

    def pause(self) -> None:
        """Stop between two decode steps; returns when the engine stands still.

        Called from `on_results` it returns at once and takes effect a step later.
        """
        if self._thread.is_current:
            self._thread.tell(self._standstill.pause)
        else:
            self._ask(self._standstill.pause())

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._thread.is_current:
            self._thread.tell(self._standstill.resume)
        else:
            self._ask(self._standstill.resume())

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each tensor `swap` expects; a tied head appears once."""
        return self._model.weight_shapes if self._adapters is None else self._adapters.shapes

    def swap(
        self, tensors: Mapping[str, torch.Tensor], version: int, policy: OnWeightUpdate
    ) -> float:
        """Load weights between two decode steps; seconds the engine stood still.

        Tensors are checked and shared with vLLM's processes before the engine stops. With `keep`
        running turns go on over keys and values of older weights; with `recompute` vLLM computes
        them again under the new ones; with `drain` they end first while new ones wait. Under every
        policy a turn without a token yet begins anew, and no prefix is shared over a swap.

        Raises:
            EngineError: A tensor is missing, extra or of a wrong shape, the engine is over, or
                vLLM failed to load them: then this engine serves no more.
        """
        check_tensors(self.weight_shapes(), tensors)
        self._raise_if_over()
        if self._adapters is not None:
            self._adapters.write(tensors, version)
            return self._ask(self._swap(None, version, policy))
        with torch.inference_mode(), shared_weights(tensors, on_one_gpu=self._on_one_gpu) as note:
            return self._ask(self._swap(note, version, policy))

    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T-1] log-probs at temperature 1 of all tokens but the first, by the weights in force.

        Where the engine is paused, vLLM goes on for the few steps that this takes, turns under way
        with it: it cannot compute one thing alone. Where it sleeps, it is woken for that long.

        Raises:
            EngineError: The ids are none of the model's, none at all or more than its window.
        """
        self._raise_if_over()
        return self._ask(self._score(np.asarray(token_ids, dtype=np.int32)))

    def sleep(self) -> None:
        """After `pause`: on a GPU give the memory of weights and KV cache back until `wake`.

        vLLM on the CPU keeps its memory; a paused engine uses no CPU either way.
        """
        self._ask(self._standstill.sleep())

    def wake(self) -> None:
        """After `sleep`, before `resume`."""
        self._ask(self._standstill.wake())

    def health(self) -> EngineHealth:
        """What it is doing now.

        Raises:
            EngineError: The engine has failed; says why.
        """
        if not self._is_closed:
            self._raise_if_over()
        running, waiting, sampled = self._turns.counts()
        return EngineHealth(
            version=self._version,
            num_running=running,
            num_waiting=waiting,
            sampled_tokens=sampled,
            busy_s=self._turns.busy_s,
            idle_for_swap_s=self._idle_for_swap_s,
            dtype=self._dtype,
        )

    def close(self) -> None:
        """End vLLM and its processes; unfinished turns come back as aborted."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_current:
            self._thread.tell(self._close)
            return
        try:
            self._thread.ask(self._close(), _CLOSE_DEADLINE_S)
        except TimeoutError:
            _log.warning("%s: did not end within %g s", _NAME, _CLOSE_DEADLINE_S)
        self._thread.stop(_LOOK_S)

    # -- on the event loop ----------------------------------------------------------------------

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the loop do something, and wait for it; ends too when vLLM's process dies."""
        return self._thread.ask(self._watched(work))

    async def _watched(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=_LOOK_S)
            if not task.done() and (self._llm is None or self._llm.errored):
                task.cancel()
                raise self._died()
        try:
            return task.result()
        except ArealRayError:
            raise
        except Exception as error:
            if self._llm is None or self._llm.errored:
                raise self._died() from error
            raise EngineError(f"{_NAME}: {error}") from error

    async def _swap(self, note: WeightNote | None, version: int, policy: OnWeightUpdate) -> float:
        async with self._standstill.held_for_weights():
            if note is not None:
                await open_update(self._llm, note)
            begin = time.perf_counter()
            mode = "wait" if policy == "drain" else "keep"
            await self._llm.pause_generation(mode=mode, clear_cache=policy != "keep")
            begin = time.perf_counter() if policy == "drain" else begin
            self._turns.set_paused(True)
            try:
                self._turns.cache_version = version
                await self._turns.begin_unstarted_anew()
                if self._adapters is not None:
                    await self._adapters.load(self._llm, version)
                else:
                    await finish_update(self._llm, version)
            except Exception as error:  # it may have loaded by half: it must not sample again
                if self._llm.errored:
                    raise
                told = f"{_NAME}: version {version} was not loaded: {error}. Start a new engine."
                self._failure = EngineDied(told)
                await self._turns.end(_ABORT_DEADLINE_S)
                raise self._failure from error
            self._version = version
        idle_s = time.perf_counter() - begin
        self._idle_for_swap_s += idle_s
        return idle_s

    async def _score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        why = self._model.why_ids_refused(token_ids, self._model.window_tokens)
        if why:
            raise EngineError(f"{_NAME}: score: {why}")
        async with self._standstill.running():
            return await self._turns.score(token_ids)

    async def _close(self) -> None:
        if not self._llm.errored:
            await self._turns.end(_ABORT_DEADLINE_S)
        llm, self._llm = self._llm, None
        self._turns.release()
        await asyncio.to_thread(llm.shutdown, timeout=_LOOK_S)
        if self._adapters is not None:
            self._adapters.close()
        self._thread.loop.call_soon(self._thread.loop.stop)

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise EngineError(f"{_NAME}: it is closed. Start a new engine.")
        if self._llm.errored:
            raise self._died()

    def _died(self) -> EngineDied:
        """Why there is nothing to ask any more, looked up once."""
        if self._failure is None:
            told = f"{_NAME}: its engine process died: {self._processes.told()}"
            self._failure = EngineDied(told)
        return self._failure
