"""One model call as the agent side sees it: prompt in, sampled tokens out, reply read back.

These are the nouns that the chat client (agents) and the recorder (gateway) share; the engines'
`GenerationResult` satisfies `SampledTurn` as it stands.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens at each of N places of a turn, whatever was sampled there."""

    token_ids: NDArray[np.int32]
    """[N, k] the likeliest first."""
    logprobs: NDArray[np.float32]
    """[N, k] of the distribution that the sampled ids' are of."""

    def part(self, start: int, end: int | None = None) -> "TopTokens":
        """Those of places start..end-1; to the last where no end is given."""
        return TopTokens(self.token_ids[start:end], self.logprobs[start:end])


def joined_tops(parts: Sequence[TopTokens | None]) -> TopTokens | None:
    """Those of pieces of one turn, end to end; None where a piece has none."""
    told = [part for part in parts if part is not None]
    if not told or len(told) < len(parts):
        return None
    return TopTokens(
        np.concatenate([part.token_ids for part in told]),
        np.concatenate([part.logprobs for part in told]),
    )


class SampledTurn(Protocol):
    """What an engine reports of one turn; the arrays have the same length N."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[N] sampled ids; the stop token, or the one that completes a stop string, included."""

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """[N] log-prob of each sampled id at the sampling temperature."""

    @property
    def versions(self) -> NDArray[np.int32]:
        """[N] version of the weights that sampled each id."""

    @property
    def stop_reason(self) -> StopReason:
        """Why sampling stopped."""

    @property
    def top(self) -> TopTokens | None:
        """[N] what was likeliest at each; None where nobody asked or the engine does not tell."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One function the model asked for."""

    id: str
    name: str
    arguments: str
    """JSON text, as on OpenAI's wire; as sampled where that is JSON."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said in one turn, read back from its tokens."""

    text: str
    """Without stop and padding tokens, up to a stop string; reasoning and tool calls removed."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    """What the model thought before it spoke, where its template tells the two apart."""


@dataclass(frozen=True, slots=True)
class PromptedTurn:
    """A turn whose prompt is fixed and whose tokens are not sampled yet."""

    turn_id: int
    """Index of the model call in its episode."""
    prompt_ids: NDArray[np.int32]
    """[P]"""
    handle: str = ""
    """Names the turn to clients: 20 hexadecimal digits, unique for ever; "" in process."""


class TurnRecorder(Protocol):
    """Keeps the token-exact record of one episode."""

    def open_turn(
        self,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        called_by: int | None = None,
    ) -> PromptedTurn:
        """The prompt for this conversation, built from recorded ids where it continues one.

        Args:
            messages: The whole conversation.
            tools: What the model may call.
            called_by: Of a sub-agent, `turn_id` of the closed turn that called it.
        """

    def close_turn(
        self, turn: PromptedTurn, sampled: SampledTurn, stop: Sequence[str] = ()
    ) -> Reply:
        """Record what was sampled for `turn` and read it back, up to a stop string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingWishes:
    """What a client wants of the sampling of a turn beside temperature and top_p; None = the run's.

    For serving without training alone, like these two.
    """

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[str, float], ...] | None = None
    """Token ids as text, each with what is added to its logit."""

    def given(self) -> dict[str, Any]:
        """Those that are no None, by the names of `SamplingConfig`."""
        told = {one.name: getattr(self, one.name) for one in fields(self)}
        found = {name: value for name, value in told.items() if value is not None}
        return found | ({"logit_bias": dict(self.logit_bias)} if self.logit_bias else {})


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn to sample, for a `TurnSampler`."""

    request_id: str
    """Unique for ever; what a retry of the same turn is known by."""
    prompt_ids: NDArray[np.int32]
    """[P]"""
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    seed: int = 0
    prefix_key: str = ""
    """Turns with the same non-empty key begin alike."""
    temperature: float | None = None
    """None = the run's; so with top_p. Others are for serving without training alone."""
    top_p: float | None = None
    wishes: SamplingWishes = SamplingWishes()
    grammar: str = ""
    """What its text is held to, see `core.grammars`; empty = nothing."""
    top_logprobs: int = 0
    """How many of the likeliest tokens are told beside each sampled one."""


class TurnChunk(Protocol):
    """What a streamed turn sampled since its last chunk; arrays of the same length N >= 1."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[N]"""

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """[N]"""

    @property
    def versions(self) -> NDArray[np.int32]:
        """[N]"""

    @property
    def top(self) -> TopTokens | None:
        """[N] see `SampledTurn.top`."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The last thing of a streamed turn: all of it."""

    sampled: SampledTurn


class TurnSampler(Protocol):
    """Samples turns for the gateway: the rollout fleet, or a script in tests.

    Raises:
        ArealRayError: The turn cannot be sampled; the message names it.
    """

    async def sample(self, request: TurnRequest) -> SampledTurn:
        """The whole turn. Cancelling the call aborts it."""

    def stream(self, request: TurnRequest) -> AsyncGenerator[TurnChunk | TurnEnd, None]:
        """The turn as it is sampled; `TurnEnd` last. Closing the generator aborts it."""
