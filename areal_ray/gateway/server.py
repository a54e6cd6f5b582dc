"""The edge on a socket: uvicorn inside the event loop that is running already."""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from areal_ray.errors import ArealRayError
from areal_ray.gateway.http_parser import PlainParser

_START_S = 30.0
_MOST_HEAD_BYTES = 2**18
"""Of a request's line and headers: more is not even gathered."""
_BACKLOG = 4096


class GatewayServer:
    """Serves an ASGI application on one address.

    Args:
        app: From `app.make_app`.
        host: Loopback unless told otherwise; whoever reaches it may call.
        port: 0 = any that is free.
        grace_s: What calls are given to end when the server stops; then they are told so.
        head_s: Longest wait for all of a request's headers.
    """

    def __init__(
        self,
        app: Any,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        grace_s: float = 5.0,
        head_s: float = 30.0,
    ) -> None:
        self._host = host
        self._port = port
        self._config = uvicorn.Config(
            app,
            http=partial(_BoundedProtocol, head_s),  # type: ignore[arg-type]  # it is called
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=75,  # above what SDKs keep idle connections for
            timeout_graceful_shutdown=grace_s,  # type: ignore[arg-type]  # it takes fractions
            backlog=_BACKLOG,
        )
        self._server = _QuietServer(self._config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; returns the address, `http://HOST:PORT`.

        Raises:
            ArealRayError: The address cannot be had.
        """
        bound = self._bound()
        host, port = bound.getsockname()[:2]
        self._serving = asyncio.create_task(self._server.serve([bound]))
        async with asyncio.timeout(_START_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                await asyncio.sleep(0.005)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self, grace_s: float | None = None) -> None:
        """Take no more calls, let those that run end within the grace; then return.

        Args:
            grace_s: Another one than that of the constructor.
        """
        if self._serving is None:
            return
        if grace_s is not None:
            self._config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
        self._server.should_exit = True
        await self._serving
        self._serving = None

    def _bound(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # asyncio sends small pieces at once on sockets that say they are TCP alone.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((self._host, self._port))
        except OSError as error:
            bound.close()
            raise ArealRayError(
                f"gateway.port = {self._port}: {self._host} cannot be listened on: "
                f"{error.strerror or error}. Choose another, or 0 for any"
            ) from error
        return bound


class _BoundedProtocol(HttpToolsProtocol):
    """Gathers no headers without end, and waits for none without end."""

    _num_head_bytes: int | None = 0
    """Of the request that is coming; None once its headers are there."""
    _deadline: asyncio.TimerHandle | None = None

    def __init__(self, head_s: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = PlainParser(self)  # type: ignore[assignment]  # it stands in for it
        self._head_s = head_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, piece: bytes) -> None:
        """Hang up on a head that does not end."""
        super().data_received(piece)
        if self._num_head_bytes is None:
            return
        self._num_head_bytes += len(piece)
        if self._num_head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The headers do not end.")

    def on_message_begin(self) -> None:
        """Count anew."""
        self._num_head_bytes = 0
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Stop counting."""
        self._num_head_bytes = None
        self._end_wait()
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is whole, but for one that is told anew."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _await_head(self) -> None:
        self._end_wait()
        self._deadline = self.loop.call_later(self._head_s, self._hang_up)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _hang_up(self) -> None:
        """Not while an earlier request of the connection is being answered."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._await_head()


class _QuietServer(uvicorn.Server):
    """Leaves signals to whoever owns the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield
