"""A generation engine over an SGLang server's HTTP API.

Owned by a rollout actor (or a test). One thread runs an event loop on which all requests are made;
every public method may be called from any thread. Log-probs are those of the full softmax at the
sampling temperature (SGLang's own way, before top-p, top-k and min-p); seeds decide only where the
server runs with `enable_deterministic_inference`. Penalties and biases are refused.

A weight update cuts running turns off at the server (`pause_generation` in mode abort, the one mode
that waits until nothing runs), loads, and sends them again with what they have sampled. `keep`
leaves their keys and values in the server's prefix cache, to be found again; `recompute` flushes
it; `drain` lets them end first.

Waits: for the server to start, for each request, for a pause; all end at a deadline with an
EngineError.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from areal_ray.engines.model_files import check_tensors
from areal_ray.engines.protocols import (
    EngineHealth,
    GenerationRequest,
    OnChunks,
    OnResults,
    OnWeightUpdate,
)
from areal_ray.engines.served_model import read_served_model
from areal_ray.engines.sglang_api import ServerUnreachable, SglangApi
from areal_ray.engines.sglang_connection import connect
from areal_ray.engines.sglang_generation_config import SglangGenerationConfig
from areal_ray.engines.sglang_server import SglangServer, free_port, server_command
from areal_ray.engines.sglang_turns import TurnDesk
from areal_ray.engines.sglang_weights import weight_path
from areal_ray.errors import EngineError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_log = logging.getLogger(__name__)
_NAME = "sglang generation engine"
_PATIENCE_S = 10.0
"""For what was aborted to come back before its connection is closed."""
_WATCH_S = 1.0
_KV_CACHE = {"tags": ["kv_cache"]}


class SglangGenerationEngine:
    """A `GenerationEngine` on SGLang; see `protocols.GenerationEngine` for the verbs."""

    def __init__(
        self, model_path: str | Path, config: SglangGenerationConfig, *, version: int = 0
    ) -> None:
        """Start a server for the model, or connect to the one at `config.url`.

        Args:
            model_path: Hugging Face checkpoint folder.
            config: The recipe's section.
            version: Of the weights at `model_path`. A server at a url that stamps tokens with
                another one is given these weights.

        Raises:
            DataError: The model folder cannot be used.
            EngineError: The server does not start, or is not one this adapter can use.
        """
        self._config = config
        self._model = read_served_model(model_path, config.max_context_tokens)
        self._server: SglangServer | None = None
        url = config.url
        if not url:
            port = free_port()
            self._server = SglangServer(
                server_command(config, self._model, port=port, version=version)
            )
            url = f"http://127.0.0.1:{port}"
        self._api = SglangApi(
            url, timeout_s=config.request_timeout_s, num_retries=config.num_retries
        )
        self._desk = TurnDesk(self._api, self._model, config.max_in_flight)
        self._desk.version = version
        self._weights = weight_path(config, self._api, self._model.folder)
        # Touched by the loop alone, beside `_failure`, which others read:
        self._control = asyncio.Lock()
        self._is_paused = self._is_asleep = self._is_closed = False
        self._failure: EngineError | None = None
        self._idle_for_swap_s = 0.0
        self._background: set[asyncio.Task[Any]] = set()
        self._has_started = False
        self._swap_turn = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sglang-generation", daemon=True)
        self._thread.start()
        try:
            self._wait_for(connect(self._api, config, self._model, version, self._why_ended))
        except BaseException:
            self.close()
            raise
        self._loop.call_soon_threadsafe(self._in_background, self._watch())

    # -- the verbs ------------------------------------------------------------------------------

    def start(self, on_results: OnResults, on_chunks: OnChunks | None = None) -> None:
        """Begin serving; both are called on the engine's own thread."""
        if self._has_started:
            raise EngineError(f"{_NAME}: start was called twice; call it once.")
        self._has_started = True
        self._desk.call(on_results, on_chunks)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns. A bad request comes back through `on_results` with its error.

        Raises:
            EngineError: The server is gone, or the engine closed; it takes no more work.
        """
        self._raise_if_over()
        sound = []
        for request in requests:
            why = self._model.why_refused(request)
            if why:
                self._loop.call_soon_threadsafe(self._desk.fail, request.request_id, why)
            else:
                sound.append(request)
        self._loop.call_soon_threadsafe(self._submit, sound)

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._failure is None and not self._desk.is_closed:
            self._desk.submit(requests)
            return
        for request in requests:
            self._desk.fail(request.request_id, str(self._failure or f"{_NAME}: it is closed."))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End turns now; ids that are not running or waiting are ignored."""
        self._loop.call_soon_threadsafe(self._desk.abort, list(request_ids))

    def pause(self) -> None:
        """Stop the server between two decode steps; returns when it stands still."""
        if threading.current_thread() is self._thread:
            self._close_gates()
            self._in_background(self._pause())
        else:
            self._wait_for(self._pause())

    def resume(self) -> None:
        """Go on after `pause`."""
        if threading.current_thread() is self._thread:
            self._in_background(self._resume())
        else:
            self._wait_for(self._resume())

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each tensor `swap` expects; a tied head appears once."""
        return self._model.weight_shapes

    def swap(
        self, tensors: Mapping[str, "torch.Tensor"], version: int, policy: OnWeightUpdate
    ) -> float:
        """Load weights between two decode steps; seconds the engine stood still.

        Raises:
            EngineError: A tensor is missing, extra or of a wrong shape, or the server did not take
                them all: it may hold parts of both versions, so the engine is over.
        """
        if threading.current_thread() is self._thread:
            raise EngineError(f"{_NAME}: swap was called from on_results.")
        self._raise_if_over()
        with self._swap_turn:
            check_tensors(self.weight_shapes(), tensors)
            staged = self._weights.stage(tensors, version)
            return self._wait_for(self._swap(staged, version, policy))

    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T-1] log-probs at temperature 1 of each token [T] but the first, given those before.

        Raises:
            EngineError: The ids are none of the model's, none at all or more than its window.
        """
        self._raise_if_over()
        if why := self._model.why_ids_refused(token_ids):
            raise EngineError(f"{_NAME}: score: {why}")
        if len(token_ids) == 1:
            return np.empty(0, np.float32)
        return np.array(self._wait_for(self._score(token_ids.tolist())), np.float32)

    def sleep(self) -> None:
        """Give the memory of keys and values back, if the server has a memory saver.

        Raises:
            EngineError: The engine is not paused.
        """
        self._wait_for(self._sleep())

    def wake(self) -> None:
        """Undo `sleep`."""
        self._wait_for(self._wake())

    def health(self) -> EngineHealth:
        """What it is doing now.

        Raises:
            EngineError: The server is gone; says how.
        """
        if self._failure is not None:
            raise self._failure
        desk = self._desk
        return EngineHealth(
            version=desk.version,
            num_running=desk.num_begun,
            num_waiting=desk.num_waiting,
            sampled_tokens=desk.sampled_tokens,
            busy_s=desk.busy_s,
            idle_for_swap_s=self._idle_for_swap_s,
        )

    def close(self) -> None:
        """End the turns, as aborted, and a server of our own."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(EngineError):
            self._wait_for(self._close(), limit_s=_PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_PATIENCE_S)
        self._weights.close()
        if self._server is not None:
            self._server.close()

    # -- the loop thread ------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def _wait_for(self, work: Coroutine[Any, Any, T], limit_s: float | None = None) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit_s)
        except TimeoutError as error:
            future.cancel()
            raise EngineError(f"{_NAME}: no end within {limit_s} s") from error

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: "asyncio.Task[Any]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            why = error if isinstance(error, EngineError) else EngineError(repr(error))
            self._fail(why)

    def _close_gates(self) -> None:
        self._is_paused = True
        self._desk.set_gates(begin=False, go_on=False)

    async def _halt(self) -> None:
        """Have nothing run at the server; gates are closed."""
        await self._api.post("/pause_generation", {"mode": "abort"})
        await self._desk.interrupt(_PATIENCE_S)

    async def _go_on(self) -> None:
        await self._api.post("/continue_generation", {})

    async def _pause(self) -> None:
        self._close_gates()
        async with self._control:
            await self._halt()

    async def _resume(self) -> None:
        async with self._control:
            if self._is_asleep:
                raise EngineError(f"{_NAME}: resume of a sleeping engine; wake it first.")
            if self._is_paused:
                await self._go_on()
                self._is_paused = False
            self._desk.set_gates(begin=True, go_on=True)

    async def _swap(self, staged: Any, version: int, policy: OnWeightUpdate) -> float:
        async with self._control:
            self._raise_if_over()
            if policy == "drain" and self._desk.num_begun:
                self._desk.set_gates(begin=False, go_on=True)
                if self._is_paused:  # or the drain would never end
                    await self._go_on()
                await self._desk.drained()
            began = time.perf_counter()
            self._desk.set_gates(begin=False, go_on=False)
            try:
                await self._halt()
                await self._weights.load(staged, version, flush=policy != "keep")
                self._desk.version = version
                if not self._is_paused:
                    await self._go_on()
                    self._desk.set_gates(begin=True, go_on=True)
            except EngineError as error:
                self._fail(EngineError(f"{_NAME}: version {version} is not loaded: {error}"))
                raise
            idle_s = time.perf_counter() - began
            self._idle_for_swap_s += idle_s
            return idle_s

    async def _score(self, token_ids: list[int]) -> list[float]:
        body = {
            "input_ids": token_ids,
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": f"version-{self._desk.version}",
        }
        async with self._control, self._serving():
            return await self._api.prompt_logprobs(body)

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """A server that answers though the engine is paused or asleep; its gates stay closed."""
        if self._is_asleep:
            await self._api.post("/resume_memory_occupation", _KV_CACHE)
        if self._is_paused:
            await self._go_on()
        try:
            yield
        finally:
            if self._is_paused:
                await self._halt()
            if self._is_asleep:
                await self._api.post("/release_memory_occupation", _KV_CACHE)

    async def _sleep(self) -> None:
        async with self._control:
            if not self._is_paused:
                raise EngineError(f"{_NAME}: sleep of an engine that is not paused; pause it first.")
            if self._config.memory_saver and not self._is_asleep:
                await self._api.post("/release_memory_occupation", _KV_CACHE)
                self._is_asleep = True

    async def _wake(self) -> None:
        async with self._control:
            if self._is_asleep:
                await self._api.post("/resume_memory_occupation", _KV_CACHE)
                self._is_asleep = False

    # -- the end --------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Notice a server that died, or weights that another client loaded."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if why := self._why_ended():
                raise EngineError(f"{_NAME}: {why}")
            if self._control.locked():
                continue
            expected = self._desk.version
            try:
                said = await self._api.get("/model_info")
            except ServerUnreachable as error:
                raise EngineError(f"{_NAME}: {self._why_ended() or error}") from error
            stamped, is_current = str(said.get("weight_version")), expected == self._desk.version
            if is_current and not self._control.locked() and stamped != str(expected):
                raise EngineError(
                    f"{_NAME}: the server at {self._api.url} is at version {stamped}, must be at "
                    f"{expected}: another client changes its weights. Give each replica a server "
                    "of its own."
                )

    def _why_ended(self) -> str:
        return "" if self._server is None else self._server.why_ended()

    def _fail(self, why: EngineError) -> None:
        if self._failure is None and not self._is_closed:
            _log.error("%s", why)
            self._failure = why
            self._desk.set_gates(begin=False, go_on=False)
            self._in_background(self._desk.close(str(why)))

    async def _close(self) -> None:
        for task in list(self._background):
            task.cancel()
        await self._desk.close()
        if self._failure is None and self._server is None:
            # A server that outlives us shall neither sample on nor stay paused.
            with contextlib.suppress(EngineError):
                await self._api.post("/abort_request", {"rid": "", "abort_all": True})
                if self._is_paused:
                    await self._go_on()
        await self._api.close()

    def _raise_if_over(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise EngineError(f"{_NAME}: it is closed. Start a new engine.")
