"""One model call in no dialect: what requests are read into and replies are written from.

A dialect (`gateway/openai_chat.py`, ...) turns a request body into a `Call`, and a `CallReply` or a
stream of `CallEvent`s into its own JSON. Between them `gateway/answer.py` renders the prompt,
samples, and records. So no dialect knows tokens, and nothing else knows a dialect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_ray.core.trajectory import StopReason
from areal_ray.core.turn import SamplingWishes
from areal_ray.gateway.messages import RAW


@dataclass(frozen=True, slots=True)
class CallHints:
    """What a client says of a call beside its content: it labels calls, it changes no token."""

    headers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case names; never the key."""
    user: str = ""
    """The dialect's own field for it: user, metadata.user_id, prompt_cache_key."""
    previous_response_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One model call, as a dialect reads it."""

    model: str
    """As the client names it; echoed."""
    messages: Sequence[Mapping[str, Any]]
    """Canonical (`gateway.messages.canonical`): role, content (text), tool_calls, tool_call_id,
    name, reasoning (text), handle (what we gave the client to name a recorded turn by). One of the
    role `raw` is a prompt as it stands, in no template; its reply is text alone."""
    places: tuple[str, ...] = ()
    """Where in the body each message stands, for refusals; empty = `messages[0]` and so on."""
    tools: Sequence[Mapping[str, Any]] = ()
    """OpenAI's `{"type": "function", "function": {name, description, parameters}}`."""
    tool_choice: str = "auto"
    """auto, none, required, or the name of a tool."""
    parallel_tool_calls: bool = True
    max_tokens: int | None = None
    """Tokens to sample at most; None = what the run allows."""
    stop: tuple[str, ...] = ()
    n: int = 1
    seed: int | None = None
    temperature: float | None = None
    """None = the run's."""
    top_p: float | None = None
    wishes: SamplingWishes = SamplingWishes()  # noqa: RUF009 (frozen)
    unserved: tuple[str, ...] = ()
    """Fields that ask for what no engine here does."""
    passed_on: Mapping[str, Any] = field(default_factory=dict)
    """What another provider is told beside all this, by its names in Chat Completions."""
    logprobs: bool = False
    top_logprobs: int = 0
    """With `logprobs`: how many of the likeliest tokens are told at each place."""
    json_schema: Mapping[str, Any] | None = None
    """The reply has to be JSON of this schema; {} = any object."""
    is_strict: bool = False
    """Whether the client has to be refused where that cannot be kept; else it is tried."""
    schema_field: str = ""
    """Where the dialect has the schema, for messages."""
    strict_tools: frozenset[str] = frozenset()
    """Names of tools whose calls have to fit their schemas."""
    grammar: str = ""
    """What the reply is held to, as `gateway.structured` writes it; empty = nothing."""
    stream: bool = False
    include_usage: bool = False
    """Chat alone: a last chunk with the usage."""
    hints: CallHints = field(default_factory=CallHints)
    is_stored: bool = False
    """Whether a later call may go on from the reply by naming it."""
    num_instructions: int = 0
    """How many of the first messages hold for this call alone, not for one that goes on from it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the dialect has to echo and nothing else reads."""

    @property
    def is_raw(self) -> bool:
        """Whether it is a prompt as it stands."""
        return len(self.messages) == 1 and self.messages[0]["role"] == RAW


@dataclass(frozen=True, slots=True)
class CalledTool:
    """A tool call as the client is shown it."""

    id: str
    """`call` and letters or digits alone, under 40 characters; unique for ever."""
    name: str
    arguments: str
    """JSON text, as sampled where it is JSON."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, where the client asked for log-probs."""

    text: str
    logprob: float
    raw: bytes
    """Of half a character, too, which `text` cannot show."""
    top: "tuple[TokenLogprob, ...]" = ()
    """Of a sampled one: the likeliest in its place, the likeliest first; empty if unknown."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole sampled continuation."""

    text: str
    """Without reasoning, tool calls and the stop string."""
    reasoning: str = ""
    tool_calls: tuple[CalledTool, ...] = ()
    stop_reason: StopReason = StopReason.STOP
    """STOP, LENGTH, TOOL_CALLS, or ABORT where the engine gave up."""
    stop_text: str = ""
    """The stop string that ended it; empty if none did."""
    handle: str = ""
    """Names the recorded turn; travels in reasoning signatures and encrypted content."""
    logprobs: tuple[TokenLogprob, ...] = ()
    num_tokens: int = 0
    """Sampled, those of reasoning included."""
    num_reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CallReply:
    """The whole answer to a call."""

    id: str
    """Letters and digits alone, unique for ever; a dialect puts its prefix before it."""
    created_s: int
    """Seconds since the epoch."""
    model: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_cached_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Sampled, over all choices."""
        return sum(choice.num_tokens for choice in self.choices)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of a choice's reasoning."""

    choice: int
    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of a choice's text."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A tool call begins (`name` is given) or goes on."""

    choice: int
    index: int
    """Of the call among the choice's calls."""
    id: str
    name: str = ""
    arguments: str = ""
    """More of the JSON text."""
    is_unfinished: bool = False
    """It was no call after all, and nothing more comes of it: see `pieces.CallPiece`."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """A choice is whole; what was streamed, end to end, is what it holds."""

    choice: int
    whole: Choice


CallEvent = ReasoningDelta | TextDelta | ToolCallDelta | ChoiceEnd


@dataclass(frozen=True, slots=True)
class CallOpening:
    """What is known of a streamed reply before its first token."""

    id: str
    created_s: int
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    handle: str = ""
    """Of the first choice, as `Choice.handle`."""


class CallError(Exception):
    """A call that cannot be served, told in the dialect's own shape.

    Args:
        status: HTTP status.
        code: OpenAI's error code, such as `context_length_exceeded`; a dialect maps it.
        message: *where: what is, what must be. What to do.* No secret in it.
        param: The field at fault.
        retry_after_s: Of 429 and 503.
        allow: Of 405: the methods that there are.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str = "",
        retry_after_s: float | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.allow = allow


class StreamWriter(Protocol):
    """Writes one streamed reply; each method returns the bytes to send (may be empty)."""

    def begin(self, opening: CallOpening) -> bytes:
        """Once the prompt is fixed."""

    def write(self, event: CallEvent) -> bytes:
        """One event after the other, choices in any order."""

    def end(self, reply: CallReply) -> bytes:
        """The last bytes."""

    def fail(self, error: CallError) -> bytes:
        """The last bytes of a reply that broke after its headers were sent."""

    def keep_alive(self) -> bytes:
        """Shows that the server lives; may come before `begin`."""


class Dialect(Protocol):
    """A wire format. Stateless."""

    name: str
    """chat, completions, responses or messages."""
    paths: tuple[str, ...]
    """Of POST requests, without a `/v1` before them."""

    def read(self, body: Mapping[str, Any], hints: CallHints) -> Call:
        """The call in a request body; unknown fields are passed over.

        Raises:
            CallError: 400, with the field at fault.
        """

    def write(self, call: Call, reply: CallReply) -> dict[str, Any]:
        """The body of a reply that is not streamed."""

    def writer(self, call: Call) -> StreamWriter:
        """For a streamed reply."""

    def error(self, error: CallError) -> dict[str, Any]:
        """The body of an error."""
