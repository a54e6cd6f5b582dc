"""A rollout actor's handle that does what a script says, without an actor behind it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from areal_ray.engines.protocols import GenerationChunk, GenerationRequest, GenerationResult
from areal_ray.runtime.turn_wire import ChunkBatch, Collected, ResultBatch

Part = GenerationChunk | GenerationResult


class _Method:
    """A method of an actor handle."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class ScriptedReplica:
    """Each collect gives the next of the script, or raises it; an event is waited for before."""

    def __init__(self, *script: Sequence[Part] | Exception | asyncio.Event) -> None:
        self.script = list(script)
        self.given: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.waiting = asyncio.Event()
        self.submit, self.collect = _Method(self._submit), _Method(self._collect)
        self.incarnation, self.abort = _Method(self._incarnation), _Method(self.aborted.extend)

    async def _submit(self, client_id: str, requests: list[GenerationRequest]) -> None:
        self.given += requests
        self.waiting.set()

    async def _collect(self, client_id: str, linger_s: float) -> Collected:
        await self.waiting.wait()
        if not self.script:
            await asyncio.sleep(60)
        parts = self.script.pop(0)
        if isinstance(parts, asyncio.Event):
            await parts.wait()
            parts = self.script.pop(0)
        assert not isinstance(parts, asyncio.Event)
        if isinstance(parts, Exception):
            self.waiting.clear()
            raise parts
        await asyncio.sleep(0)
        chunks = [part for part in parts if isinstance(part, GenerationChunk)]
        results = [part for part in parts if isinstance(part, GenerationResult)]
        if results:
            self.waiting.clear()
        return Collected(ResultBatch(results), ChunkBatch(chunks))

    async def _incarnation(self) -> str:
        return "first"
