"""The HTTP edge: every dialect's calls, the model list and probes, under any prefix clients use.

Model calls are answered on bare ASGI, before FastAPI looks at them; its routes are for the rest.
Probes (`/`, `/health`) need no key, the model list does: with it clients try out theirs.
`/v1` before a path may be left out or doubled, and `/s/SESSION` before it names a session.
Whatever goes wrong is told in the dialect's own shape.
"""

import asyncio
import datetime
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from areal_ray.errors import ArealRayError
from areal_ray.gateway.answer import Answer, Answers
from areal_ray.gateway.anthropic import AnthropicMessages
from areal_ray.gateway.call import Call, CallError, CallHints, CallReply, Dialect
from areal_ray.gateway.door import Door, SessionRecord, time_is_up
from areal_ray.gateway.exchange import (
    ClientGone,
    Exchange,
    Receive,
    Send,
    error_headers,
    json_bytes,
)
from areal_ray.gateway.limits import EdgeLimits, check_headers, parsed, unpacked
from areal_ray.gateway.off_loop import OF_A_TOKEN
from areal_ray.gateway.openai_chat import OpenAIChat
from areal_ray.gateway.openai_completions import OpenAICompletions
from areal_ray.gateway.openai_responses import OpenAIResponses
from areal_ray.gateway.openapi import telling_model_calls
from areal_ray.gateway.reply_store import ReplyStore
from areal_ray.gateway.sse import SHUTTING_DOWN, send_stream
from areal_ray.gateway.structured import StructuredOutput
from areal_ray.gateway.upstream import UpstreamAnswer, Upstreams

_log = logging.getLogger(__name__)

_PATH = re.compile(r"(?:/s/(?P<session>[^/]+))?(?P<rest>(?:/.*)?)", re.DOTALL)
_SLASHES = re.compile("/{2,}")
_RETRY_S = 1.0
_DEFECT = CallError(
    503,
    "internal_error",
    "the server could not answer this request; its log says why. Try again",
    retry_after_s=_RETRY_S,
)
_DIALECTS: tuple[Dialect, ...] = (
    OpenAIChat(),
    OpenAIResponses(),
    AnthropicMessages(),
    OpenAICompletions(),
)
_PACKED = 4
"""How much larger a packed body is, about."""
_OF_LOGPROBS = 16
"""How much longer a reply is with them, about."""
_NO_ROUTE = (
    "{path}: is not served here. Model calls go to /v1/chat/completions, /v1/responses, "
    "/v1/messages or /v1/completions; /openapi.json lists all there is"
)
_PROBES = ("", "/", "/api/hello")
_Answer = Callable[[Exchange, str], Awaitable[None]]


@dataclass(slots=True)
class EdgeCounts:
    """What the edge has seen since it started."""

    num_calls: int = 0
    num_open: int = 0
    """Model calls being answered."""
    num_streams: int = 0
    num_refused: int = 0
    """Answered with a 4xx."""
    num_failed: int = 0
    """Answered with a 503, or broken off after the headers for the sampler's sake."""
    num_gone: int = 0
    """Whose client left before the end."""
    num_defects: int = 0
    """Failures of our own; each is in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What stands behind the edge."""

    answers: Answers
    door: Door
    dialects: tuple[Dialect, ...] = _DIALECTS
    model: str = "policy"
    """What the model list shows; calls may name any model."""
    created_s: int = 0
    limits: EdgeLimits = field(default_factory=EdgeLimits)
    counts: EdgeCounts = field(default_factory=EdgeCounts)
    replies: ReplyStore = field(default_factory=ReplyStore)
    structured: StructuredOutput | None = None
    """Holds replies to what calls ask for; None = that is read and passed over."""
    upstreams: Upstreams | None = None
    """Answers calls of sessions that are not the policy's."""

    async def constrained(self, call: Call, record: SessionRecord) -> Call:
        """The call with what its reply is held to; see `StructuredOutput.constrained`."""
        if record.texts is not None or self.structured is None:
            return call
        return await self.structured.constrained(call, is_trained=record.is_trained)

    async def begin(self, call: Call, record: SessionRecord) -> Answer | UpstreamAnswer:
        """Whoever serves the session takes up a call of it; see `Answers.begin`."""
        if record.texts is None:
            return await self.answers.begin(call, record)
        assert self.upstreams is not None
        return self.upstreams.begin(call, record)


def make_app(service: Service) -> FastAPI:
    """The ASGI application of a service; further routes may be added to it."""
    app = FastAPI(title="areal-ray gateway", docs_url=None, redoc_url=None)
    app.openapi = telling_model_calls(app.openapi, service.dialects)  # type: ignore[method-assign]
    app.add_middleware(Edge, service=service)
    shape = OpenAIChat()

    async def refused(request: Request, error: Exception) -> JSONResponse:
        path = request.scope["path"]
        told = _as_call_error(error, path)
        near = (one for one in service.dialects if any(f"{at}/" in path for at in one.paths))
        shape = next(near, OpenAIChat())
        return JSONResponse(shape.error(told), told.status, error_headers(told))

    async def failed(_: Request, error: Exception) -> JSONResponse:
        service.counts.num_defects += 1
        _log.error("a request could not be answered", exc_info=error)
        return JSONResponse(shape.error(_DEFECT), status_code=_DEFECT.status)

    app.add_exception_handler(Exception, failed)
    kinds = (StarletteHTTPException, HTTPException, RequestValidationError, CallError)
    for kind in (*kinds, ArealRayError):
        app.add_exception_handler(kind, refused)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """What the edge has seen so far."""
        return {"status": "ok", **asdict(service.counts)}

    return app


class Edge:
    """Answers model calls, model lists and probes; passes on what is none of them.

    Args:
        app: Gets the rest.
        service: Who answers.
    """

    def __init__(self, app: Any, service: Service) -> None:
        self._app = app
        self._service = service
        self._shape = OpenAIChat()
        self._shapes: dict[str, Dialect] = {}
        self._routes: dict[str, dict[str, _Answer]] = {}
        for dialect in service.dialects:
            for path in dialect.paths:
                self._shapes[path] = dialect
                self._routes[path] = {"POST": partial(self._call, dialect)}
            for path in getattr(dialect, "count_paths", ()):
                self._shapes[path] = dialect
                self._routes[path] = {"POST": partial(self._count, dialect)}
        for path in ("/models", "/api/v1/models"):
            self._routes[path] = {"GET": self._models}
        for path in _PROBES:
            self._routes[path] = {"GET": self._probe}

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI asks."""
        if scope["type"] == "http" and "//" in scope["path"]:  # of a base URL that ends with one
            scope = {**scope, "path": _SLASHES.sub("/", scope["path"])}
        found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        path = found["rest"]
        while path.startswith("/v1/") or path == "/v1":
            path = path[3:]
        if len(path) > 1:
            path = path.rstrip("/")
        methods = self._routes.get(path)
        if methods is None and path.startswith("/models/"):
            methods = {"GET": partial(self._model, path.removeprefix("/models/"))}
        if methods is None:
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self._service.limits)
        shape = self._shapes.get(path, self._shape)
        await self._guarded(exchange, shape, methods, scope["method"], found["session"] or "")

    async def _guarded(
        self,
        exchange: Exchange,
        shape: Dialect,
        methods: Mapping[str, _Answer],
        method: str,
        session: str,
    ) -> None:
        counts = self._service.counts
        try:
            route = methods.get("GET" if method == "HEAD" else method)
            if route is None:
                raise _wrong_method(method, methods)
            check_headers(exchange.raw_headers, self._service.limits)
            await route(exchange, session)
            return
        except ClientGone:
            counts.num_gone += 1
            return
        except CallError as error:
            told = error
        except ArealRayError as error:
            told = _as_call_error(error)
        except asyncio.CancelledError:
            told = SHUTTING_DOWN
        except Exception:
            counts.num_defects += 1
            _log.exception("a request could not be answered")
            told = _DEFECT
        if told.status >= 500:
            counts.num_failed += 1
        else:
            counts.num_refused += 1
        if not exchange.has_begun:
            await exchange.refuse(told, shape.error(told))

    # -- routes --------------------------------------------------------------------------------

    async def _call(self, dialect: Dialect, exchange: Exchange, session: str) -> None:
        service, counts = self._service, self._service.counts
        if counts.num_open >= service.limits.concurrent_calls:
            message = f"{counts.num_open} calls are being answered. Try again"
            raise CallError(503, "overloaded", message, retry_after_s=_RETRY_S)
        counts.num_open += 1
        try:
            call = await self._read(dialect, exchange)
            counts.num_calls += 1
            owner = f"{exchange.key()} {session}"
            record = await service.door.enter(exchange.key(), session, call.hints)
            timer = asyncio.timeout_at(record.ends_at)
            try:
                async with timer:
                    reply = await self._replied(dialect, exchange, call, record, owner)
            except TimeoutError:
                raise time_is_up(record) from None
            finally:
                service.door.leave(record)
        finally:
            counts.num_open -= 1
        if reply is None:
            return
        size = (_OF_LOGPROBS if call.logprobs else 1) * OF_A_TOKEN * reply.num_tokens
        written = await service.answers.off_loop.run(
            size, lambda: json_bytes(dialect.write(call, reply))
        )
        await exchange.answer(200, written, [(b"x-request-id", reply.id.encode())])

    async def _replied(
        self, dialect: Dialect, exchange: Exchange, call: Call, record: SessionRecord, owner: str
    ) -> CallReply | None:
        """What is to be sent; None where it was streamed."""
        service = self._service
        call = service.replies.resumed(call, owner)
        call = await service.constrained(call, record)
        keep = partial(self._keep, dialect, call, owner)
        answer = await service.begin(call, record)
        try:
            if call.stream:
                service.counts.num_streams += 1
                await send_stream(exchange, dialect.writer(call), answer, keep, record)
                return None
            async with exchange.watched():
                reply = await answer.whole()
            keep(reply)
            return reply
        finally:
            answer.abandon("the call broke off")

    def _keep(self, dialect: Any, call: Call, owner: str, reply: CallReply) -> None:
        """A dialect whose calls may be stored has `stored_name`."""
        if call.is_stored:
            self._service.replies.keep(dialect.stored_name(reply), call, reply, owner)

    async def _count(self, dialect: Any, exchange: Exchange, session: str) -> None:
        """A dialect that counts tokens has `count_paths` and `write_count`."""
        call = await self._read(dialect, exchange)
        record = await self._service.door.enter(exchange.key(), session, call.hints)
        self._service.door.leave(record)
        call = self._service.replies.resumed(call, f"{exchange.key()} {session}")
        count = await self._service.answers.count_prompt_tokens(call)
        await exchange.answer(200, dialect.write_count(count))

    async def _read(self, dialect: Dialect, exchange: Exchange) -> Call:
        limits, raw = self._service.limits, await exchange.body()
        hints = CallHints(exchange.open_headers())

        def read() -> Call:
            return dialect.read(parsed(unpacked(raw, exchange.encoding, limits), limits), hints)

        size = _PACKED * len(raw) if exchange.encoding else len(raw)
        return await self._service.answers.off_loop.run(size, read)

    async def _models(self, exchange: Exchange, _: str) -> None:
        self._service.door.identify(exchange.key())
        shown = self._shown_model(self._service.model)
        first = {"first_id": shown["id"], "last_id": shown["id"], "has_more": False}
        await exchange.answer(200, {"object": "list", "data": [shown], **first})

    async def _model(self, name: str, exchange: Exchange, _: str) -> None:
        self._service.door.identify(exchange.key())
        await exchange.answer(200, self._shown_model(name))

    async def _probe(self, exchange: Exchange, _: str) -> None:
        await exchange.answer(200, {"service": "areal-ray gateway", "model": self._service.model})

    def _shown_model(self, name: str) -> dict[str, Any]:
        """With the fields of OpenAI's list and of Anthropic's."""
        created_s = self._service.created_s
        context = self._service.answers.limits.context_tokens
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "areal-ray",
            "max_model_len": context,
            "type": "model",
            "display_name": name,
            "created_at": _iso(created_s),
        }


def _wrong_method(method: str, methods: Mapping[str, _Answer]) -> CallError:
    message = f"method: is {method}; must be {' or '.join(methods)}"
    return CallError(405, "method_not_allowed", message, allow=", ".join(methods))


def _as_call_error(error: Exception, path: str = "") -> CallError:
    if isinstance(error, CallError):
        return error
    if isinstance(error, ArealRayError):
        return CallError(503, "unavailable", str(error), retry_after_s=_RETRY_S)
    if isinstance(error, StarletteHTTPException):
        codes = {404: "not_found", 405: "method_not_allowed"}
        told = _NO_ROUTE.format(path=path[:200]) if error.status_code == 404 else error.detail
        allow = (error.headers or {}).get("Allow", "")
        if error.status_code == 405:
            told = f"method: {path[:200]} takes {allow or 'another'}"
        code = codes.get(error.status_code, "error")
        return CallError(error.status_code, code, told, allow=allow)
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return CallError(400, "invalid_value", f"{where}: {first['msg']}", param=where)


def _iso(time_s: int) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
