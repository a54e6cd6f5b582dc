"""An OpenAI-compatible chat client that lives in the agent's own process.

Agents written for `openai.AsyncOpenAI` run on it unchanged:

    reply = await client.chat.completions.create(messages=[...], max_tokens=64)
    reply.choices[0].message.content

Behind it stand the recorder, which fixes the prompt's token ids, and a `sample` function, which
has a rollout replica sample the turn. Waits for: `sample`; bounded by the episode's time limit.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import Reply, SampledTurn, TurnRecorder

Sample = Callable[[NDArray[np.int32], int, int, tuple[str, ...]], Awaitable[SampledTurn]]
"""(prompt_ids [P], max_new_tokens, turn_id, stop) -> the sampled turn."""

_IGNORED = {"model", "user", "metadata", "store", "timeout"}
"""Options that change nothing about what is sampled."""
_REFUSAL_S = 0.5


class LimitReachedError(Exception):
    """A turn or token limit of the episode; agents need not catch it."""


@dataclass(frozen=True, slots=True)
class Function:
    """Name and JSON arguments of a tool call."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatToolCall:
    """A tool call in OpenAI's form."""

    id: str
    function: Function
    type: str = "function"


@dataclass(slots=True)
class ChatMessage:
    """An assistant message; may be put back into `messages` as it is."""

    content: str
    role: str = "assistant"
    tool_calls: list[ChatToolCall] | None = None

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The message as a mapping, as OpenAI's SDK names it."""
        calls = [asdict(call) for call in self.tool_calls] if self.tool_calls else None
        return {"content": self.content, "role": self.role, "tool_calls": calls}


@dataclass(slots=True)
class Choice:
    """The one sampled continuation."""

    message: ChatMessage
    finish_reason: str
    index: int = 0


@dataclass(slots=True)
class Usage:
    """Tokens of one call."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class ChatCompletion:
    """What `create` returns."""

    id: str
    choices: list[Choice]
    usage: Usage
    model: str = "policy"
    object: str = "chat.completion"
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """What the recipe allows an episode's model calls."""

    max_new_tokens: int
    """Of one turn; a smaller `max_tokens` of the agent's is honoured, a larger one clamped."""
    context_tokens: int
    """Prompt and sampled tokens together."""
    max_turns: int
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    """Texts that end every turn; an agent may add others."""


class ChatClient:
    """The policy as one episode sees it."""

    def __init__(self, recorder: TurnRecorder, sample: Sample, limits: ChatLimits) -> None:
        self.chat = _Chat(self)
        self.limits = limits
        self.limit_reached = ""
        """Which limit cut the episode short; empty if none did."""
        self.model_s = 0.0
        """Wall time spent waiting for the model."""
        self.num_turns = 0
        self.last_turn: int | None = None
        """The turn that the main agent was last answered in."""
        self._is_closed = False
        self._recorder = recorder
        self._sample = sample

    async def create(self, **options: Any) -> ChatCompletion:
        """Sample one assistant turn: messages, tools, stop, max_tokens or max_completion_tokens.

        Raises:
            LimitReachedError: No turn or no room in the context window is left.
            ValueError: A message or an option cannot be honoured.
        """
        reply, self.last_turn = await self.sample_turn(None, **options)
        return reply

    def sub_agent(self) -> "SubAgentClient":
        """The policy for a sub-agent that the main agent calls now."""
        return SubAgentClient(self, self.last_turn)

    async def sample_turn(
        self,
        called_by: int | None,
        *,
        messages: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        **options: Any,
    ) -> tuple[ChatCompletion, int]:
        """`create` for any agent of the episode; also the number of the turn.

        Args:
            called_by: Of a sub-agent, the turn that called it.
            messages: As of `create`; the others too.
        """
        if self._is_closed:
            await asyncio.sleep(_REFUSAL_S)  # who asks in a loop must not starve the others
            raise LimitReachedError("the episode is over")
        if options:
            self._refuse(options)
        wanted = self._wanted_tokens(max_tokens, max_completion_tokens)
        stops = self._stops(stop)
        if self.num_turns >= self.limits.max_turns:
            raise self._reached(f"agent.max_turns = {self.limits.max_turns}")
        turn = self._recorder.open_turn(messages, tools, called_by)
        room = self.limits.context_tokens - len(turn.prompt_ids)
        if room < 1:
            raise self._reached(
                f"prompt of {len(turn.prompt_ids)} tokens, context window "
                f"{self.limits.context_tokens}"
            )
        self.num_turns += 1
        started = time.monotonic()
        try:
            sampled = await self._sample(turn.prompt_ids, min(wanted, room), turn.turn_id, stops)
        finally:
            self.model_s += time.monotonic() - started
        reply = self._recorder.close_turn(turn, sampled, stops)
        usage = Usage(len(turn.prompt_ids), len(sampled.token_ids))
        choices = [Choice(_message(reply), _finish(sampled, reply))]
        return ChatCompletion(f"chatcmpl-{turn.turn_id}", choices, usage), turn.turn_id

    def close(self) -> None:
        """The episode is over: whatever its agent left running samples nothing more."""
        self._is_closed = True

    def _reached(self, limit: str) -> LimitReachedError:
        self.limit_reached = limit
        return LimitReachedError(limit)

    def _wanted_tokens(self, max_tokens: int | None, max_completion_tokens: int | None) -> int:
        if max_tokens is None and max_completion_tokens is None:
            return self.limits.max_new_tokens
        limits = {"max_tokens": max_tokens, "max_completion_tokens": max_completion_tokens}
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}; must be >= 1")
        given = [value for value in limits.values() if value is not None]
        return min([*given, self.limits.max_new_tokens])

    def _stops(self, stop: str | Sequence[str] | None) -> tuple[str, ...]:
        """The run's stop strings and the agent's; when a turn ends changes no token's log-prob."""
        if not stop:
            return self.limits.stop
        added = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in added):
            raise ValueError(f"stop = {stop!r}; must be a text or a list of texts, none empty")
        return tuple(dict.fromkeys((*self.limits.stop, *added)))

    def _refuse(self, options: Mapping[str, Any]) -> None:
        """Off-policy sampling would be silent: refuse what the record could not say."""
        settled: dict[str, Any] = {
            "temperature": self.limits.temperature,
            "top_p": self.limits.top_p,
            "presence_penalty": self.limits.presence_penalty,
            "frequency_penalty": self.limits.frequency_penalty,
            "logit_bias": self.limits.logit_bias,
            "n": 1,
            "stream": False,
            "tool_choice": "auto",
            "seed": None,
        }
        for name, value in options.items():
            if name in _IGNORED or value is None:
                continue
            if name not in settled:
                raise ValueError(f"{name}: this client does not support it. Leave it out")
            if value != settled[name]:
                raise ValueError(
                    f"{name} = {value!r}: the run samples with {settled[name]!r}. Leave it out, "
                    "or set it under rollout.sampling"
                )


class SubAgentClient:
    """The policy as a sub-agent sees it: limits and time are the episode's, its calls its own.

    Its trajectories name the branch that called it, which `objective.branch_discount` reads.
    """

    def __init__(self, client: ChatClient, called_by: int | None) -> None:
        self.chat = _Chat(self)
        self._client = client
        self._called_by = called_by
        self._last_turn: int | None = None

    async def create(self, **options: Any) -> ChatCompletion:
        """See `ChatClient.create`."""
        reply, self._last_turn = await self._client.sample_turn(self._called_by, **options)
        return reply

    def sub_agent(self) -> "SubAgentClient":
        """The policy for a sub-agent of this one."""
        last = self._called_by if self._last_turn is None else self._last_turn
        return SubAgentClient(self._client, last)


class _Chat:
    """`client.chat`."""

    def __init__(self, client: ChatClient | SubAgentClient) -> None:
        self.completions = _Completions(client)


class _Completions:
    """`client.chat.completions`."""

    def __init__(self, client: ChatClient | SubAgentClient) -> None:
        self.create = client.create


def _message(reply: Reply) -> ChatMessage:
    calls = [ChatToolCall(c.id, Function(c.name, c.arguments)) for c in reply.tool_calls]
    return ChatMessage(reply.text, tool_calls=calls or None)


def _finish(sampled: SampledTurn, reply: Reply) -> str:
    if reply.tool_calls and sampled.stop_reason is StopReason.STOP:
        return "tool_calls"
    return "length" if sampled.stop_reason is StopReason.ABORT else str(sampled.stop_reason)
