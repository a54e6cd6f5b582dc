"""SGLang's HTTP API as this package uses it: one method a route, answers checked, errors named.

Written against SGLang 0.5.23. A server that is busy or cannot be reached (503, 429, no connection)
is asked again with growing pauses; anything else that is wrong with an answer is the request's
error at once. Lives on one event loop.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np

from areal_ray.core.turn import TopTokens
from areal_ray.errors import EngineError

_FIRST_PAUSE_S = 0.2
_BUSY = (429, 503)
_LEAST_LOGPROB = -1e30
"""SGLang clamps minus infinity to the least float; no sampled token has that log-prob."""
_MARGIN = 1e-3
"""A log-prob may exceed 0 by rounding."""

Json = dict[str, Any]


class ServerUnreachable(EngineError):
    """No answer after all retries: the server is gone, or hangs."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens that an answer, or one event of a stream, adds to a turn."""

    token_ids: list[int]
    logprobs: list[float]
    version: str
    """What the server stamps them with."""
    finish: str
    """stop, length or abort; empty while the turn goes on."""
    tops: list[TopTokens | None]
    """For each token what was likeliest in its place; None where the server does not tell."""


class SglangApi:
    """A client of one server."""

    def __init__(self, url: str, *, timeout_s: float, num_retries: int) -> None:
        self.url = url
        self._num_retries = num_retries
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        self._session: aiohttp.ClientSession | None = None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            # As many connections as there are turns in flight, and some for control calls.
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        return self._session

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, route: str, *, num_retries: int | None = None) -> Json:
        """A GET that answers with a JSON object."""
        return _object(await self._asked("GET", route, None, num_retries), route)

    async def post(self, route: str, body: Mapping[str, Any]) -> None:
        """A POST whose answer says no more than that it went well; `success: false` is an error."""
        text = await self._asked("POST", route, body, None)
        if text.lstrip().startswith("{") and _object(text, route).get("success") is False:
            raise EngineError(f"{route}: the server refused: {text[:500]}")

    async def generate(self, body: Mapping[str, Any]) -> Sampled:
        """/generate, the whole answer at once.

        Raises:
            EngineError: The server refused, or its answer lacks what training needs.
        """
        answer = _object(await self._asked("POST", "/generate", body, None), "/generate")
        return _sampled(answer, 0, body.get("top_logprobs_num", 0))

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Sampled, None]:
        """/generate as events; each yields what is new since the last."""
        num_told, is_ended = 0, False
        async for event in self._events("/generate", body):
            sampled = _sampled(event, num_told, body.get("top_logprobs_num", 0))
            num_told += len(sampled.token_ids)
            is_ended = bool(sampled.finish)
            yield sampled
        if not is_ended:
            raise EngineError("/generate: the stream ended before the turn did")

    async def prompt_logprobs(self, body: Mapping[str, Any]) -> list[float]:
        """/generate with prompt log-probs; [T-1] those of each prompt token but the first."""
        answer = _object(await self._asked("POST", "/generate", body, None), "/generate")
        entries = _meta(answer).get("input_token_logprobs")
        prompt = list(body["input_ids"])
        ids, logprobs = _pairs(entries[1:] if entries else None, "input_token_logprobs")
        if ids != prompt[1:]:
            raise EngineError(
                f"/generate: input_token_logprobs are of {len(ids)} tokens, must be of the "
                f"{len(prompt) - 1} prompt tokens after the first"
            )
        return logprobs

    # -- the wire -------------------------------------------------------------------------------

    async def _asked(
        self, method: str, route: str, body: Mapping[str, Any] | None, num_retries: int | None
    ) -> str:
        retries = self._num_retries if num_retries is None else num_retries
        for attempt in range(retries + 1):
            try:
                async with self._opened().request(method, self.url + route, json=body) as answer:
                    text = await answer.text()
                    if answer.status not in _BUSY:
                        _check_status(answer.status, text, route)
                        return text
                    problem = f"answers {answer.status}: {_message(text)}"
            except TimeoutError as error:
                raise ServerUnreachable(
                    f"{route}: no answer from {self.url} within {self._timeout.total:g} s"
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                problem = f"cannot be reached: {type(error).__name__}: {error}"
            if attempt < retries:
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise ServerUnreachable(f"{route}: {self.url} {problem} ({retries + 1} attempts)")

    async def _events(self, route: str, body: Mapping[str, Any]) -> AsyncIterator[Json]:
        """Server-sent events of a POST; not asked again once the first has come."""
        for attempt in range(self._num_retries + 1):
            try:
                async with self._opened().post(self.url + route, json=body) as answer:
                    if answer.status not in _BUSY:
                        if answer.status != 200:
                            _check_status(answer.status, await answer.text(), route)
                        async for event in _server_sent(answer.content, route):
                            yield event
                        return
                    problem = f"answers {answer.status}: {_message(await answer.text())}"
            except aiohttp.ClientConnectorError as error:
                problem = f"cannot be reached: {error}"
            except TimeoutError as error:
                raise ServerUnreachable(
                    f"{route}: {self.url} sent no end within {self._timeout.total:g} s"
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                raise ServerUnreachable(
                    f"{route}: {self.url} dropped the stream: {type(error).__name__}: {error}"
                ) from error
            if attempt < self._num_retries:
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise ServerUnreachable(f"{route}: {self.url} {problem}")


def _check_status(status: int, text: str, route: str) -> None:
    if status == 404:
        raise EngineError(f"{route}: the server has no such route; is it SGLang 0.5.23 or newer?")
    if status != 200:
        raise EngineError(f"{route}: the server answers {status}: {_message(text)}")


def _message(text: str) -> str:
    """What an error's body says, under any of the keys that SGLang uses."""
    try:
        said: Any = json.loads(text)
    except ValueError:
        said = text
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return str(said)[:500]


def _object(text: str, route: str) -> Json:
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise EngineError(f"{route}: the answer is no JSON: {text[:200]!r}") from error
    if not isinstance(answer, dict):
        raise EngineError(f"{route}: the answer is a {type(answer).__name__}, must be an object")
    return answer


async def _server_sent(content: aiohttp.StreamReader, route: str) -> AsyncIterator[Json]:
    waiting = b""
    async for block in content.iter_any():
        *whole, waiting = (waiting + block).split(b"\n\n")
        for event in whole:
            text = event.removeprefix(b"data:").strip()
            if text == b"[DONE]":
                return
            if text:
                yield _object(text.decode(errors="replace"), route)


# -- what a turn's answer must hold -------------------------------------------------------------


def _meta(answer: Json) -> Json:
    if "error" in answer:
        raise EngineError(f"/generate: the server refused: {_message(json.dumps(answer))}")
    meta = answer.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineError("/generate: the answer has no meta_info")
    return meta


def _sampled(answer: Json, num_told: int, num_likely: int) -> Sampled:
    """What an answer adds to `num_told` tokens; streams may repeat all tokens or send new ones."""
    meta = _meta(answer)
    finish = _finish(meta)
    entries, total = meta.get("output_token_logprobs"), meta.get("completion_tokens")
    if not isinstance(total, int):
        raise EngineError(f"/generate: completion_tokens is {total!r}, must be a number")
    if total == num_told:
        entries = []
    ids, logprobs = _pairs(entries, "output_token_logprobs")
    told_ids = answer.get("output_ids")
    if len(ids) == total:
        ids, logprobs = ids[num_told:], logprobs[num_told:]
    new = total - num_told
    if len(ids) != new or (ids and (not isinstance(told_ids, list) or told_ids[-new:] != ids)):
        raise EngineError(
            f"/generate: {len(ids)} log-probs for {new} new tokens, or for other tokens than "
            "output_ids; there must be one for each"
        )
    tops = _tops(meta.get("output_top_logprobs"), new, total, num_likely)
    return Sampled(ids, logprobs, _version(meta, total), finish, tops)


def _tops(entries: Any, new: int, total: int, num_likely: int) -> list[TopTokens | None]:
    """What is told beside the last `new` of `total` tokens; streams may repeat all of it."""
    if not entries or num_likely == 0 or new == 0:
        return [None] * new
    if not isinstance(entries, list) or len(entries) not in (new, total):
        raise EngineError(
            f"/generate: output_top_logprobs is not of {new} or {total} tokens; it must be a list "
            "with one entry for each"
        )
    return [_top(entry, num_likely) for entry in entries[-new:]]


def _top(entry: Any, num_likely: int) -> TopTokens:
    ids, logprobs = _pairs(entry, "output_top_logprobs", may_be_impossible=True)
    if len(ids) != num_likely:
        raise EngineError(
            f"/generate: output_top_logprobs has {len(ids)} tokens for a place; must be "
            f"{num_likely}, as asked"
        )
    return TopTokens(np.array([ids], np.int32), np.array([logprobs], np.float32))


def _finish(meta: Json) -> str:
    reason = meta.get("finish_reason")
    if reason is None:
        return ""
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind == "abort" and reason.get("status_code"):
        raise EngineError(f"/generate: the server gave up: {reason.get('message')}")
    if kind not in ("stop", "length", "abort"):
        raise EngineError(f"/generate: finish_reason is {reason!r}; must be stop, length or abort")
    return str(kind)


def _version(meta: Json, total: int) -> str:
    """The one version of all tokens: by the spans of an ended turn, else of the server now.

    The adapter never lets a request run across an update, so there is but one.
    """
    spans = meta.get("weight_versions") or []
    named = {str(span["version"]) for span in spans if span["end"] > span["start"] or total == 0}
    named.add(str(meta.get("weight_version")))
    return named.pop() if len(named) == 1 else " and ".join(sorted(named))


def _pairs(
    entries: Any, name: str, *, may_be_impossible: bool = False
) -> tuple[list[int], list[float]]:
    """Ids and log-probs of [[logprob, id, text], ...]; sampled tokens were possible."""
    if not isinstance(entries, list):
        raise EngineError(f"/generate: {name} is missing; the server must return log-probs")
    ids, logprobs = [], []
    for entry in entries:
        if not isinstance(entry, list) or len(entry) < 2 or not isinstance(entry[1], int):
            raise EngineError(f"/generate: {name} holds {entry!r}, must hold [logprob, id, text]")
        logprob = entry[0]
        is_sound = isinstance(logprob, int | float) and math.isfinite(logprob)
        least = -math.inf if may_be_impossible else _LEAST_LOGPROB
        if not is_sound or not least < logprob < _MARGIN:
            raise EngineError(
                f"/generate: {name}: token {entry[1]} has the log-prob {logprob}; must be finite"
            )
        ids.append(entry[1])
        logprobs.append(float(logprob))
    return ids, logprobs
