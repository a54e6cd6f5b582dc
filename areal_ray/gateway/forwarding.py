"""Calls for a session of another replica, passed on to it: SDKs drop their keys on a redirect.

Waits for: the other replica, as long as the client does; a client that leaves ends it there, too.
"""

import logging
from collections.abc import Mapping
from typing import Any

import aiohttp

from areal_ray.gateway.call import CallError
from areal_ray.gateway.exchange import ClientGone, Exchange, Headers, Receive, Send
from areal_ray.gateway.limits import EdgeLimits, check_headers
from areal_ray.gateway.openai_chat import OpenAIChat
from areal_ray.gateway.sessions import Sessions

_log = logging.getLogger(__name__)

PASSED_ON = "x-areal-passed-on"
"""Says that a call came from another replica: it is not passed on again."""
_CONNECT_S = 10.0
_RETRY_S = 2.0
_UNKNOWN_KEY = 401
_OF_THE_CONNECTION = {
    *(b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"),
    *(b"proxy-connection", b"proxy-authenticate", b"host", b"content-length", b"expect"),
}


class Forwarding:
    """ASGI before the edge: what belongs to another replica goes there.

    Args:
        app: Answers what belongs here.
        sessions: Of this replica; knows where calls belong.
        limits: What requests are held to.
    """

    def __init__(self, app: Any, sessions: Sessions, limits: EdgeLimits) -> None:
        self._app = app
        self._sessions = sessions
        self._limits = limits
        self._client: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI asks."""
        if scope["type"] != "http" or not self._sessions.peers().urls:
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope, receive, send, self._limits)
        _, _, after = scope["path"].partition("/s/")
        named = after.split("/")[0] if scope["path"].startswith("/s/") else ""
        home = self._sessions.home(exchange.key(), named)
        is_leaving = self._sessions.is_leaving
        if not home or (PASSED_ON in exchange.open_headers() and not is_leaving):
            await self._app(scope, receive, send)
            return
        try:
            check_headers(exchange.raw_headers, self._limits)
            body = await exchange.body()
            async with exchange.watched():
                is_known = await self._pass_on(scope, home, body, send, may_return=is_leaving)
            if not is_known:  # no session began there since: this replica has its last one
                await self._app(scope, _replayed(body, receive), send)
        except ClientGone:
            return
        except CallError as error:
            await exchange.refuse(error, OpenAIChat().error(error))

    async def ask(
        self, home: str, scope: Mapping[str, Any], body: bytes
    ) -> tuple[int, bytes, Mapping[str, str]]:
        """The whole answer of another replica to a request that came here: status, body, headers.

        Raises:
            CallError: 503, if it cannot be reached.
        """
        try:
            async with self._sent(home, scope, body) as answer:
                return answer.status, await answer.read(), answer.headers
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(home, error) from error

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _pass_on(
        self, scope: Mapping[str, Any], home: str, body: bytes, send: Send, *, may_return: bool
    ) -> bool:
        """Whether the other replica knew the key; where it may come back, nothing was sent then."""
        has_begun = False
        try:
            async with self._sent(home, scope, body) as answer:
                if may_return and answer.status == _UNKNOWN_KEY:
                    return False
                headers = [(name.lower(), text) for name, text in answer.raw_headers]
                kept = [one for one in headers if one[0] not in _OF_THE_CONNECTION]
                has_begun = True
                start = {"type": "http.response.start", "status": answer.status}
                await send({**start, "headers": kept})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return True
        except (aiohttp.ClientError, OSError) as error:
            if not has_begun:
                raise _unreachable(home, error) from error
            _log.warning("replica %s broke off in an answer: %s", home, error)
            raise ClientGone from error  # an answer cut short is one that the client asks again

    def _sent(self, home: str, scope: Mapping[str, Any], body: bytes) -> Any:
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        headers: Headers = [one for one in scope["headers"] if one[0] not in _OF_THE_CONNECTION]
        told = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in headers]
        query = scope.get("query_string", b"").decode("latin-1")
        url = self._url_of(home) + scope["raw_path"].decode("latin-1")
        return self._client.request(
            scope["method"],
            url + (f"?{query}" if query else ""),
            headers=[*told, (PASSED_ON, self._sessions.name)],
            data=body,
            allow_redirects=False,
        )

    def _url_of(self, home: str) -> str:
        url = self._sessions.peers().urls.get(home)
        if url is None:  # while the request was read
            raise _unavailable(home, "has left")
        return url


def _replayed(body: bytes, receive: Receive) -> Receive:
    """ASGI's receive, from before the body was read."""
    rest = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Any:
        return rest.pop() if rest else await receive()

    return replayed


def _unreachable(home: str, error: Exception) -> CallError:
    return _unavailable(home, f"cannot be reached: {error}")


def _unavailable(home: str, why: str) -> CallError:
    told = f"gateway {home}: {why}. Try again"
    return CallError(503, "replica_unavailable", told, retry_after_s=_RETRY_S)
