"""Load on a model server that speaks a dialect, and how it bears it.

Waits for: the server, at most `timeout_s` for a request; unblocked by its answer, an error or that
deadline.
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from areal_ray.errors import ArealRayError
from areal_ray.gateway.load_dialects import DIALECTS, DialectName, Heard, told_error, told_message
from areal_ray.telemetry.load_table import LoadTable

_QUANTILES = (50, 95, 99)
_LOOK_S = 10.0
_CONNECT_S = 30.0
_LONGEST_EVENT_BYTES = 2**22
_KEY_REFUSED = (401, 403)
_MOST_SAID = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What to ask of whom; requests or seconds bound it, whichever is reached first."""

    url: str
    """With or without `/v1` at its end."""
    dialect: DialectName = "chat"
    concurrency: int = 64
    num_requests: int | None = None
    seconds: float | None = None
    """No request begins after; those that run end."""
    is_streamed: bool = True
    max_tokens: int = 64
    prompt_tokens: int = 32
    """About: it is that many short words, no two prompts alike."""
    model: str = ""
    """Empty = the first that the server lists."""
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of a time in milliseconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How the server bore it; a figure that nothing was measured for is None."""

    model: str
    seconds: float
    num_requests: int
    num_answered: int
    num_tokens: int
    """As the server counts them; of a stream without a count, its pieces."""
    num_pieces: int
    """Of streams: events that held something new."""
    errors: Mapping[str, int]
    """Requests that were not answered whole, by kind."""
    requests_per_s: float
    """Answered."""
    tokens_per_s: float
    first_token_ms: Spread | None
    between_pieces_ms: Spread | None
    """Inter-token latency; a piece may hold several tokens."""
    request_ms: Spread | None


@dataclass(slots=True)
class _Tally:
    """What has come so far; times in seconds."""

    errors: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    request_s: list[float] = field(default_factory=list)
    num_requests: int = 0
    num_tokens: int = 0
    num_pieces: int = 0


class _Refused(Exception):
    """A request that was not answered whole, with the kind of error."""


async def measure_load(
    plan: LoadPlan, key: str = "", clock: Callable[[], float] = time.perf_counter
) -> LoadReport:
    """Put the load on the server; returns once every request has ended.

    Args:
        plan: What to ask.
        key: Of the server; empty = none is sent.
        clock: Seconds.

    Raises:
        ArealRayError: Nobody answers at the address, or the key is refused there.
    """
    headers = {**DIALECTS[plan.dialect].headers}
    if key:
        headers |= {"authorization": f"Bearer {key}", "x-api-key": key}
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=plan.timeout_s, sock_connect=_CONNECT_S),
        read_bufsize=_LONGEST_EVENT_BYTES,
    ) as session:
        model = await _model(session, plan)
        load = _Load(session, plan, model, clock)
        began = clock()
        try:
            await load.run()
        except* ArealRayError as refused:
            raise refused.exceptions[0] from None
        return _report(load.tally, model, clock() - began)


async def _model(session: aiohttp.ClientSession, plan: LoadPlan) -> str:
    """The model to name; also whether there is a server at all."""
    url = _base(plan.url) + "/models"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=_LOOK_S)) as response:
            text = await response.text()
            status = response.status
    except (aiohttp.ClientError, aiohttp.InvalidURL, TimeoutError, ValueError) as error:
        raise ArealRayError(
            f"URL: {plan.url}: no model server answers ({error or 'it is silent'}); must be the "
            "address that agents are given, as http://127.0.0.1:8000/v1"
        ) from error
    if status in _KEY_REFUSED:
        raise _key_refused(plan, status)
    if plan.model:
        return plan.model
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        return "policy"


def _key_refused(plan: LoadPlan, status: int) -> ArealRayError:
    return ArealRayError(
        f"URL: {plan.url}: the key is refused ({status}). Name the variable that holds it by "
        "--api-key-env, or be asked for it by --ask-api-key"
    )


def load_table(plan: LoadPlan, report: LoadReport) -> LoadTable:
    """The report for people."""
    way = "streamed" if plan.is_streamed else "whole"
    times = {
        "first token": report.first_token_ms,
        "between pieces": report.between_pieces_ms,
        "request": report.request_ms,
    }
    return LoadTable(
        f"{plan.url}, {report.model}: {plan.dialect}, {way}, {plan.concurrency} at a time",
        {name: (t.p50, t.p95, t.p99) if t else None for name, t in times.items()},
        {
            "answered": f"{report.num_answered:,} of {report.num_requests:,} "
            f"in {report.seconds:,.1f} s",
            "requests/s": f"{report.requests_per_s:,.1f}",
            "tokens/s": f"{report.tokens_per_s:,.1f}",
        },
        report.errors,
    )


class _Load:
    """The requests of a plan on their way."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        plan: LoadPlan,
        model: str,
        clock: Callable[[], float],
    ) -> None:
        self.tally = _Tally()
        self._session = session
        self._plan = plan
        self._model = model
        self._clock = clock
        self._numbers = itertools.count()
        self._said: dict[int, str] = {}
        self._dialect = DIALECTS[plan.dialect]
        self._url = _base(plan.url) + self._dialect.path

    async def run(self) -> None:
        """All of them, `concurrency` at a time."""
        ends_at = None if self._plan.seconds is None else self._clock() + self._plan.seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.concurrency):
                group.create_task(self._ask_on(ends_at))

    async def _ask_on(self, ends_at: float | None) -> None:
        """One after the other, until there are enough."""
        most = self._plan.num_requests
        while ends_at is None or self._clock() < ends_at:
            number = next(self._numbers)
            if most is not None and number >= most:
                return
            self.tally.num_requests += 1
            try:
                await self._ask(number)
            except _Refused as error:
                self.tally.errors[str(error)] += 1
            except TimeoutError:
                self.tally.errors["timed out"] += 1
            except aiohttp.ClientConnectorError:
                self.tally.errors["not connected"] += 1
            except aiohttp.ClientError:
                self.tally.errors["broke off"] += 1

    async def _ask(self, number: int) -> None:
        plan = self._plan
        prompt = f"{number}:" + " and so on" * max(1, plan.prompt_tokens // 3)
        body = self._dialect.body(self._model, prompt, plan.max_tokens, stream=plan.is_streamed)
        began = self._clock()
        async with self._session.post(self._url, json=body) as response:
            if response.status in _KEY_REFUSED:  # servers may list their models without one
                raise _key_refused(plan, response.status)
            if response.status != 200:
                raise _Refused(self._why(response.status, await response.read()))
            if plan.is_streamed:
                await self._follow(response, began)
            else:
                heard = self._heard(await response.read())
                self.tally.num_tokens += heard.num_tokens or 0
        self.tally.request_s.append(self._clock() - began)

    def _why(self, status: int, text: bytes) -> str:
        """The status with what the server said to the first that got it."""
        if status not in self._said:
            said = ""
            with contextlib.suppress(ValueError):
                said = told_message(json.loads(text))
            self._said[status] = f"HTTP {status}: {said[:_MOST_SAID]}" if said else f"HTTP {status}"
        return self._said[status]

    async def _follow(self, response: aiohttp.ClientResponse, began: float) -> None:
        tally, last = self.tally, 0.0
        num_pieces = num_tokens = 0
        has_ended = False
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            text = line[5:].strip()
            if text == b"[DONE]":
                has_ended = True
                continue
            heard = self._heard(text)
            num_tokens = heard.num_tokens or num_tokens
            has_ended = has_ended or heard.is_end
            if heard.is_piece:
                now = self._clock()
                if num_pieces:
                    tally.between_s.append(now - last)
                else:
                    tally.first_s.append(now - began)
                num_pieces, last = num_pieces + 1, now
        tally.num_pieces += num_pieces
        tally.num_tokens += num_tokens or num_pieces
        if not has_ended:
            raise _Refused("broke off")

    def _heard(self, text: bytes) -> Heard:
        try:
            content = json.loads(text)
            if kind := told_error(content):
                raise _Refused(f"told: {kind}")
            return self._dialect.heard(content)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _Refused(f"not {self._plan.dialect} JSON") from error


def _base(url: str) -> str:
    url = url.rstrip("/")
    return url if url.endswith("/v1") else url + "/v1"


def _report(tally: _Tally, model: str, seconds: float) -> LoadReport:
    num_answered = len(tally.request_s)
    return LoadReport(
        model=model,
        seconds=seconds,
        num_requests=tally.num_requests,
        num_answered=num_answered,
        num_tokens=tally.num_tokens,
        num_pieces=tally.num_pieces,
        errors=dict(tally.errors.most_common()),
        requests_per_s=num_answered / seconds,
        tokens_per_s=tally.num_tokens / seconds,
        first_token_ms=_spread(tally.first_s),
        between_pieces_ms=_spread(tally.between_s),
        request_ms=_spread(tally.request_s),
    )


def _spread(times_s: list[float]) -> Spread | None:
    if not times_s:
        return None
    return Spread(*(round(float(q) * 1000, 3) for q in np.percentile(times_s, _QUANTILES)))
