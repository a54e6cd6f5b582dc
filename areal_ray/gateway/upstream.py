"""Sessions that another provider serves: calls in any dialect, passed to its Chat Completions.

Clients choose among the providers of the recipe by name; where those are and the keys to them is
the recipe's and the environment's alone, and redirects are not followed.

Waits for: the provider, at most the time limit of a turn; a client that leaves ends it.
"""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from typing import Any

import aiohttp

from areal_ray.core.trajectory import StopReason
from areal_ray.gateway.call import (
    Call,
    CallError,
    CallEvent,
    CallOpening,
    CallReply,
    Choice,
    ChoiceEnd,
)
from areal_ray.gateway.door import SessionRecord
from areal_ray.gateway.load_dialects import told_message
from areal_ray.gateway.text_record import TextRecord
from areal_ray.gateway.upstream_chat import Gathered, chat_body
from areal_ray.gateway.upstream_config import UpstreamConfig

_CONNECT_S = 10.0
_RETRY_S = 2.0
_MOST_CHOICES = 16
_MOST_LINE_BYTES = 2**20
_MOST_REPLY_BYTES = 64 * 2**20
_MOST_TOLD = 500
_MOST_ERROR_BYTES = 2**16
_NO_REASON = "it gave no reason"
_OF_THE_CALL = {400: "invalid_value", 404: "not_found", 413: "body_too_large", 422: "invalid_value"}
"""Statuses that are about what the client asked for, and their codes."""


class Upstreams:
    """The providers of a recipe.

    Args:
        configs: By the name that sessions are started with.
        keys: Theirs by the same names; empty = none is sent.
        timeout_s: Longest reply.
    """

    def __init__(
        self, configs: Mapping[str, UpstreamConfig], keys: Mapping[str, str], *, timeout_s: float
    ) -> None:
        self._configs = configs
        self._keys = keys
        self._timeout_s = timeout_s
        self._client: aiohttp.ClientSession | None = None

    @property
    def names(self) -> Collection[str]:
        """Of all providers."""
        return self._configs.keys()

    def begin(self, call: Call, record: SessionRecord) -> "UpstreamAnswer":
        """A call of a session with `SessionRecord.texts`.

        Raises:
            CallError: 400, or 410 where the recipe has its provider no more.
        """
        if call.is_raw:
            message = "prompt: has no roles, which the provider of this session needs. Use messages"
            raise CallError(400, "invalid_value", message, param="prompt")
        if call.n > _MOST_CHOICES:
            message = f"n: is {call.n}; must be <= {_MOST_CHOICES}"
            raise CallError(400, "invalid_value", message, param="n")
        assert record.texts is not None
        if record.texts.upstream not in self._configs:
            message = (
                f"upstream {record.texts.upstream}: is not served any more. Start another session"
            )
            raise CallError(410, "session_over", message)
        return UpstreamAnswer(self, call, record, record.texts)

    def sent(self, name: str, call: Call) -> Any:
        """A request under way, as aiohttp's context manager of a response."""
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=_MOST_LINE_BYTES,
            )
        config, key = self._configs[name], self._keys.get(name, "")
        return self._client.post(
            f"{config.url}/chat/completions",
            json=chat_body(call, config.model, config.limit_field),
            headers={"authorization": f"Bearer {key}"} if key else {},
            allow_redirects=False,
        )

    def model(self, name: str) -> str:
        """What a provider calls its model."""
        return self._configs[name].model

    def told(self, name: str, text: str) -> str:
        """What a provider said, without its key and not too long."""
        key = self._keys.get(name, "")
        return (text.replace(key, "***") if key else text)[:_MOST_TOLD]

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None


class UpstreamAnswer:
    """One call at a provider; what `answer.Answer` is for the policy."""

    def __init__(
        self, upstreams: Upstreams, call: Call, record: SessionRecord, texts: TextRecord
    ) -> None:
        self._upstreams = upstreams
        self._call = call
        self._record = record
        self._texts, self._name = texts, texts.upstream
        self._gathered = [Gathered(index, wants_logprobs=call.logprobs) for index in range(call.n)]
        self._usage: Mapping[str, Any] = {}
        self._is_over = False
        self.opening = CallOpening(secrets.token_hex(16), int(time.time()), call.model, 0)
        self.reply: CallReply | None = None
        """The whole, once all has come."""

    async def whole(self) -> CallReply:
        """All of it.

        Raises:
            CallError: What the provider says of the call, or 503.
        """
        async for _ in self.events():
            pass
        assert self.reply is not None
        return self.reply

    async def events(self) -> AsyncGenerator[list[CallEvent], None]:
        """What comes, as it comes; `reply` is there after the last of it.

        Raises:
            CallError: What the provider says of the call, or 503.
        """
        try:
            async with self._upstreams.sent(self._name, self._call) as answer:
                if answer.status != 200:
                    raise await self._refusal(answer)
                async for line in _lines(answer.content):
                    if events := self._read(line):
                        yield events
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a time-out is an OSError
            raise self._failed(f"{type(error).__name__}: {error}") from error
        if any(one.stop_reason is StopReason.ABORT for one in self._gathered):
            raise self._failed("it broke off")
        choices = self._close("")
        yield [ChoiceEnd(index, choice) for index, choice in enumerate(choices)]

    def abandon(self, reason: str) -> None:
        """End it, if it is not over; what has come is kept."""
        for one in self._gathered if not self._is_over else ():
            one.stop_reason = StopReason.ABORT
        self._close(reason)

    def _read(self, line: bytes) -> list[CallEvent]:
        """What one line of the stream adds."""
        if not line.startswith(b"data:") or (text := line[5:].strip()) == b"[DONE]":
            return []
        chunk = json.loads(text)
        if not isinstance(chunk, dict):
            raise ValueError("a chunk is no object")
        if chunk.get("error"):
            raise self._failed(told_message(chunk) or _NO_REASON)
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        events: list[CallEvent] = []
        told = chunk.get("choices") or []
        if not isinstance(told, list) or not all(isinstance(choice, dict) for choice in told):
            raise ValueError("the choices of a chunk are no list of objects")
        for choice in told:
            index = choice.get("index", 0)
            if type(index) is not int or not 0 <= index < len(self._gathered):
                raise ValueError(f"a chunk is of choice {index}, which was not asked for")
            events += self._gathered[index].feed(choice)
        return events

    def _close(self, abort_reason: str) -> list[Choice]:
        """Record all choices, unless that was done."""
        if self._is_over:
            return []
        self._is_over = True
        num_sampled = _count(self._usage, "completion_tokens")
        details = self._usage.get("completion_tokens_details")
        num_reasoning = _count(details, "reasoning_tokens")
        num_prompt = _count(self._usage, "prompt_tokens")
        facts = {
            "model": self._upstreams.model(self._name),
            "num_prompt": num_prompt,
            "num_sampled": num_sampled,
            "abort_reason": abort_reason,
        }
        for one in self._gathered:
            said = one.message()
            turn_id = self._texts.add(self._call.messages, said, one.stop_reason, facts)
            self._record.turn_over(turn_id, self.opening.id)
        # It counts the choices together.
        choices = [
            one.choice(0 if one.index else num_sampled, 0 if one.index else num_reasoning)
            for one in self._gathered
        ]
        self.reply = CallReply(
            self.opening.id,
            self.opening.created_s,
            self.opening.model,
            tuple(choices),
            num_prompt,
            _count(self._usage.get("prompt_tokens_details"), "cached_tokens"),
        )
        return choices

    async def _refusal(self, answer: aiohttp.ClientResponse) -> CallError:
        """What an answer that is no stream means for the client."""
        status = answer.status
        if status in (401, 403):
            return self._failed(f"it does not take our key ({status}). Tell who runs this server")
        try:
            body = json.loads(await answer.content.read(_MOST_ERROR_BYTES))
            told = told_message(body) or _NO_REASON
        except ValueError:
            told = f"status {status}"
        if status in _OF_THE_CALL:
            message = self._upstreams.told(self._name, f"upstream {self._name}: {told}")
            return CallError(status, _OF_THE_CALL[status], message)
        if status == 429:
            wait = answer.headers.get("retry-after", "")
            wait_s = float(wait) if wait.isdecimal() else _RETRY_S
            message = self._upstreams.told(self._name, f"upstream {self._name}: {told}")
            return CallError(429, "rate_limit_exceeded", message, retry_after_s=wait_s)
        return self._failed(f"{told} ({status})")

    def _failed(self, told: str) -> CallError:
        message = self._upstreams.told(self._name, f"upstream {self._name}: {told}")
        return CallError(503, "upstream_error", message, retry_after_s=_RETRY_S)


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """The lines of a stream.

    Raises:
        ValueError: One of them, or all, are too long.
    """
    num_bytes = 0
    async for line in content:
        num_bytes += len(line)
        if num_bytes > _MOST_REPLY_BYTES:
            raise ValueError(f"its reply has more than {_MOST_REPLY_BYTES} bytes")
        yield line


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else 0
    return value if type(value) is int and value >= 0 else 0
