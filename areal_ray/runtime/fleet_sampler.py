"""The rollout fleet as the gateway samples from it."""

import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing

from areal_ray.core.turn import SampledTurn, SamplingWishes, TurnChunk, TurnEnd, TurnRequest
from areal_ray.engines.protocols import (
    LEAST_TEMPERATURE,
    GenerationChunk,
    GenerationRequest,
    SamplingConfig,
)
from areal_ray.runtime.rollout_client import RolloutClient

_KEPT_SAMPLINGS = 1024


class FleetSampler:
    """A `core.turn.TurnSampler` over a `RolloutClient`.

    Args:
        rollouts: Brings turns to the replicas.
        sampling: How turns are sampled that do not say it themselves.
    """

    def __init__(self, rollouts: RolloutClient, sampling: SamplingConfig) -> None:
        self._rollouts = rollouts
        self._sampling_of = functools.lru_cache(_KEPT_SAMPLINGS)(
            functools.partial(sampling_with, sampling)  # equal ones travel as one object
        )

    async def sample(self, request: TurnRequest) -> SampledTurn:
        """See `TurnSampler.sample`."""
        return await self._rollouts.generate(self._asked(request))

    async def stream(self, request: TurnRequest) -> AsyncGenerator[TurnChunk | TurnEnd, None]:
        """See `TurnSampler.stream`."""
        async with aclosing(self._rollouts.stream(self._asked(request))) as come:
            async for part in come:
                yield part if isinstance(part, GenerationChunk) else TurnEnd(part)

    def _asked(self, request: TurnRequest) -> GenerationRequest:
        return GenerationRequest(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            sampling=self._sampling_of(
                request.max_new_tokens,
                request.stop,
                request.temperature,
                request.top_p,
                request.wishes,
            ),
            seed=request.seed,
            prefix_key=request.prefix_key,
            grammar=request.grammar,
            top_logprobs=request.top_logprobs,
        )


def sampling_with(
    ours: SamplingConfig,
    max_new_tokens: int,
    stop: tuple[str, ...],
    temperature: float | None,
    top_p: float | None,
    wishes: SamplingWishes,
) -> SamplingConfig:
    """Ours, with what a client said. A temperature near 0 is taken for the least there is, at which
    no more is drawn than the likeliest token either; log-probs of a lower one overflow."""
    if temperature:
        temperature = max(temperature, LEAST_TEMPERATURE)
    said = {"temperature": temperature, "top_p": top_p}
    changed = {name: value for name, value in said.items() if value is not None} | wishes.given()
    return ours.model_copy(update={"max_new_tokens": max_new_tokens, "stop": stop, **changed})
