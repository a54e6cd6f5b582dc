"""The edge against rude clients: those that leave, stall, flood, or speak no HTTP to speak of."""

import asyncio
import contextlib
import gzip
import json
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest

from areal_ray.gateway.answer import CallLimits
from areal_ray.gateway.app import make_app
from areal_ray.gateway.limits import EdgeLimits
from areal_ray.gateway.server import GatewayServer
from tests.support.gateway import Gateway, make_gateway, serving
from tests.support.scripted_sampler import Said

HELLO = [{"role": "user", "content": "What is 12 plus 30?"}]
BODY = {"model": "m", "messages": HELLO}
CHAT = "/v1/chat/completions"
ENDLESS = Said("and so on " * 40, pause_s=0.01, hangs=True)


def run(script: Any, test: Callable[[Gateway], Awaitable[None]], **options: Any) -> None:
    """Serve the script and let the test at it."""

    async def go() -> None:
        async with asyncio.timeout(90), serving(script, **options) as gateway:
            await test(gateway)

    asyncio.run(go())


async def connect(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection."""
    host, port = gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def raw(body: Any, *, more: str = "") -> bytes:
    """A request as bytes."""
    text = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(text)}\r\n{more}\r\n"
    return head.encode() + text


def trained(gateway: Gateway) -> int:
    """Tokens of calls without a session that train."""
    fields = {"task_id": "t", "group_id": "g", "episode_id": "e"}
    return sum(int(t.loss_mask.sum()) for t in gateway.recorder.trajectories(**fields))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_has_its_generation_aborted_and_nothing_of_it_trained(stream):
    async def test(gateway: Gateway) -> None:
        reader, writer = await connect(gateway)
        writer.write(raw({**BODY, "stream": stream}))
        if stream:
            while b"and" not in await reader.readuntil(b"\n\n"):
                pass
        else:
            async with asyncio.timeout(10):
                while not gateway.sampler.num_running:
                    await asyncio.sleep(0.01)
        writer.close()
        await gateway.until_idle()
        assert len(gateway.sampler.aborted) == 1
        assert gateway.service.counts.num_gone == 1
        assert trained(gateway) == 0

    run([ENDLESS], test)


def test_a_storm_of_time_outs_leaves_one_turn_and_no_slot_taken():
    async def test(gateway: Gateway) -> None:
        async with gateway.client(max_retries=2, timeout=1.0) as client:
            reply = await client.chat.completions.create(model="m", messages=HELLO)
        assert reply.choices[0].message.content == "at last"
        await gateway.until_idle()
        assert len(gateway.sampler.aborted) == 2
        (answered,) = gateway.sampler.sampled.values()
        assert trained(gateway) == len(answered.token_ids)

    run([Said(hangs=True), Said(hangs=True), Said("at last")], test)


def test_a_silent_stream_shows_that_it_lives_and_is_sampled_once():
    async def test(gateway: Gateway) -> None:
        async with gateway.client(timeout=2.0) as client:  # for each read
            stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(texts) == "hi"
        assert len(gateway.sampler.requests) == 1
        async with aiohttp.ClientSession() as session:
            body = {**BODY, "stream": True}
            async with session.post(gateway.url + CHAT, json=body) as response:
                assert (await response.text()).count(": keep-alive\n\n") >= 5

    run([Said("hi", pause_s=3.0, chunk_tokens=9)], test, edge=EdgeLimits(keep_alive_s=0.2))


def test_headers_of_a_stream_come_before_its_first_token():
    async def test(gateway: Gateway) -> None:
        reader, writer = await connect(gateway)
        writer.write(raw({**BODY, "stream": True}))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert gateway.sampler.num_running == 1
        writer.close()
        await gateway.until_idle()

    run([Said(hangs=True)], test)


def test_a_reader_that_stalls_holds_up_nobody_and_is_given_up():
    async def test(gateway: Gateway) -> None:
        host, port = gateway.url.removeprefix("http://").split(":")
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect((host, int(port)))
        # More than the sockets between the two take: some 12 MB.
        stalled.sendall(raw({**BODY, "n": 2, "stream": True, "logprobs": True, "top_logprobs": 1}))
        for _ in range(20):
            async with gateway.client() as client:
                await client.chat.completions.create(model="m", messages=HELLO, max_tokens=1)
        await gateway.until_idle()
        assert gateway.service.counts.num_gone == 1
        stalled.close()

    run(
        [Said("and so on " * 4000, chunk_tokens=64)],
        test,
        limits=CallLimits(20_000, 40_000),
        edge=EdgeLimits(keep_alive_s=0.4, stalled_reader_s=0.5),
    )


def test_a_client_that_stops_in_the_middle_of_its_body_is_told_so():
    async def test(gateway: Gateway) -> None:
        reader, writer = await connect(gateway)
        writer.write(raw(BODY)[:-5])
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 408 " in head
        writer.close()
        _, writer = await connect(gateway)
        writer.write(raw(BODY)[:-5])
        await asyncio.sleep(0.1)
        writer.close()
        await gateway.until_idle()
        assert not gateway.sampler.requests

    run([Said("hi")], test, edge=EdgeLimits(body_idle_s=0.5))


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CHAT, b"{", 400),
        ("POST", CHAT, b'{"messages": "\xff"}', 400),
        ("POST", CHAT, b"[" * 10_000, 400),
        ("POST", CHAT, b'{"messages": ' + b"[" * 9000 + b"]" * 9000 + b"}", 400),
        ("POST", CHAT, json.dumps({"messages": HELLO * 100_000}).encode(), 400),
        ("POST", CHAT, b" " * 10_000_001, 413),
        ("GET", CHAT, b"", 405),
        ("PUT", "/v1/models", b"", 405),
        ("POST", "/v1/nothing", b"{}", 404),
        ("POST", "/api/show", b"{}", 404),
        ("GET", "/s/x/nothing", b"", 404),
        ("GET", "/../etc/passwd", b"", 404),
        ("DELETE", "/health", b"", 405),
    ],
)
def test_what_cannot_be_answered_is_a_4xx_with_an_error_object(method, path, body, status):
    async def test(gateway: Gateway) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.request(method, gateway.url + path, data=body) as response:
                assert response.status == status
                error = (await response.json())["error"]
            assert {"message", "type", "param", "code"} == set(error)
            if status in (404, 405):  # says where, and what there is
                assert response.url.path in error["message"] or "must be" in error["message"]
            async with session.post(gateway.url + CHAT, json=BODY) as response:
                assert response.status == 200

    run([Said("hi")], test, edge=EdgeLimits(body_bytes=10_000_000))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("HEAD", "/"), ("GET", "/"), ("HEAD", "/api/hello"), ("GET", "/api/v1/models")),
        *(("GET", "/s/a"), ("HEAD", "/s/a/"), ("GET", "/models"), ("GET", "/v1/models?limit=9")),
        *(("GET", "/health"), ("GET", "/v1/models/"), ("GET", "/v1")),
    ],
)
def test_probes_without_a_key_are_answered(method, path):
    async def test(gateway: Gateway) -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, gateway.url + path) as response,
        ):
            assert response.status == 200
            assert method == "HEAD" or await response.json()

    run([Said("hi")], test)


def test_a_body_of_a_gigabyte_is_refused_before_it_is_sent_and_headers_without_end_too():
    async def test(gateway: Gateway) -> None:
        reader, writer = await connect(gateway)
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {2**30}\r\n\r\n".encode())
        assert b" 413 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        reader, writer = await connect(gateway)
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n")
        assert b" 431 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        for piece in (b"y" * 1000, b"y: z\r\n" * 200):
            reader, writer = await connect(gateway)
            writer.write(b"GET / HTTP/1.1\r\nx: ")
            with pytest.raises((ConnectionError, BrokenPipeError)):  # noqa: PT012
                for _ in range(100_000):
                    writer.write(piece)
                    await writer.drain()
            writer.close()

    run([Said("hi")], test)


def test_the_rest_of_a_body_that_was_refused_is_not_read():
    """The connection ends soon after the answer, and what is sent meanwhile is not waited for."""

    async def test(gateway: Gateway) -> None:
        reader, writer = await connect(gateway)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {2**40}\r\n\r\n"
        writer.write(head.encode() + b"y" * 100_000)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 413 " in answer
        assert b"connection: close" in answer
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while await reader.read(2**16):
                pass
        assert time.monotonic() - begun < 10
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(10_000):
                writer.write(b"y" * 2**16)
                await writer.drain()
        writer.close()

    run([Said("hi")], test, edge=EdgeLimits(body_bytes=2**20))


def test_a_client_that_sends_all_before_it_looks_is_told_that_it_was_too_much():
    async def test(gateway: Gateway) -> None:
        async with gateway.client() as client:
            with pytest.raises(openai.APIStatusError) as error:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "y" * 2**23}]
                )
        assert error.value.status_code == 413

    run([Said("hi")], test, edge=EdgeLimits(body_bytes=2**20))


def test_heads_that_never_end_and_bodies_that_trickle_are_given_up_while_slow_answers_go_on():
    async def trickle(gateway: Gateway, begun: bytes) -> bytes:
        """What comes back to a client that sends a byte now and then."""
        reader, writer = await connect(gateway)
        writer.write(begun)
        told = b""
        with contextlib.suppress(ConnectionError):  # hung up on with a byte on its way
            while True:
                try:
                    async with asyncio.timeout(0.1):
                        piece = await reader.read(4096)
                except TimeoutError:
                    writer.write(b"y")
                    continue
                told += piece
                if not piece:
                    break
        writer.close()
        return told

    async def go() -> None:
        limits = EdgeLimits(body_s=0.5, body_idle_s=0.4)
        gateway = make_gateway([Said("hi", pause_s=2.0, chunk_tokens=9)], edge=limits)
        server = GatewayServer(make_app(gateway.service), head_s=0.5)
        gateway.url = await server.start()
        async with asyncio.timeout(60):
            reader, writer = await connect(gateway)
            writer.write(raw(BODY))
            for begun in (
                b"",
                b"GET / HTTP/1.1\r\nx: ",
                raw(BODY)[:-100] + b"GET / HTTP/1.1\r\nx: ",
            ):
                assert b" 200 " not in await trickle(gateway, begun)
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n"
            assert b" 408 " in (await trickle(gateway, head.encode()))[:20]
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            writer.close()
            await gateway.until_idle()
            await server.stop()
        assert len(gateway.sampler.sampled) == 1
        assert gateway.service.counts.num_open == gateway.service.counts.num_defects == 0

    asyncio.run(go())


def test_calls_sent_one_behind_the_other_are_answered_in_their_order():
    async def test(gateway: Gateway) -> None:
        reader, writer = await connect(gateway)
        writer.write(b"".join(raw({**BODY, "stream": i % 2 == 0}) for i in range(6)))
        for i in range(6):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in head
            assert (b"event-stream" in head) == (i % 2 == 0)
            if i % 2 == 0:
                await reader.readuntil(b"\r\n0\r\n\r\n")
            else:
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])
                assert json.loads(await reader.readexactly(length))["choices"]
        writer.close()
        await gateway.until_idle()
        assert gateway.recorder.num_turns == 6

    run([Said("hi")], test)


@pytest.mark.parametrize(
    "head",
    [
        "content-length: 5\r\n",  # of more: the rest is no request
        "content-length: 5\r\ncontent-length: 6\r\n",
        "content-length: -1\r\n",
        "content-length: 5\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked\r\n",
        "",
    ],
)
def test_a_body_of_another_length_than_was_said_is_refused_and_hung_up_on(head):
    async def test(gateway: Gateway) -> None:
        reader, writer = await connect(gateway)
        text = json.dumps(BODY).encode()
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{head}\r\n".encode() + text)
        writer.write_eof()
        answer = await reader.read()
        assert answer == b"" or b" 400 " in answer[:20]
        writer.close()
        await gateway.until_idle()
        assert not gateway.sampler.requests

    run([Said("hi")], test, edge=EdgeLimits(body_idle_s=1.0))


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("at_once", [1, 40, 100_000])
def test_a_client_that_offers_another_protocol_is_answered_in_this_one(is_chunked, at_once):
    text = json.dumps(BODY).encode()
    framing = b"content-length: %d\r\n\r\n%s" % (len(text), text)
    if is_chunked:
        framing = b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)
    offered = (  # as Java's HTTP client and curl --http2 do
        b"POST %s HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
        b"http2-settings: AAMAAABkAAQAAP__\r\n%s" % (CHAT.encode(), framing)
    )

    async def test(gateway: Gateway) -> None:
        reader, writer = await connect(gateway)
        sent = offered * 2 + raw(BODY)
        for start in range(0, len(sent), at_once):
            writer.write(sent[start : start + at_once])
            await writer.drain()
            await asyncio.sleep(0)
        for _ in range(3):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            assert b" 200 " in head
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])
            assert json.loads(await reader.readexactly(length))["choices"]
        writer.close()
        await gateway.until_idle()
        assert gateway.recorder.num_turns == 3

    run([Said("hi")], test)


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x00", b"GET\r\n\r\n", b"\x00" * 99, b"CONNECT h:1 HTTP/1.1"]
)
def test_what_is_no_http_is_hung_up_on(garbage):
    async def test(gateway: Gateway) -> None:
        reader, writer = await connect(gateway)
        writer.write(garbage + b"\r\n\r\n")
        assert b" 500 " not in await reader.read()
        writer.close()

    run([Said("hi")], test)


def test_packed_bodies_and_either_header_for_the_key_are_read():
    async def test(gateway: Gateway) -> None:
        async with aiohttp.ClientSession() as session:
            headers = {"content-encoding": "gzip", "x-api-key": "one", "Cookie": "secret"}
            packed = gzip.compress(json.dumps(BODY).encode())
            url = gateway.url + CHAT + "?beta=true"
            async with session.post(url, data=packed, headers=headers) as response:
                assert response.status == 200
            headers = {"Authorization": "bearer two"}
            async with session.post(url, json=BODY, headers=headers) as response:
                assert response.status == 200
        assert gateway.door.keys == ["one", "two"]

    run([Said("hi")], test)


def test_a_refusal_for_a_while_says_for_how_long_and_is_obeyed():
    async def test(gateway: Gateway) -> None:
        async with gateway.client("/s/later/v1", max_retries=1) as client:
            began = time.monotonic()
            with pytest.raises(openai.RateLimitError) as refused:
                await client.chat.completions.create(model="m", messages=HELLO)
        assert refused.value.response.headers["retry-after"] == "1"
        assert time.monotonic() - began >= 1.0
        assert len(gateway.door.keys) == 2
        assert gateway.service.counts.num_refused == 2

    run([Said("hi")], test)


def test_more_calls_than_are_let_in_at_once_are_turned_away_and_the_others_answered():
    async def test(gateway: Gateway) -> None:
        async def one() -> int:
            async with session.post(gateway.url + CHAT, json=BODY) as response:
                await response.read()
                return response.status

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            statuses = await asyncio.gather(*(one() for _ in range(20)))
        assert set(statuses) == {200, 503}
        assert statuses.count(200) >= 4

    run([Said("hi", pause_s=0.5)], test, edge=EdgeLimits(concurrent_calls=4))


def test_a_thousand_streams_at_once_all_end_and_are_recorded():
    async def test(gateway: Gateway) -> None:
        async def one(index: int) -> None:
            url = f"{gateway.url}/s/{index % 50}{CHAT}"
            async with session.post(url, json={**BODY, "stream": True}) as response:
                assert response.status == 200
                assert (await response.text()).endswith("data: [DONE]\n\n")

        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(one(index) for index in range(1000)))
        assert len(gateway.sampler.sampled) == 1000
        turns = [record.recorder.num_turns for record in gateway.door.records.values()]
        assert turns == [20] * 50
        assert gateway.service.counts.num_failed == gateway.service.counts.num_refused == 0

    run([Said("and so on", pause_s=0.02)], test)


def test_a_server_that_stops_tells_streams_and_calls_so_and_aborts_them():
    async def go() -> None:
        gateway = make_gateway([ENDLESS])
        server = GatewayServer(make_app(gateway.service), grace_s=0.3)
        gateway.url = await server.start()
        stream, writer = await connect(gateway)
        writer.write(raw({**BODY, "stream": True}))
        whole, other = await connect(gateway)
        other.write(raw(BODY))
        async with asyncio.timeout(20):
            while gateway.sampler.num_running < 2:
                await asyncio.sleep(0.01)
            await server.stop()
            told = await stream.read()
            head = await whole.read()
        assert b"shutting_down" in told
        assert told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert gateway.sampler.num_running == gateway.door.num_inside == 0
        assert len(gateway.sampler.aborted) == 2
        for one in (writer, other):
            one.close()

    asyncio.run(go())


def test_an_address_that_is_taken_is_an_error_that_names_it():
    async def test(gateway: Gateway) -> None:
        port = int(gateway.url.rsplit(":", 1)[1])
        second = GatewayServer(make_app(gateway.service), port=port)
        with pytest.raises(Exception, match=rf"gateway\.port = {port}"):
            await second.start()

    run([Said("hi")], test)
