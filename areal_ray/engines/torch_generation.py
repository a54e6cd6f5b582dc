"""The embedded generation engine: continuous batching of any Hugging Face decoder-only model.

Owned by a rollout actor (or a test). One loop thread computes; every public method may be called
from any thread. One turn of the loop is an engine step: apply aborts and errands (a weight swap, a
score, sleep, wake), admit waiting turns, sample one token for every running row, report what the
streamed turns sampled and the turns that ended.

The loop waits for: a request, an abort, an errand, `resume` or `close`; unblocked by each of these.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.engines.engine_loop import EngineLoop
from areal_ray.engines.errands import Errand
from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.grammar_rows import GrammarDesk
from areal_ray.engines.lora_config import LoraSetup
from areal_ray.engines.made_ahead import MadeAhead
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
from areal_ray.engines.row_table import aborted_result, failed_result
from areal_ray.engines.running_batch import RunningBatch
from areal_ray.engines.scoring import check_scorable, score
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.errors import EngineError


class TorchGenerationEngine:
    """A `GenerationEngine` on torch; see `protocols.GenerationEngine` for the verbs."""

    def __init__(
        self,
        model_path: str | Path,
        config: TorchGenerationConfig,
        *,
        version: int = 0,
        lora: LoraSetup | None = None,
    ) -> None:
        """Load a model of version `version`; with `lora`, later ones are adapters of it.

        Raises:
            DataError: The model folder cannot be used.
            EngineError: The model is not one this engine can run.
        """
        self._model = load_generation_model(model_path, config, lora)
        self._batch = RunningBatch(self._model, config)
        self._batch.version = version
        self._loop = EngineLoop(config.num_threads)
        self._grammars = GrammarDesk(self._model.grammars, self._loop.changed)
        # Shared with the loop thread, under `_loop.changed`:
        self._waiting: deque[GenerationRequest] = deque()
        self._unserved: list[GenerationResult] = []
        self._to_abort: set[str] = set()
        self._on_results: OnResults = _ignore
        self._on_chunks: OnChunks | None = None
        self._swap_turn = threading.Lock()
        self._ahead = MadeAhead(self._model.forward)
        # Touched by the loop thread alone:
        self._finished: list[GenerationResult] = []
        self._entering: list[GenerationRequest] = []
        self._busy_s = self._idle_for_swap_s = 0.0

    # -- the verbs ------------------------------------------------------------------------------

    def start(self, on_results: OnResults, on_chunks: OnChunks | None = None) -> None:
        """Begin serving; both are called on the loop thread, at most once per engine step."""
        self._on_results, self._on_chunks = on_results, on_chunks
        self._loop.start(self._has_work, self._step, self._end)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns. A bad request comes back through `on_results` with its error.

        Raises:
            EngineError: The engine has failed or is closed; it takes no more work.
        """
        sound, refused = sound_and_refused(requests, self._model.why_refused)
        with self._loop.changed:
            self._loop.raise_if_over()
            self._enter(self._grammars.prepare(sound, self._enter), refused)

    def _enter(self, ready: list[GenerationRequest], refused: list[GenerationResult]) -> None:
        """Have requests wait for a place, and others reported; under the loop's lock."""
        self._waiting.extend(ready)
        self._unserved.extend(refused)
        self._loop.changed.notify_all()

    def abort(self, request_ids: Sequence[str]) -> None:
        """End turns now; ids that are not running or waiting are ignored."""
        with self._loop.changed:
            self._to_abort.update(request_ids)
            self._loop.changed.notify_all()

    def pause(self) -> None:
        """Stop between two decode steps; returns when the engine stands still."""
        self._loop.pause()

    def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            EngineError: The engine sleeps.
        """
        with self._loop.changed:
            if self._batch.is_asleep:
                raise EngineError("torch generation engine: it sleeps; call wake before resume.")
        self._loop.resume()

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each tensor `swap` expects; a tied head appears once."""
        return self._model.forward.weight_shapes()

    def prepare_swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `PreparesAhead`; of tensors that fit `weight_shapes`."""
        with self._swap_turn, torch.inference_mode():
            self._ahead.make(tensors)

    def swap(
        self, tensors: Mapping[str, torch.Tensor], version: int, policy: OnWeightUpdate
    ) -> float:
        """Load weights between two decode steps; seconds the engine stood still.

        Checked and copied before, so the pause is the exchange alone (with `recompute`, also the
        running turns' keys and values). `keep`: running turns go on over those of older weights;
        `drain`: they end first, new ones wait. Prompts computed in part begin anew and ended
        sequences are forgotten, so a turn whose first token follows is wholly of the new version.

        Raises:
            EngineError: A tensor is missing, extra or of a wrong shape, or the engine is over.
        """
        self._loop.check_caller("swap")
        with self._swap_turn, torch.inference_mode():
            check_tensors(self.weight_shapes(), tensors)
            weights = self._ahead.take(tensors)
            exchange = partial(self._exchange, weights, version, policy == "recompute")
            errand = Errand("swap", exchange, waits_for_drain=policy == "drain", ends_loop=True)
            idle_s: float = self._loop.run(errand)
            return idle_s

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """A live tensor that is not what `swap` makes of these, or nothing; beside the loop."""
        with self._swap_turn, torch.inference_mode():
            return self._model.forward.differing(tensors)

    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T-1] log-probs of each token [T] but the first; running turns wait meanwhile."""
        check_scorable(self._model, token_ids)
        scored: NDArray[np.float32] = self._loop.run(
            Errand("score", lambda: score(self._model, token_ids))
        )
        return scored

    def sleep(self) -> None:
        """Give the memory of keys and values back; only while paused. The weights stay.

        Turns under way stay too, and are computed anew by `wake`. A swap that drains needs no turn
        under way, since none can end.
        """
        self._loop.run(Errand("sleep", self._fall_asleep))

    def wake(self) -> None:
        """Take memory anew; the keys and values of running turns become those of these weights."""
        self._loop.run(Errand("wake", self._batch.wake))

    def health(self) -> EngineHealth:
        """What it is doing now.

        Raises:
            EngineError: The loop has failed; says why.
        """
        with self._loop.changed:
            self._loop.raise_if_failed()
            return EngineHealth(
                version=self._batch.version,
                num_running=self._batch.num_rows + self._batch.num_entering,
                num_waiting=len(self._waiting) + len(self._grammars.ids),
                sampled_tokens=self._batch.sampled_tokens,
                busy_s=self._busy_s,
                idle_for_swap_s=self._idle_for_swap_s,
                dtype=str(self._model.dtype).removeprefix("torch."),
            )

    def close(self) -> None:
        """Stop the loop after its current step; unfinished turns come back as aborted."""
        self._loop.close()

    # -- the loop thread ------------------------------------------------------------------------

    def _has_work(self) -> bool:
        """Whether a step would do something; called by the loop, under its lock."""
        if self._to_abort or self._unserved:
            return True
        running = self._batch.num_rows + self._batch.num_entering
        return not self._loop.is_paused and (running > 0 or bool(self._waiting))

    def _step(self) -> None:
        """One engine step, called by the loop; each callback is called at most once."""
        with self._loop.changed:
            self._finished += self._unserved
            self._unserved = []
            self._abort_requested()
            is_paused = self._loop.is_paused
        is_draining = self._do_errands()
        begin = time.perf_counter()
        if not is_paused and not is_draining:
            self._admit()
        if not is_paused or is_draining:  # A drain goes on under `pause`, or it would never end.
            self._finished += self._batch.decode()
        self._busy_s += time.perf_counter() - begin
        self._report()

    def _do_errands(self) -> bool:
        """Do what other threads asked for; whether one waits for the running turns to end."""
        while True:
            with self._loop.changed:
                num_rows = self._batch.num_rows
                errand = self._loop.errands.take(is_drained=num_rows == 0)
                if errand is None:
                    if not self._loop.errands or not self._batch.is_asleep:
                        return bool(self._loop.errands)
                    self._loop.errands.refuse_first(EngineError(_ASLEEP.format(num_rows)))
            if errand is not None:
                self._loop.do(errand)

    def _admit(self) -> None:
        with self._loop.changed:
            self._entering = self._batch.take(self._waiting)
        self._finished += self._batch.admit(self._entering)
        self._entering = []

    def _abort_requested(self) -> None:
        if not self._to_abort:
            return
        wanted, self._to_abort = self._to_abort, set()
        unstarted = self._grammars.take(wanted)
        unstarted += [r.request_id for r in self._waiting if r.request_id in wanted]
        self._waiting = deque(r for r in self._waiting if r.request_id not in wanted)
        self._finished += [aborted_result(request_id) for request_id in unstarted]
        self._finished += self._batch.abort(wanted)

    def _report(self) -> None:
        chunks = self._batch.take_chunks()
        if chunks and self._on_chunks is not None:
            self._on_chunks(chunks)
        finished, self._finished = self._finished, []
        if finished:
            self._on_results(finished)

    def _exchange(self, weights: Any, version: int, is_recomputed: bool) -> float:
        begin = time.perf_counter()
        self._batch.change_weights(weights, version, recompute=is_recomputed)
        idle_s = time.perf_counter() - begin
        self._idle_for_swap_s += idle_s
        return idle_s

    def _fall_asleep(self) -> None:
        with self._loop.changed:
            if not self._loop.is_paused:
                raise EngineError(
                    "torch generation engine: sleep was called while it samples; call pause first."
                )
            self._batch.sleep()

    def _end(self, failure: Exception | None) -> None:
        """Hand everything back: as aborted when closed, with the cause when the loop failed."""
        with self._loop.changed:
            self._finished += self._unserved
            waiting = self._grammars.close()
        running = self._batch.running_ids()
        waiting += [r.request_id for r in (*self._entering, *self._waiting)]
        waiting = [request_id for request_id in waiting if request_id not in running]
        if failure is None:
            self._finished += self._batch.abort(set(running))
            self._finished += [aborted_result(request_id) for request_id in waiting]
        else:
            why = f"the engine stopped: {type(failure).__name__}: {failure}"
            self._finished += [failed_result(request_id, why) for request_id in running + waiting]
        self._report()


_ASLEEP = (
    "torch generation engine: swap: {} turns are under way and cannot end while it sleeps. Wake it "
    "first, or swap with keep or recompute."
)


def _ignore(results: list[GenerationResult]) -> None:
    del results
