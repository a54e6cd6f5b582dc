"""What happens to an SGLang server as a whole: stopped, given weights, scored with, watched.

Owned by the adapter; lives on its event loop. Each verb takes the lock, so that one thing happens
at a time, and turns run beside it only while the gates of the desk are open.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from areal_ray.engines.protocols import OnWeightUpdate
from areal_ray.engines.sglang_api import ServerUnreachable, SglangApi
from areal_ray.engines.sglang_turns import TurnDesk
from areal_ray.engines.sglang_weights import WeightPath
from areal_ray.errors import EngineDied, EngineError

NAME = "sglang generation engine"
_log = logging.getLogger(__name__)
_PATIENCE_S = 10.0
"""For what was aborted to come back before its connection is closed."""
_ABORT_AGAIN_S = 0.1
"""An abort that overtook its request finds nothing at the server."""
_WATCH_S = 1.0
_EXIT_CODE_S = 10.0
"""For the exit code of a server that cannot be reached, on a machine that has much else to do."""
_EXIT_CODE_POLL_S = 0.1
_KV_CACHE = {"tags": ["kv_cache"]}


class ServerControl:
    """The server's state, and the verbs that change it."""

    def __init__(
        self,
        api: SglangApi,
        desk: TurnDesk,
        weights: WeightPath,
        *,
        has_memory_saver: bool,
        why_ended: Callable[[], str] | None,
    ) -> None:
        """Around a server that runs and holds the desk's version.

        Args:
            api: Its client.
            desk: Its turns.
            weights: How new ones reach it.
            has_memory_saver: Whether it can give the memory of keys and values back.
            why_ended: Empty while the server's process runs, else how it ended; None for a server
                that is not ours to watch.
        """
        self._api = api
        self._desk = desk
        self._weights = weights
        self._has_memory_saver = has_memory_saver
        self._why_ended = why_ended
        self._lock = asyncio.Lock()
        self._is_paused = self._is_stopped = self._is_draining = self._is_asleep = False
        self._is_closed = False
        self._background: set[asyncio.Task[Any]] = set()
        self.failure: EngineError | None = None
        """Why the engine is over."""
        self.idle_for_swap_s = 0.0

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something whose failure is the engine's end."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: "asyncio.Task[Any]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, EngineError) else EngineError(repr(error)))

    # -- standing still and going on ------------------------------------------------------------

    def note_pause(self) -> None:
        """Send no more pieces from now on; `pause` then ends those at the server."""
        self._is_paused = True
        self._set_gates()

    async def pause(self) -> None:
        """Have the server stand still; a drain that is under way ends first."""
        self.note_pause()
        async with self._lock:
            await self._halt()

    async def resume(self) -> None:
        """Undo `pause`."""
        async with self._lock:
            if self._is_asleep:
                raise EngineError(f"{NAME}: resume of a sleeping engine; wake it first.")
            if self._is_paused:
                await self._go_on()
                self._is_paused = False
            self._set_gates()

    def _set_gates(self) -> None:
        stands_still = self._is_paused or self._is_stopped or self.failure is not None
        # A drain goes on under `pause`, or it would never end.
        self._desk.set_gates(
            begin=not (stands_still or self._is_draining),
            go_on=self._is_draining or not stands_still,
        )

    async def _halt(self) -> None:
        """Have nothing run at the server; gates are closed.

        SGLang's pause looks once a second whether its requests are gone, so they are ended first.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while not await self._desk.idle(_ABORT_AGAIN_S):
            if time.monotonic() > deadline:
                await self._desk.cut_off()
            await self._api.post("/abort_request", {"abort_all": True})
        await self._api.post("/pause_generation", {"mode": "abort"})

    async def _go_on(self) -> None:
        await self._api.post("/continue_generation", {})

    # -- weights, scores, memory ----------------------------------------------------------------

    async def swap(self, staged: Any, version: int, policy: OnWeightUpdate) -> float:
        """Load what the weight path has staged; seconds that the server stood still."""
        async with self._lock:
            self.raise_if_over()
            if policy == "drain":
                await self._drain()
            began = time.perf_counter()
            self._is_stopped = True
            self._set_gates()
            try:
                await self._halt()
                await self._weights.load(staged, version, flush=policy != "keep")
                self._desk.version = version
                if not self._is_paused:
                    await self._go_on()
            except EngineError as error:
                told = f"version {version} is not loaded: {error}"
                raise self._fail(await self._lost(error, told)) from error
            self._is_stopped = False
            self._set_gates()
            idle_s = time.perf_counter() - began
            self.idle_for_swap_s += idle_s
            return idle_s

    async def _drain(self) -> None:
        self._is_draining = True
        self._set_gates()
        try:
            if self._is_paused and self._desk.num_begun:
                await self._go_on()
            await self._desk.drained()
        finally:
            self._is_draining = False

    async def score(self, token_ids: list[int]) -> list[float]:
        """[T-1] log-probs at temperature 1 of each token [T] but the first."""
        async with self._lock, self._serving():
            return await self._api.prompt_logprobs(
                {
                    "input_ids": token_ids,
                    "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
                    "return_logprob": True,
                    "logprob_start_len": 0,
                    "extra_key": f"version-{self._desk.version}",
                }
            )

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        """A server that answers though the engine is paused or asleep; its gates stay closed."""
        self.raise_if_over()
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

    async def sleep(self) -> None:
        """Give the memory of keys and values back, where the server can."""
        async with self._lock:
            if not self._is_paused:
                raise EngineError(f"{NAME}: sleep of an engine that is not paused; pause it first.")
            if self._has_memory_saver and not self._is_asleep:
                await self._api.post("/release_memory_occupation", _KV_CACHE)
                self._is_asleep = True

    async def wake(self) -> None:
        """Undo `sleep`."""
        async with self._lock:
            if self._is_asleep:
                await self._api.post("/resume_memory_occupation", _KV_CACHE)
                self._is_asleep = False

    # -- the end --------------------------------------------------------------------------------

    async def watch_process(self) -> None:
        """Notice that the server's process ended, whatever waits for an answer of it."""
        while not (why := self._how_ended()):
            await asyncio.sleep(_WATCH_S)
        raise EngineDied(f"{NAME}: {why}")

    async def watch(self) -> None:
        """Notice a server that cannot be reached, or weights that another client loaded."""
        while True:
            await asyncio.sleep(_WATCH_S)
            if self._lock.locked():
                continue
            expected = self._desk.version
            try:
                said = await self._api.get("/model_info")
            except ServerUnreachable as error:
                raise await self._lost(error, str(error)) from error
            stamped, is_current = str(said.get("weight_version")), expected == self._desk.version
            if is_current and not self._lock.locked() and stamped != str(expected):
                raise EngineError(
                    f"{NAME}: the server at {self._api.url} is at version {stamped}, must be at "
                    f"{expected}: another client changes its weights. Give each replica a server "
                    "of its own."
                )

    async def _lost(self, error: EngineError, told: str) -> EngineDied:
        """Why the server has to be another: its process's end, where it cannot be reached."""
        may_have_ended = isinstance(error, ServerUnreachable) and self._why_ended is not None
        deadline = time.monotonic() + (_EXIT_CODE_S if may_have_ended else 0.0)
        while not (why := self._how_ended()) and time.monotonic() < deadline:
            await asyncio.sleep(_EXIT_CODE_POLL_S)
        return EngineDied(f"{NAME}: {why or told}")

    def _how_ended(self) -> str:
        return "" if self._why_ended is None else self._why_ended()

    def raise_if_over(self) -> None:
        """Refuse work of an engine that has failed or is closed."""
        if self.failure is not None:
            raise self.failure
        if self._is_closed:
            raise EngineError(f"{NAME}: it is closed. Start a new engine.")

    def _fail(self, why: EngineError) -> EngineError:
        """End the engine, unless it has ended; what it ended with."""
        if self.failure is None and not self._is_closed:
            _log.error("%s", why)
            self.failure = why
            self._set_gates()
            self.in_background(self._desk.close(str(why)))
        return self.failure or why

    async def close(self, *, leaves_server: bool) -> None:
        """End all turns as aborted, and leave a server that outlives us usable."""
        self._is_closed = True
        for task in list(self._background):
            task.cancel()
        await self._desk.close()
        if leaves_server and self.failure is None:
            with contextlib.suppress(EngineError):
                await self._api.post("/abort_request", {"abort_all": True})
                if self._is_paused:
                    await self._go_on()
        await self._api.close()
