"""Providers of models for a gateway's upstreams: our own server, and ones that misbehave."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TypeVar

T = TypeVar("T")

_PATIENCE_S = 60.0


@asynccontextmanager
async def answering(reply: bytes) -> AsyncGenerator[str, None]:
    """A provider that says the same to all, and hangs up."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def stream_of(*chunks: bytes) -> bytes:
    """An event stream of these data."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    return head + b"".join(b"data: " + chunk + b"\n\n" for chunk in chunks)


def refusal(status: str, message: str, *headers: str) -> bytes:
    """A whole answer that is an error."""
    body = json.dumps({"error": {"message": message}})
    head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", body]
    return "\r\n".join(head).encode()


@contextmanager
def beside(context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """What an asynchronous context gives, on a loop of its own beside the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def wait(work: "object") -> T:
        made: T = asyncio.run_coroutine_threadsafe(work, loop).result(_PATIENCE_S)  # type: ignore[arg-type]
        return made

    try:
        given = wait(context.__aenter__())
        try:
            yield given
        finally:
            wait(context.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_PATIENCE_S)
        loop.close()
