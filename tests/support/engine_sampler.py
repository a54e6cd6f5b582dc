"""A generation engine behind a gateway without a fleet between them."""

import asyncio
from collections.abc import AsyncGenerator

from areal_ray.core.turn import SampledTurn, TurnChunk, TurnEnd, TurnRequest
from areal_ray.engines.protocols import (
    GenerationChunk,
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    SamplingConfig,
)
from areal_ray.errors import EngineError, RequestRefused

Come = GenerationChunk | GenerationResult


class EngineSampler:
    """A `core.turn.TurnSampler` over one engine, for one event loop; starts the engine."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.requests: list[TurnRequest] = []
        self.results: dict[str, GenerationResult] = {}
        """What was sampled to the end: the engine's own log."""
        self._engine = engine
        self._queues: dict[str, asyncio.Queue[Come]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        engine.start(self._come, self._come)

    @property
    def num_running(self) -> int:
        """Turns under way."""
        return len(self._queues)

    async def sample(self, request: TurnRequest) -> SampledTurn:
        """See `TurnSampler`."""
        async for come in self._run(request, is_streamed=False):
            if isinstance(come, TurnEnd):
                return come.sampled
        raise AssertionError("an engine that gives no result")

    def stream(self, request: TurnRequest) -> AsyncGenerator[TurnChunk | TurnEnd, None]:
        """See `TurnSampler`."""
        return self._run(request, is_streamed=True)

    async def _run(
        self, request: TurnRequest, *, is_streamed: bool
    ) -> AsyncGenerator[TurnChunk | TurnEnd, None]:
        self._loop = asyncio.get_running_loop()
        self.requests.append(request)
        queue = self._queues[request.request_id] = asyncio.Queue()
        sampling = SamplingConfig(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            max_new_tokens=request.max_new_tokens,
            stop=request.stop,
        )
        name, prompt = request.request_id, request.prompt_ids
        asked = GenerationRequest(
            name,
            prompt,
            sampling,
            request.seed,
            is_streamed=is_streamed,
            grammar=request.grammar,
            top_logprobs=request.top_logprobs,
        )
        self._engine.submit([asked])
        try:
            while isinstance(come := await queue.get(), GenerationChunk):
                yield come
            if come.error:
                raise (RequestRefused if come.is_refused else EngineError)(come.error)
            self.results[name] = come
            yield TurnEnd(come)
        finally:
            del self._queues[name]
            self._engine.abort([name])

    def _come(self, step: list[GenerationChunk] | list[GenerationResult]) -> None:
        assert self._loop is not None
        for come in step:
            self._loop.call_soon_threadsafe(self._give, come)

    def _give(self, come: Come) -> None:
        if come.request_id in self._queues:
            self._queues[come.request_id].put_nowait(come)
