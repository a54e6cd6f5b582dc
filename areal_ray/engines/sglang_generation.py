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
import threading
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from areal_ray.engines.model_files import check_tensors
from areal_ray.engines.protocols import (
    EngineHealth,
    GenerationRequest,
    GenerationResult,
    OnChunks,
    OnResults,
    OnWeightUpdate,
)
from areal_ray.engines.request_limits import sound_and_refused
from areal_ray.engines.row_table import failed_result
from areal_ray.engines.sglang_api import SglangApi
from areal_ray.engines.sglang_connection import connect
from areal_ray.engines.sglang_control import NAME, ServerControl
from areal_ray.engines.sglang_generation_config import SglangGenerationConfig
from areal_ray.engines.sglang_model import read_sglang_model
from areal_ray.engines.sglang_server import SglangServer, free_port, server_command
from areal_ray.engines.sglang_turns import TurnDesk
from areal_ray.engines.sglang_weights import weight_path
from areal_ray.errors import EngineError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_CLOSE_DEADLINE_S = 10.0


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
        self._model = read_sglang_model(model_path, config.max_context_tokens)
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
        self._control = ServerControl(
            self._api,
            self._desk,
            self._weights,
            has_memory_saver=config.memory_saver,
            why_ended=None if self._server is None else self._server.why_ended,
        )
        self._has_started = self._is_closed = False
        self._swap_turn = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="sglang-generation", daemon=True)
        self._thread.start()
        try:
            self._wait_for(connect(self._api, config, self._model, version, self._why_ended))
        except BaseException:
            self.close()
            raise
        for watch in (self._control.watch_process(), self._control.watch()):
            self._loop.call_soon_threadsafe(self._control.in_background, watch)

    # -- the verbs ------------------------------------------------------------------------------

    def start(self, on_results: OnResults, on_chunks: OnChunks | None = None) -> None:
        """Begin serving; both are called on the engine's own thread."""
        if self._has_started:
            raise EngineError(f"{NAME}: start was called twice; call it once.")
        self._has_started = True
        self._desk.call(on_results, on_chunks)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns. A bad request comes back through `on_results` with its error.

        Raises:
            EngineError: The server is gone, or the engine closed; it takes no more work.
        """
        self._control.raise_if_over()
        sound, refused = sound_and_refused(requests, self._model.why_refused)
        self._loop.call_soon_threadsafe(self._submit, sound, refused)

    def _submit(
        self, requests: Sequence[GenerationRequest], refused: Sequence[GenerationResult]
    ) -> None:
        self._desk.refuse(refused)
        if not self._desk.is_closed:
            self._desk.submit(requests)
            return
        why = str(self._control.failure or f"{NAME}: it is closed.")
        self._desk.refuse([failed_result(request.request_id, why) for request in requests])

    def abort(self, request_ids: Sequence[str]) -> None:
        """End turns now; ids that are not running or waiting are ignored."""
        self._loop.call_soon_threadsafe(self._desk.abort, list(request_ids))

    def pause(self) -> None:
        """Stop the server between two decode steps; returns when it stands still."""
        if threading.current_thread() is self._thread:
            self._control.note_pause()
            self._control.in_background(self._control.pause())
        else:
            self._wait_for(self._control.pause())

    def resume(self) -> None:
        """Go on after `pause`."""
        if threading.current_thread() is self._thread:
            self._control.in_background(self._control.resume())
        else:
            self._wait_for(self._control.resume())

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
            raise EngineError(f"{NAME}: swap was called from on_results.")
        self._control.raise_if_over()
        with self._swap_turn:
            check_tensors(self.weight_shapes(), tensors)
            staged = self._weights.stage(tensors, version)
            return self._wait_for(self._control.swap(staged, version, policy))

    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T-1] log-probs at temperature 1 of each token [T] but the first, given those before.

        Raises:
            EngineError: The ids are none of the model's, none at all or more than its window.
        """
        self._control.raise_if_over()
        if why := self._model.why_ids_refused(token_ids, self._model.window_tokens):
            raise EngineError(f"{NAME}: score: {why}")
        if len(token_ids) == 1:
            return np.empty(0, np.float32)
        return np.array(self._wait_for(self._control.score(token_ids.tolist())), np.float32)

    def sleep(self) -> None:
        """Give the memory of keys and values back, if the server has a memory saver.

        Raises:
            EngineError: The engine is not paused.
        """
        self._wait_for(self._control.sleep())

    def wake(self) -> None:
        """Undo `sleep`."""
        self._wait_for(self._control.wake())

    def health(self) -> EngineHealth:
        """What it is doing now.

        Raises:
            EngineError: The server is gone; says how.
        """
        if self._control.failure is not None:
            raise self._control.failure
        desk = self._desk
        return EngineHealth(
            version=desk.version,
            num_running=desk.num_begun,
            num_waiting=desk.num_waiting,
            sampled_tokens=desk.sampled_tokens,
            busy_s=desk.busy_s,
            idle_for_swap_s=self._control.idle_for_swap_s,
        )

    def close(self) -> None:
        """End the turns, as aborted, and a server of our own."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(EngineError):
            self._wait_for(
                self._control.close(leaves_server=self._server is None), limit_s=_CLOSE_DEADLINE_S
            )
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_DEADLINE_S)
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
            raise EngineError(f"{NAME}: no end within {limit_s} s") from error

    def _why_ended(self) -> str:
        return "" if self._server is None else self._server.why_ended()
