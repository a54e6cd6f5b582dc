"""A reply streamed as server-sent events: headers at once, then tokens as they are sampled."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from areal_ray.gateway.answer import Answer
from areal_ray.gateway.call import CallError, CallReply, StreamWriter
from areal_ray.gateway.door import SessionRecord, time_is_up
from areal_ray.gateway.exchange import Exchange
from areal_ray.gateway.upstream import UpstreamAnswer

SHUTTING_DOWN = CallError(
    503, "shutting_down", "the server is stopping. Send the call again", retry_after_s=2
)


async def send_stream(
    exchange: Exchange,
    writer: StreamWriter,
    answer: Answer | UpstreamAnswer,
    on_reply: Callable[[CallReply], None],
    record: SessionRecord,
) -> None:
    """Stream an answer; every error after the headers is told in the stream.

    One write for each chunk of the sampler's. A client that reads slowly holds up its own stream
    alone. `on_reply` is called with the whole before the last bytes leave; `record` is that of the
    call's session, whose time may end amid the stream.

    Raises:
        ClientGone: The client left; what was being sampled is aborted.
        CallError: What broke the stream off; the client was told.
    """
    await exchange.begin_stream([(b"x-request-id", answer.opening.id.encode())])
    failure: CallError | None = None
    async with exchange.watched(writer.keep_alive) as client:
        try:
            begun = writer.begin(answer.opening)
            if begun:
                await client.send(begun)
            async with aclosing(answer.events()) as batches:
                async for events in batches:
                    piece = b"".join(map(writer.write, events))
                    if piece:
                        await client.send(piece)
        except CallError as error:
            failure = error
        except asyncio.CancelledError:
            if client.is_gone:
                raise
            failure = time_is_up(record) if record.is_late() else SHUTTING_DOWN
    if failure is not None:
        await exchange.end_stream(writer.fail(failure))
        raise failure
    assert answer.reply is not None
    on_reply(answer.reply)
    await exchange.end_stream(writer.end(answer.reply))
