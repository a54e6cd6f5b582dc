"""The embedded generation engine: continuous batching of any Hugging Face decoder-only model.

Owned by a rollout actor (or a test). One loop thread computes; every public method may be called
from any thread. One turn of the loop is an engine step: apply aborts and a weight swap, admit
waiting turns, sample one token for every running row, report the turns that ended.

The loop waits for: a request, an abort, a swap, `resume` or `close`; unblocked by each of these.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.model_files import check_tensors
from areal_ray.engines.protocols import (
    EngineHealth,
    GenerationRequest,
    GenerationResult,
    OnWeightUpdate,
)
from areal_ray.engines.row_table import aborted_result, failed_result
from areal_ray.engines.running_batch import RunningBatch
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.errors import EngineError

_log = logging.getLogger(__name__)
_CLOSE_DEADLINE_S = 10.0


@dataclass(slots=True)
class _Swap:
    """A weight swap on its way to the loop thread."""

    weights: Any
    version: int
    policy: OnWeightUpdate
    done: threading.Event = field(default_factory=threading.Event)
    idle_s: float = 0.0
    failure: Exception | None = None


class TorchGenerationEngine:
    """A `GenerationEngine` on torch; see `protocols.GenerationEngine` for the verbs."""

    def __init__(
        self, model_path: str | Path, config: TorchGenerationConfig, *, version: int = 0
    ) -> None:
        """Load a model; `version` is what its weights are stamped with.

        Raises:
            DataError: The model folder cannot be used.
            EngineError: The model is not one this engine can run.
        """
        self._num_threads = config.num_threads
        self._model = load_generation_model(model_path, config)
        self._batch = RunningBatch(self._model, config)
        self._batch.version = version
        self._changed = threading.Condition()
        # Shared with the loop thread, under `_changed`:
        self._waiting: deque[GenerationRequest] = deque()
        self._unserved: list[GenerationResult] = []
        self._to_abort: set[str] = set()
        self._swap: _Swap | None = None
        self._is_paused = False
        self._is_stepping = False
        self._is_closed = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._on_results: Callable[[list[GenerationResult]], None] = _ignore
        self._swap_turn = threading.Lock()
        # Touched by the loop thread alone:
        self._finished: list[GenerationResult] = []
        self._entering: list[GenerationRequest] = []
        self._busy_s = 0.0
        self._idle_for_swap_s = 0.0

    # -- the verbs ------------------------------------------------------------------------------

    def start(self, on_results: Callable[[list[GenerationResult]], None]) -> None:
        """Begin serving; `on_results` is called on the loop thread, once per engine step."""
        if self._thread is not None:
            raise EngineError("torch generation engine: start was called twice; call it once.")
        self._on_results = on_results
        self._thread = threading.Thread(target=self._run, name="torch-generation", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns. A bad request comes back through `on_results` with its error.

        Raises:
            EngineError: The engine has failed or is closed; it takes no more work.
        """
        sound, bad = [], []
        for request in requests:
            why = self._model.why_refused(request)
            if why:
                bad.append(failed_result(request.request_id, why))
            else:
                sound.append(request)
        with self._changed:
            _raise_if_over(self._failure, self._is_closed)
            self._waiting.extend(sound)
            self._unserved.extend(bad)
            self._changed.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End turns now; ids that are not running or waiting are ignored."""
        with self._changed:
            self._to_abort.update(request_ids)
            self._changed.notify_all()

    def pause(self) -> None:
        """Stop between two decode steps; returns when the engine stands still."""
        with self._changed:
            self._is_paused = True
            if threading.current_thread() is not self._thread:
                self._changed.wait_for(lambda: not self._is_stepping)

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._changed:
            self._is_paused = False
            self._changed.notify_all()

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each tensor `swap` expects; a tied head appears once."""
        return self._model.forward.weight_shapes()

    def swap(
        self, tensors: Mapping[str, torch.Tensor], version: int, policy: OnWeightUpdate
    ) -> float:
        """Load weights between two decode steps; seconds the engine stood still.

        Tensors are checked and copied before the engine stops, so its pause is the exchange alone
        (with `recompute`, also the running turns' keys and values). With `keep` the running turns
        go on over keys and values of older weights; with `drain` they end first while new ones
        wait. A long prompt that is computed in part begins anew, and ended sequences kept for later
        turns are forgotten under every policy, so that a turn which samples its first token after
        the swap is wholly of the new version.

        Raises:
            EngineError: A tensor is missing, extra or of a wrong shape, or the engine is over.
        """
        if threading.current_thread() is self._thread:
            raise EngineError("torch generation engine: swap was called from on_results.")
        with self._swap_turn, torch.inference_mode():
            check_tensors(self.weight_shapes(), tensors)
            swap = _Swap(self._model.forward.prepare(tensors), version, policy)
            with self._changed:
                _raise_if_over(self._failure, self._is_closed)
                if self._thread is None:
                    self._apply(swap)
                    return swap.idle_s
                self._swap = swap
                self._changed.notify_all()
            swap.done.wait()
            _raise_if_over(swap.failure, is_closed=False)
            return swap.idle_s

    def health(self) -> EngineHealth:
        """What it is doing now.

        Raises:
            EngineError: The loop has failed; says why.
        """
        with self._changed:
            _raise_if_over(self._failure, is_closed=False)
            return EngineHealth(
                version=self._batch.version,
                num_running=self._batch.num_rows + self._batch.num_entering,
                num_waiting=len(self._waiting),
                sampled_tokens=self._batch.sampled_tokens,
                busy_s=self._busy_s,
                idle_for_swap_s=self._idle_for_swap_s,
            )

    def close(self) -> None:
        """Stop the loop after its current step; unfinished turns come back as aborted."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_DEADLINE_S)

    # -- the loop thread ------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            try:
                while self._wait_for_work():
                    self._step()
            except Exception as error:
                _log.exception("torch generation engine: the loop stopped")
                self._end(error)
            else:
                self._end(None)

    def _wait_for_work(self) -> bool:
        """Block without using CPU until there is something to do; False = closed."""
        with self._changed:
            self._is_stepping = False
            self._changed.notify_all()
            self._changed.wait_for(self._has_work)
            self._is_stepping = not self._is_closed
            return not self._is_closed

    def _has_work(self) -> bool:
        if self._is_closed or self._to_abort or self._unserved:
            return True
        if self._swap is not None:  # A drain goes on under `pause`, or it would never end.
            return True
        running = self._batch.num_rows + self._batch.num_entering
        return not self._is_paused and (running > 0 or bool(self._waiting))

    def _step(self) -> None:
        """One engine step; at most one call of `on_results`."""
        with self._changed:
            self._finished += self._unserved
            self._unserved = []
            self._abort_requested()
            is_paused, swap = self._is_paused, self._swap
            if swap is not None and (swap.policy != "drain" or self._batch.num_rows == 0):
                self._swap = None
            is_draining = self._swap is not None
        if swap is not None and not is_draining:
            self._apply(swap)
        begin = time.perf_counter()
        if not is_paused and not is_draining:
            self._admit()
        if not is_paused or is_draining:
            self._finished += self._batch.decode()
        self._busy_s += time.perf_counter() - begin
        self._report()

    def _admit(self) -> None:
        with self._changed:
            self._entering = self._batch.take(self._waiting)
        self._finished += self._batch.admit(self._entering)
        self._entering = []

    def _abort_requested(self) -> None:
        if not self._to_abort:
            return
        wanted, self._to_abort = self._to_abort, set()
        unstarted = [r.request_id for r in self._waiting if r.request_id in wanted]
        self._waiting = deque(r for r in self._waiting if r.request_id not in wanted)
        self._finished += [aborted_result(request_id) for request_id in unstarted]
        self._finished += self._batch.abort(wanted)

    def _report(self) -> None:
        finished, self._finished = self._finished, []
        if finished:
            self._on_results(finished)

    def _apply(self, swap: _Swap) -> None:
        begin = time.perf_counter()
        try:
            self._batch.change_weights(
                swap.weights, swap.version, recompute=swap.policy == "recompute"
            )
            swap.idle_s = time.perf_counter() - begin
            self._idle_for_swap_s += swap.idle_s
        except Exception as error:
            swap.failure = error
            raise
        finally:
            swap.done.set()

    def _end(self, failure: Exception | None) -> None:
        """Hand everything back: as aborted when closed, with the cause when the loop failed."""
        with self._changed:
            self._failure = failure
            self._is_closed = True
            self._is_stepping = False
            self._finished += self._unserved
            waiting = [request.request_id for request in self._waiting]
            swap, self._swap = self._swap, None
            self._changed.notify_all()
        running = self._batch.running_ids()
        waiting += [r.request_id for r in self._entering if r.request_id not in running]
        if failure is None:
            self._finished += self._batch.abort(set(running))
            self._finished += [aborted_result(request_id) for request_id in waiting]
        else:
            why = f"the engine stopped: {type(failure).__name__}: {failure}"
            self._finished += [failed_result(request_id, why) for request_id in running + waiting]
        if swap is not None:
            swap.failure = failure or EngineError("the engine was closed")
            swap.done.set()
        self._report()


def _raise_if_over(failure: Exception | None, is_closed: bool) -> None:
    if failure is not None:
        raise EngineError(
            f"torch generation engine: the loop stopped: {type(failure).__name__}: {failure}. "
            "Start a new engine."
        ) from failure
    if is_closed:
        raise EngineError("torch generation engine: it is closed. Start a new engine.")


def _ignore(results: list[GenerationResult]) -> None:
    del results
