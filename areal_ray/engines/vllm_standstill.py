"""When vLLM stands still and when it sleeps: pause, resume, sleep and wake of the vLLM engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from areal_ray.engines.vllm_serving import TurnService
from areal_ray.errors import EngineError


class Standstill:
    """Holds vLLM still as its user asked. Every method is called on the event loop."""

    def __init__(self, llm: Any, turns: TurnService) -> None:
        self._llm = llm
        self._turns = turns
        self._can_sleep = bool(llm.vllm_config.model_config.enable_sleep_mode)
        self._verb = asyncio.Lock()  # one verb that stops or starts vLLM at a time
        self._is_paused = False
        self._is_asleep = False

    async def pause(self) -> None:
        """Stop between two steps; turns stay with their keys and values."""
        async with self._verb:
            self._is_paused = True
            await self._stop()

    async def resume(self) -> None:
        """Go on."""
        async with self._verb:
            self._is_paused = False
            await self._go()

    async def sleep(self) -> None:
        """Give memory back, where vLLM can: on a GPU.

        Raises:
            EngineError: It is not paused.
        """
        async with self._verb:
            if not self._is_paused:
                raise EngineError("vllm generation engine: sleep: it is running. Pause it first.")
            if not self._is_asleep:
                await self._give_back()
            self._is_asleep = True

    async def wake(self) -> None:
        """Take the memory again; still paused. Turns under way compute their keys anew."""
        async with self._verb:
            if self._is_asleep:
                await self._take_again()
                await self._stop(forget_keys=True)
            self._is_asleep = False

    @asynccontextmanager
    async def held_for_weights(self) -> AsyncIterator[None]:
        """Inside the block no other verb runs and vLLM is awake; it runs or not as before."""
        async with self._verb:
            if self._is_asleep:
                await self._take_again()
            yield
            if not self._is_paused:
                await self._go()
            if self._is_asleep:
                await self._give_back()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside the block vLLM computes, whether paused or asleep before; afterwards as before."""
        async with self.held_for_weights():
            if self._is_paused:
                await self._llm.resume_generation()
            yield
            if self._is_paused:
                await self._stop()

    async def _stop(self, *, forget_keys: bool = False) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=forget_keys)
        self._turns.set_paused(True)

    async def _go(self) -> None:
        self._turns.set_paused(False)
        await self._llm.resume_generation()

    async def _give_back(self) -> None:
        if self._can_sleep:
            await self._llm.sleep(level=1, mode="keep")

    async def _take_again(self) -> None:
        if self._can_sleep:
            await self._llm.wake_up()  # and resumes, which is for `resume` to do
            await self._stop()
