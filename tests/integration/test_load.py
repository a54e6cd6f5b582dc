"""Load on a real gateway over sockets, and on servers that misbehave."""

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from areal_ray import cli
from areal_ray.errors import ArealRayError
from areal_ray.gateway.load import LoadPlan, LoadReport, load_table, measure_load
from areal_ray.telemetry.load_table import print_load
from tests.support.gateway import serving
from tests.support.scripted_sampler import Said


@asynccontextmanager
async def answering(answer: Callable[[web.Request], Any]) -> AsyncGenerator[str, None]:
    """A server that answers every POST so; its address."""

    async def models(request: web.Request) -> web.Response:
        if request.headers.get("authorization") == "Bearer wrong":
            raise web.HTTPUnauthorized
        return web.json_response({"data": [{"id": "listed"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/{rest:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def streamed(*lines: str) -> Callable[[web.Request], Any]:
    """Answers with these lines of a stream."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for line in lines:
            await response.write(f"{line}\n\n".encode())
        return response

    return answer


def measured(answer: Callable[[web.Request], Any], **options: Any) -> LoadReport:
    """Six requests to a server that answers so."""

    async def go() -> LoadReport:
        async with answering(answer) as url:
            plan = LoadPlan(url=url, num_requests=6, concurrency=2, **options)
            return await measure_load(plan)

    return asyncio.run(go())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_load_on_the_gateway_counts_what_the_sampler_gave(is_streamed):
    async def go() -> None:
        async with serving([Said("one two three")]) as gateway:
            plan = LoadPlan(
                url=gateway.url, num_requests=30, concurrency=4, is_streamed=is_streamed
            )
            report = await measure_load(plan)
            await gateway.until_idle()
            sampled = gateway.sampler.sampled.values()
            assert report.num_answered == report.num_requests == len(sampled) == 30
            assert report.num_tokens == sum(len(turn.token_ids) for turn in sampled)
            assert report.errors == {}
            assert report.model == "policy"
            assert (report.first_token_ms is not None) == is_streamed
            assert report.request_ms is not None
            assert report.request_ms.p50 <= report.request_ms.p99

    asyncio.run(go())


RESPONSES = (
    'data: {"type": "response.output_text.delta", "delta": "a"}',
    'data: {"type": "response.output_text.delta", "delta": "b"}',
    'data: {"type": "response.completed", "response": {"usage": {"output_tokens": 7}}}',
)
MESSAGES = (
    'event: ping\ndata: {"type": "ping"}',
    'data: {"type": "message_start", "message": {"usage": {"output_tokens": 1}}}',
    'data: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}',
    'data: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "b"}}',
    'data: {"type": "message_delta", "usage": {"output_tokens": 7}}',
    'data: {"type": "message_stop"}',
)
CHAT = ('data: {"choices": [{"delta": {"content": "a"}}]}',)


@pytest.mark.parametrize(("dialect", "lines"), [("responses", RESPONSES), ("messages", MESSAGES)])
def test_streams_of_the_other_dialects_are_read(dialect, lines):
    report = measured(streamed(*lines), dialect=dialect)
    assert report.num_answered == 6
    assert (report.num_pieces, report.num_tokens) == (12, 42)
    assert report.model == "listed"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (CHAT, "broke off"),
        ((*CHAT, 'data: {"error": {"code": "engine_error"}}'), "told: engine_error"),
        (("data: {", "data: [DONE]"), "not chat JSON"),
        (MESSAGES, "not chat JSON"),
    ],
)
def test_what_is_no_whole_answer_is_counted_by_its_kind(lines, kind):
    report = measured(streamed(*lines))
    assert report.errors == {kind: 6}
    assert report.num_answered == 0


def test_refused_and_silent_requests_are_counted_and_the_others_measured():
    numbers = iter(range(6))

    async def answer(request: web.Request) -> web.StreamResponse:
        number = next(numbers)
        if number < 2:
            return web.json_response({"error": {}}, status=429)
        if number < 3:
            await asyncio.sleep(60)
        return await streamed(*CHAT, "data: [DONE]")(request)

    report = measured(answer, timeout_s=3.0)
    assert report.errors == {"HTTP 429": 2, "timed out": 1}
    assert (report.num_answered, report.num_tokens) == (3, 3)


def test_a_refusal_is_told_in_the_servers_words():
    async def answer(request: web.Request) -> web.Response:
        told = {"error": {"message": f"max_tokens: {await request.text()!r:.9} is too much"}}
        return web.json_response(told, status=400)

    report = measured(answer)
    (told,) = report.errors  # one kind, though each was told in other words
    assert told.startswith("HTTP 400: max_tokens: ")
    assert report.errors[told] == 6


def test_a_key_that_is_refused_where_the_list_of_models_is_open_ends_the_load():
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        raise web.HTTPUnauthorized

    with pytest.raises(ArealRayError, match=r"the key is refused \(401\).*--api-key-env"):
        measured(answer)
    assert asked <= 2


def test_the_table_says_its_title_on_one_line_and_each_error_with_its_count():
    plan = LoadPlan(url="http://127.0.0.1:8000/" + "long/" * 20, num_requests=2)
    report = measured(streamed(*CHAT))
    drawn = io.StringIO()
    print_load(load_table(plan, report), drawn)
    assert drawn.getvalue().splitlines()[0] == (f"{plan.url}, listed: chat, streamed, 64 at a time")
    assert "error: 6 x broke off\n" in drawn.getvalue()


def test_seconds_end_a_load_that_has_no_number_of_requests():
    async def go() -> None:
        async with serving([Said("hi")]) as gateway:
            report = await measure_load(LoadPlan(url=gateway.url, seconds=0.5, concurrency=2))
            assert report.num_answered == report.num_requests > 0

    asyncio.run(go())


def test_no_server_a_wrong_key_and_a_key_that_is_not_set_are_told_at_once(
    capsys, monkeypatch, tmp_path
):
    async def wrong_key() -> None:
        async with answering(streamed(*CHAT)) as url:
            await measure_load(LoadPlan(url=url, num_requests=1), "wrong")

    with pytest.raises(ArealRayError, match="the key is refused"):
        asyncio.run(wrong_key())
    for url in ("http://127.0.0.1:9", "nothing", "ftp://x"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["load", url])
        assert ended.value.code == 1
        assert "no model server answers" in capsys.readouterr().err
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["load", "http://127.0.0.1:9", "--api-key-env", "NO_SUCH_KEY"])
    assert ended.value.code == 2


def test_the_command_prints_a_table_writes_json_and_sends_the_key_of_the_environment(
    capsys, monkeypatch, tmp_path
):
    async def go() -> list[str]:
        async with serving([Said("one two three")]) as gateway:
            words = ["load", gateway.url, "--requests", "9", "--concurrency", "3"]
            words += ["--api-key-env", "SOME_KEY", "--json", str(tmp_path / "load.json")]
            with pytest.raises(SystemExit) as ended:
                await asyncio.to_thread(cli.main, words)
            assert ended.value.code == 0
            return gateway.door.keys

    monkeypatch.setenv("SOME_KEY", "very-secret")
    assert set(asyncio.run(go())) == {"very-secret"}
    shown = capsys.readouterr().out
    assert "first token" in shown
    assert "9 of 9" in shown
    written = (tmp_path / "load.json").read_text()
    assert json.loads(written)["num_answered"] == 9
    assert "very-secret" not in shown + written
