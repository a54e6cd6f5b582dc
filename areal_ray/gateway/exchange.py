"""One HTTP request and its answer, on bare ASGI: what FastAPI adds costs more than the answer.

A client that goes away cancels what is done for it: work inside `async with exchange.watched()`
ends with `ClientGone` then.

body() waits for: the client, at most `body_idle_s` for each piece. write() waits for: the client to
take what was sent before, at most `stalled_reader_s`.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any

from areal_ray.gateway.call import CallError
from areal_ray.gateway.limits import EdgeLimits, body_too_large

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]
_TOO_LATE, _TOO_LARGE = 408, 413
_LINGER_S = 1.0
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
"""Kept: `json.dumps` makes one each time."""
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))
_SECRET_HEADERS = {"authorization", "x-api-key", "api-key", "cookie", "proxy-authorization"}


class ClientGone(Exception):
    """The client closed its connection, or takes nothing any more."""


class Exchange:
    """A request that is being answered.

    Args:
        scope: ASGI's, of type http.
        receive: ASGI's.
        send: ASGI's.
        limits: What it is held to.
    """

    def __init__(
        self, scope: Mapping[str, Any], receive: Receive, send: Send, limits: EdgeLimits
    ) -> None:
        self._receive = receive
        self._send = send
        self._limits = limits
        self._has_begun = False
        self.raw_headers: Headers = scope["headers"]
        self._headers = {
            name.decode("latin-1"): text.decode("latin-1") for name, text in scope["headers"]
        }
        self._has_body_left = True

    @classmethod
    def of_route(cls, scope: Mapping[str, Any], receive: Receive, limits: EdgeLimits) -> "Exchange":
        """To read a request with, whose answer its FastAPI route sends by itself."""
        return cls(scope, receive, _nowhere, limits)

    @property
    def has_begun(self) -> bool:
        """Whether a status was sent."""
        return self._has_begun

    @property
    def encoding(self) -> str:
        """Of the body, as its header says."""
        return self._headers.get("content-encoding", "")

    def key(self) -> str:
        """As the client sent it, whichever header its SDK uses; empty if it sent none."""
        bearer = self._headers.get("authorization", "")
        scheme, _, key = bearer.partition(" ")
        found = key if scheme.lower() == "bearer" else ""
        return (found or self._headers.get("x-api-key", "")).strip()

    def open_headers(self) -> dict[str, str]:
        """What a client says beside its secrets."""
        return {name: text for name, text in self._headers.items() if name not in _SECRET_HEADERS}

    async def body(self) -> bytes:
        """The body as sent.

        Raises:
            CallError: 408 or 413.
            ClientGone: It left before all was sent.
        """
        declared = self._headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._limits.body_bytes:
            raise body_too_large(self._limits)
        taken = bytearray()
        ends_at = time.monotonic() + self._limits.body_s
        while self._has_body_left:
            rest_s = min(self._limits.body_idle_s, ends_at - time.monotonic())
            try:
                async with asyncio.timeout(rest_s):
                    message = await self._receive()
            except TimeoutError:
                raise CallError(
                    408,
                    "request_timeout",
                    f"body: is not whole after {self._limits.body_s:g} s, or nothing more of it "
                    f"came for {self._limits.body_idle_s:g} s. Send it again",
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            taken += message.get("body", b"")
            if len(taken) > self._limits.body_bytes:
                raise body_too_large(self._limits)
            self._has_body_left = message.get("more_body", False)
        return bytes(taken)

    async def answer(
        self,
        status: int,
        content: Any,
        headers: Sequence[tuple[bytes, bytes]] = (),
        *,
        is_last: bool = True,
    ) -> None:
        """Send a whole answer as JSON, bytes as they are; `end_stream` ends it where this is not
        the last of it."""
        text = content if type(content) is bytes else json_bytes(content)
        self._has_begun = True
        shown = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(text)),
            *headers,
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": shown})
        await self._send({"type": "http.response.body", "body": text, "more_body": not is_last})

    async def refuse(self, error: CallError, content: Any) -> None:
        """Send an error, `content` being its body in the dialect's shape."""
        headers = [(name.encode(), text.encode()) for name, text in error_headers(error).items()]
        await self.answer(error.status, content, headers, is_last=error.status != _TOO_LARGE)
        if error.status == _TOO_LARGE:
            await self._linger()
            await self.end_stream(b"")

    async def _linger(self) -> None:
        """Take in what a client sends before it looks at its answer, for a moment: closed amid
        that, its connection would break before it has read it."""
        if "expect" in self._headers:  # it asks before it sends
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while self._has_body_left:
                    message = await self._receive()
                    self._has_body_left = message.get("more_body", False)

    async def begin_stream(self, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Send the status and headers of a stream of events, at once."""
        self._has_begun = True
        start = {"type": "http.response.start", "status": 200}
        await self._send({**start, "headers": [*_STREAM_HEADERS, *headers]})

    async def write(self, piece: bytes) -> None:
        """Send more of a stream."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end_stream(self, piece: bytes) -> None:
        """Send the last of a stream."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": False})

    def watched(self, keep_alive: Callable[[], bytes] | None = None) -> "Watch":
        """Ends the work inside when the client goes; the body has to be read before.

        Args:
            keep_alive: Of a stream: what to send when nothing was sent for `keep_alive_s`.
        """
        return Watch(self, self._receive, self._limits, keep_alive)


class Watch:
    """Waits beside the work for the client to go, and shows it that the server lives."""

    def __init__(
        self,
        exchange: Exchange,
        receive: Receive,
        limits: EdgeLimits,
        keep_alive: Callable[[], bytes] | None,
    ) -> None:
        self._exchange = exchange
        self._receive = receive
        self._limits = limits
        self._keep_alive = keep_alive
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.is_gone = False
        """Whether the client left."""
        self._last_sent = time.monotonic()
        self._sending_since: float | None = None

    async def __aenter__(self) -> "Watch":
        self._task = asyncio.current_task()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._watcher is not None
        assert self._task is not None
        self._watcher.cancel()
        if not self.is_gone:
            return
        if not isinstance(error, asyncio.CancelledError):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)  # the watcher's cancellation is still on its way
        if self._task.uncancel() == 0:
            raise ClientGone from None

    async def send(self, piece: bytes) -> None:
        """Write to the stream, and note that it lives."""
        self._sending_since = time.monotonic()
        await self._exchange.write(piece)
        self._last_sent = time.monotonic()
        self._sending_since = None

    async def _watch(self) -> None:
        try:
            while not await self._has_left():
                await self._show_life()
        except TimeoutError:  # it takes not even a keep-alive
            pass
        self.is_gone = True
        assert self._task is not None
        self._task.cancel()

    async def _has_left(self) -> bool:
        try:
            async with asyncio.timeout(self._pause_s()):
                while (await self._receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return False
        return True

    def _pause_s(self) -> float | None:
        if self._keep_alive is None:
            return None
        idle_s = time.monotonic() - self._last_sent
        return max(self._limits.keep_alive_s - idle_s, self._limits.keep_alive_s / 4)

    async def _show_life(self) -> None:
        now = time.monotonic()
        if self._sending_since is not None:
            if now - self._sending_since > self._limits.stalled_reader_s:
                raise TimeoutError
        elif now - self._last_sent >= self._limits.keep_alive_s and self._keep_alive is not None:
            async with asyncio.timeout(self._limits.stalled_reader_s):
                await self._exchange.write(self._keep_alive())
            self._last_sent = now


async def _nowhere(_: Message) -> None:
    """Nothing is sent here."""


def retry_headers(error: CallError) -> dict[str, str]:
    """The headers that tell a client when to ask again, where that helps."""
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


def error_headers(error: CallError) -> dict[str, str]:
    """Of an answer that is an error. What still comes of a body that was not read to its end is no
    further request, and nobody reads it: the connection ends with the answer."""
    closing = {"connection": "close"} if error.status in (_TOO_LATE, _TOO_LARGE) else {}
    allow = {"allow": error.allow} if error.allow else {}
    return retry_headers(error) | closing | allow


def json_bytes(content: Any) -> bytes:
    """Compact JSON in UTF-8, on one line."""
    return one_line(_ENCODER.encode(content)).encode()


def one_line(text: str) -> str:
    """JSON that is one line to every client: some, as those on httpx's `iter_lines`, end lines of
    a stream also where Unicode does, amid an event."""
    if not text.isascii():
        for mark, escaped in _LINE_ENDS:
            text = text.replace(mark, escaped)
    return text
