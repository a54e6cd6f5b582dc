"""SwapGuard: nothing that an engine samples from new weights leaves before these are proven.

Sits between one engine and the replica that serves from it; knows no Ray. A swap lets sampling go
on at once; turns that hold a token of the new version are kept back while the live weights are
checked beside it, and let out once they are proven. Where they are not, the engine is halted and
its turns come back as aborted: whoever waits has them sampled anew, by another replica or by this
one after a swap that is proven.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.canary import Check, Proof, Swapped, compare
from areal_ray.core.trajectory import StopReason
from areal_ray.engines.protocols import (
    GenerationChunk,
    GenerationEngine,
    GenerationResult,
    OnChunks,
    OnResults,
    OnWeightUpdate,
    ReadsBack,
)
from areal_ray.errors import EngineDied

if TYPE_CHECKING:
    from torch import Tensor


class SwapGuard:
    """Swaps weights into an engine and answers for what it sends out."""

    def __init__(
        self,
        engine: GenerationEngine,
        policy: OnWeightUpdate,
        send: OnResults,
        send_chunks: OnChunks | None = None,
    ) -> None:
        """What leaves goes to the last two, on the engine's thread or on that of `swap`.

        `swap`, `pause` and `resume` are called from one thread.
        """
        self._engine = engine
        self._policy = policy
        self._send = send
        self._send_chunks = send_chunks
        self._changed = threading.Lock()
        # Shared by both threads, under `_changed`:
        self._unproven: int | None = None
        self._kept: list[GenerationResult] = []
        self._kept_chunks: list[GenerationChunk] = []
        self._is_halted = False
        self._is_paused = False

    def pause(self, *, asleep: bool = False) -> None:
        """Stop sampling until `resume`, whatever is swapped; asleep, memory is given back too."""
        self._is_paused = True
        self._engine.pause()
        if asleep:
            self._engine.sleep()

    def resume(self) -> None:
        """Undo `pause`; an engine whose weights are not proven stays halted."""
        self._engine.wake()
        self._is_paused = False
        if not self._is_halted:
            self._engine.resume()

    def on_results(self, results: list[GenerationResult]) -> None:
        """Take what the engine finished in one step."""
        with self._changed:
            out = []
            for result in results:
                if not self._is_unproven(result):
                    out.append(result)
                elif self._is_halted:
                    out.append(_aborted(result))
                else:
                    self._kept.append(result)
            if out:
                self._send(out)

    def on_chunks(self, chunks: list[GenerationChunk]) -> None:
        """Take what the engine's streamed turns sampled in one step."""
        assert self._send_chunks is not None, "nobody asked for chunks"
        with self._changed:
            out = [chunk for chunk in chunks if not self._is_of_unproven(chunk.versions)]
            if len(out) < len(chunks) and not self._is_halted:
                self._kept_chunks += [c for c in chunks if self._is_of_unproven(c.versions)]
            if out:
                self._send_chunks(out)

    def swap(
        self,
        tensors: Mapping[str, "Tensor"],
        version: int,
        check: Check,
        running: Callable[[], Iterable[str]],
    ) -> Swapped:
        """Load weights, prove them, and let out what was sampled from them; or halt.

        Args:
            tensors: As they arrived, in a buffer that stays as it is meanwhile.
            version: Theirs.
            check: What has to be proven.
            running: Gives the ids of the turns that the engine holds.

        Raises:
            EngineDied: Another engine has to be started; this one answers for nothing any more.
        """
        with self._changed:
            self._unproven = version
        is_proven = is_over = False
        try:
            idle_s = self._engine.swap(tensors, version, self._policy)
            started_s = time.perf_counter()
            proof = self._prove(tensors, check)
            is_proven = not proof.difference
        except EngineDied:  # nothing is left to be halted
            is_over = True
            raise
        finally:  # an engine that may have loaded some tensors and not others is halted, too
            if is_proven:
                self._let_out()
            elif not is_over:
                self._halt(running)
        return Swapped(idle_s, replace(proof, seconds=time.perf_counter() - started_s))

    def _prove(self, tensors: Mapping[str, "Tensor"], check: Check) -> Proof:
        """The probe is computed on the engine's thread, the tensors are looked at on this one."""
        with ThreadPoolExecutor(1, "probe") as beside:
            proving = beside.submit(self._probe, check)
            if check.tensors and isinstance(self._engine, ReadsBack):
                name = self._engine.differing(tensors)
                if name:
                    return Proof(f"{name} is live with other bytes than those that arrived")
            return proving.result()

    def _probe(self, check: Check) -> Proof:
        if check.probe is None:
            return Proof()
        logprobs = self._engine.score(check.probe.token_ids)
        dtype = self._engine.health().dtype
        return compare(check.probe, logprobs, dtype, check.tolerance_nats)

    def _let_out(self) -> None:
        with self._changed:
            self._unproven = None
            kept, self._kept = self._kept, []
            chunks, self._kept_chunks = self._kept_chunks, []
            was_halted, self._is_halted = self._is_halted, False
            if chunks and self._send_chunks is not None:
                self._send_chunks(chunks)
            if kept:
                self._send(kept)
        if was_halted and not self._is_paused:
            self._engine.resume()

    def _halt(self, running: Callable[[], Iterable[str]]) -> None:
        self._engine.pause()
        with self._changed:
            self._is_halted = True
            kept, self._kept, self._kept_chunks = self._kept, [], []
            if kept:
                self._send([_aborted(result) for result in kept])
        self._engine.abort(list(running()))

    def _is_unproven(self, result: GenerationResult) -> bool:
        """Whether weights that are not proven gave its last token, or its failure."""
        if self._unproven is None:
            return False
        if result.error or result.stop_reason is StopReason.ABORT:
            return bool(result.error)
        return self._is_of_unproven(result.versions)

    def _is_of_unproven(self, versions: NDArray[np.int32]) -> bool:
        return len(versions) > 0 and int(versions[-1]) == self._unproven


def _aborted(result: GenerationResult) -> GenerationResult:
    return replace(
        result,
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        versions=np.empty(0, np.int32),
        stop_reason=StopReason.ABORT,
        error="",
    )
