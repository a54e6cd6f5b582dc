"""`/rl/start_session`, `/rl/set_reward`, `/rl/end_session` and `/export_trajectories` over HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from areal_ray.core.clock import steady_time
from areal_ray.gateway.app import Service, make_app
from areal_ray.gateway.call import CallError
from areal_ray.gateway.exchange import ClientGone, Exchange, json_bytes
from areal_ray.gateway.fields import refuse
from areal_ray.gateway.forwarding import PASSED_ON, Forwarding
from areal_ray.gateway.limits import EdgeLimits, check_headers, parsed, unpacked
from areal_ray.gateway.openapi import (
    COUNT,
    NUMBER,
    SECURITY,
    TEXT,
    WHOLE,
    Schema,
    answers,
    body_of,
    query_of,
)
from areal_ray.gateway.session_requests import SessionRequests
from areal_ray.gateway.session_search import SessionRequest
from areal_ray.gateway.sessions import Sessions

_Verb = Callable[[SessionRequest], dict[str, Any] | Awaitable[dict[str, Any]]]
_NAMED: Mapping[str, Schema] = {"session_id": TEXT, "request_id": TEXT}
_BODIES: Mapping[str, tuple[Sequence[str], Mapping[str, Schema]]] = {
    "/rl/start_session": (
        ["task_id"],
        {
            "task_id": {**TEXT, "minLength": 1},
            "group_size": {**COUNT, "maximum": 256},
            **dict.fromkeys(("api_key", "model", "request_id"), TEXT),
        },
    ),
    "/rl/set_reward": (
        ["reward"],
        {
            **_NAMED,
            **dict.fromkeys(("interaction_id", "conversation_id", "model"), TEXT),
            "reward": NUMBER,
            "turn": WHOLE,
        },  # `model` is what clients of AReaL send beside; the session says who answers
    ),
    "/rl/end_session": ([], _NAMED),
    "/export_trajectories": (
        [],
        {
            **dict.fromkeys(("session_id", "group_id", "style"), TEXT),
            **dict.fromkeys(("discount", "wait_s"), NUMBER),
        },
    ),
}
"""What requests need, and all that they may have."""
_STRICT = ("/rl/start_session", "/rl/set_reward", "/rl/end_session")
"""Where a field that is not known is refused: of a misspelt `turn` the whole session would have the
reward. Exports are asked for with options of AReaL's that mean nothing here."""
_ELSEWHERE = (404, 429)
"""Answers after which another replica is asked."""


def make_sessions_app(
    service: Service,
    sessions: Sessions,
    clock: Callable[[], float] = steady_time,
    *,
    least_siblings: int = 1,
) -> Any:
    """The ASGI application of a service whose door is `sessions`, with their routes.

    `least_siblings`: see `SessionRequests`.
    """
    app = make_app(service)
    others = () if service.upstreams is None else service.upstreams.names
    requests = SessionRequests(sessions, clock, others, least_siblings)
    forwarding = Forwarding(app, sessions, service.limits)
    routes = _Routes(sessions, requests, forwarding, service.limits)
    routes.add_to(app)
    return forwarding


class _Routes:
    def __init__(
        self,
        sessions: Sessions,
        requests: SessionRequests,
        forwarding: Forwarding,
        limits: EdgeLimits,
    ) -> None:
        self._sessions = sessions
        self._requests = requests
        self._forwarding = forwarding
        self._limits = limits

    def add_to(self, app: FastAPI) -> None:
        verbs: dict[str, _Verb] = {
            "/rl/start_session": self._requests.start,
            "/rl/set_reward": self._requests.set_reward,
            "/rl/end_session": self._requests.end,
            "/export_trajectories": self._requests.export,
        }
        for path, verb in verbs.items():
            body = body_of(*_BODIES[path], is_closed=path in _STRICT)
            self._add(app, "POST", path, verb, {"requestBody": body})
        export = "/export_trajectories"
        _, fields = _BODIES[export]
        self._add(app, "GET", export, verbs[export], {"parameters": query_of(fields)})

    def _add(
        self, app: FastAPI, method: str, path: str, verb: _Verb, described: Mapping[str, Any]
    ) -> None:
        for prefix in ("", "/v1"):
            app.add_api_route(
                prefix + path,
                self._answering(verb),
                methods=[method],
                name=f"{method.lower()}_{path.rsplit('/', 1)[1]}",
                include_in_schema=not prefix,
                description=verb.__doc__ or "",
                responses=answers(),
                openapi_extra={**described, "security": list(SECURITY)},
            )

    def _answering(self, verb: _Verb) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return await self._answer(verb, request)

        return answer

    async def _answer(self, verb: _Verb, request: Request) -> Response:
        exchange = Exchange.of_route(request.scope, request.receive, self._limits)
        check_headers(exchange.raw_headers, self._limits)
        try:
            body = await exchange.body()
        except ClientGone:
            return Response(status_code=499)
        asked = self._asked(request, exchange, body)
        _check_fields(request.url.path, asked)
        is_passed_on = PASSED_ON in exchange.open_headers()
        if is_passed_on and not self._sessions.is_leaving:
            return await _done(verb, asked)
        home = self._sessions.home("", asked.text("session_id") or asked.text("group_id"))
        fixed = asked.text("api_key")
        if fixed and not home:
            home = self._sessions.peers().other_home(fixed, self._sessions.name)
        if home and not is_passed_on:
            return await self._at(home, request, body)
        try:
            return await _done(verb, asked)
        except CallError as error:
            if error.status not in _ELSEWHERE or (is_passed_on and not fixed):
                raise
            if self._sessions.is_leaving and fixed:
                return await self._at_successor(fixed, request, body)
            return await self._elsewhere(error, request, body)

    async def _at_successor(self, fixed: str, request: Request, body: bytes) -> Response:
        """The start of a fixed key's next session, where its sessions are from now on."""
        answer = await self._at(self._sessions.peers().successor(fixed), request, body)
        if answer.status_code == 200:
            self._sessions.rules.let_go(fixed)
        return answer

    def _asked(self, request: Request, exchange: Exchange, body: bytes) -> SessionRequest:
        given: dict[str, Any] = dict(request.query_params) if request.method == "GET" else {}
        for name in ("discount", "wait_s"):
            if name in given:
                given[name] = _number(given[name])
        if body:
            given |= parsed(unpacked(body, exchange.encoding, self._limits), self._limits)
        again = exchange.open_headers().get("idempotency-key", "")
        return SessionRequest(exchange.key(), given, again)

    async def _elsewhere(self, error: CallError, request: Request, body: bytes) -> Response:
        """What is not here may be at another replica; `error` is the answer if it is nowhere."""
        for name in self._sessions.peers().others(self._sessions.name):
            try:
                answer = await self._at(name, request, body)
            except CallError:  # it is down; the others may know
                continue
            if answer.status_code not in (*_ELSEWHERE, 401):
                return answer
        raise error

    async def _at(self, home: str, request: Request, body: bytes) -> Response:
        status, content, headers = await self._forwarding.ask(home, request.scope, body)
        kept = {name: headers[name] for name in ("content-type", "retry-after") if name in headers}
        return Response(content, status, kept)


def _check_fields(path: str, asked: SessionRequest) -> None:
    route = path.removeprefix("/v1")
    if route not in _STRICT:
        return
    _, fields = _BODIES[route]
    for name in asked.body:
        if name not in fields:
            refuse(name[:80], f"is no field of {route}; must be one of {', '.join(fields)}")


async def _done(verb: _Verb, asked: SessionRequest) -> Response:
    told = verb(asked)
    if not isinstance(told, dict):
        told = await told
    content = await asyncio.to_thread(json_bytes, told) if "sessions" in told else json_bytes(told)
    return Response(content, media_type="application/json")


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
