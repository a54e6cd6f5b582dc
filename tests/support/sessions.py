"""Sessions of a gateway over a journal in a folder, with a clock that a test moves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from areal_ray.gateway import keys
from areal_ray.gateway.answer import Answers
from areal_ray.gateway.app import Service
from areal_ray.gateway.call import CallHints
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.peers import Peers
from areal_ray.gateway.record_policy import RecordPolicy
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.server import GatewayServer
from areal_ray.gateway.session_journal import SessionJournal
from areal_ray.gateway.session_requests import SessionRequests
from areal_ray.gateway.session_routes import make_sessions_app
from areal_ray.gateway.session_search import SessionRequest
from areal_ray.gateway.sessions import ReadyGroup, Sessions, SessionsConfig
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.upstream import Upstreams
from areal_ray.gateway.upstream_config import UpstreamConfig
from tests.support.scripted_sampler import Said, ScriptedSampler
from tests.support.templates import ScriptedTurn
from tests.support.tiny_models import tiny_tokenizer

ADMIN_KEY = "ar_the-admin-key-of-these-tests-000"
FIXED_KEY = "deployed-agent-0123456789"
HELLO = [{"role": "user", "content": "What is 12 plus 30?"}]


@dataclass
class Clock:
    """Wall time that stands until a test moves it."""

    now_s: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


_TOKENIZER = tiny_tokenizer()
_TEMPLATE = ChatTemplate(_TOKENIZER)
_FORMAT = ReplyFormat(_TEMPLATE)


def new_recorder() -> Recorder:
    """An empty record, as the gateway makes them."""
    return Recorder(_TEMPLATE, RecordPolicy(), _FORMAT)


def sampled_ids(said: str) -> list[int]:
    """What the scripted model samples for a text."""
    return [*_TOKENIZER.encode(said, add_special_tokens=False), _TOKENIZER.eos_token_id]


@dataclass
class Desk:
    """Sessions and what HTTP would ask of them, without HTTP."""

    folder: Path
    name: str = "a"
    clock: Clock = field(default_factory=Clock)
    config: Mapping[str, Any] = field(default_factory=dict)
    segment_bytes: int = 16 * 2**20
    least_siblings: int = 1
    peers: Callable[[], Peers] = Peers
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)

    def __post_init__(self) -> None:
        self.restart()

    def __enter__(self) -> "Desk":
        return self

    def __exit__(self, *_: object) -> None:
        """Not left to a finalizer, which may run in any thread and wait there for this one."""
        self.runner.close()

    def restart(self) -> None:
        """As after the death of the process: the journal alone is left."""
        self.sessions = Sessions(
            SessionsConfig(**self.config),
            new_recorder,
            SessionJournal(self.folder, self.name, segment_bytes=self.segment_bytes),
            admin_key_hash=keys.hash_key(ADMIN_KEY),
            peers=self.peers,
            clock=self.clock,
        )
        self.requests = SessionRequests(self.sessions, self.clock, ("big",), self.least_siblings)

    def ask(self, verb: str, key: str = ADMIN_KEY, **body: Any) -> dict[str, Any]:
        """`start`, `set_reward` or `end`."""
        answer: dict[str, Any] = getattr(self.requests, verb)(SessionRequest(key, body))
        return answer

    def start(self, **body: Any) -> dict[str, Any]:
        """A session of one that training has a slot for."""
        self.sessions.open_slot()
        return self.ask("start", **{"task_id": "t", **body})

    def enter(self, key: str, path: str = "", **headers: str) -> Any:
        """Let a call in."""
        told = {name.replace("_", "-"): text for name, text in headers.items()}
        return self.runner.run(self.sessions.enter(key, path, CallHints(told)))

    def call(self, key: str, said: str = "42", reply_id: str = "", **headers: str) -> str:
        """One whole model call; returns the id its client knows it by."""
        record = self.enter(key, **headers)
        turn = record.recorder.open_turn(HELLO)
        record.recorder.close_turn(turn, ScriptedTurn(sampled_ids(said)))
        reply_id = reply_id or turn.handle
        record.turn_over(turn.turn_id, reply_id)
        self.sessions.leave(record)
        return reply_id

    def rewarded(self, reward: float = 1.0, said: str = "42", **body: Any) -> dict[str, Any]:
        """A session that was called, rewarded and ended."""
        started = self.start(**body)
        self.call(started["api_key"], said)
        self.ask("set_reward", started["api_key"], reward=reward)
        self.ask("end", started["api_key"])
        return started

    def ready(self, timeout_s: float = 60.0) -> ReadyGroup:
        """The next group that is ready."""
        return self.runner.run(asyncio.wait_for(self.sessions.next_ready(), timeout_s))

    def journal_bytes(self) -> bytes:
        """All that is on disk."""
        return b"".join(path.read_bytes() for path in sorted(self.folder.glob("*.seg")))


def sampled(group: ReadyGroup) -> list[list[int]]:
    """Ids that train, by trajectory."""
    return [t.token_ids[np.nonzero(t.loss_mask)].tolist() for t in group.trajectories]


@dataclass
class Replica:
    """A gateway with sessions on loopback."""

    sessions: Sessions
    sampler: ScriptedSampler
    service: Service
    server: GatewayServer
    app: Any
    url: str = ""

    def client(self, key: str, path: str = "/v1", **options: Any) -> Any:
        """The real SDK, pointed here."""
        from openai import (
            AsyncOpenAI,
        )  # loads for seconds, which tests without HTTP have no use for

        return AsyncOpenAI(base_url=self.url + path, api_key=key, max_retries=0, **options)

    async def rl(
        self, path: str, key: str = ADMIN_KEY, headers: Mapping[str, str] = {}, **body: Any
    ) -> tuple[int, Any, Mapping[str, str]]:
        """One request about sessions: status, body, headers."""
        auth = {"authorization": f"Bearer {key}", **headers} if key else dict(headers)
        async with (
            aiohttp.ClientSession() as client,
            client.post(self.url + path, json=body, headers=auth) as answer,
        ):
            return answer.status, json.loads(await answer.read()), answer.headers

    async def stop(self) -> None:
        """No more calls; what is open ends."""
        await self.server.stop()
        await self.app.close()
        if self.service.upstreams is not None:
            await self.service.upstreams.close()
        self.sessions.close()


async def serve_replica(
    folder: Path,
    script: Sequence[Said],
    *,
    name: str = "a",
    port: int = 0,
    peers: Callable[[], Peers] = Peers,
    grace_s: float = 2.0,
    upstreams: Mapping[str, UpstreamConfig] = {},
    upstream_keys: Mapping[str, str] = {},
    **config: Any,
) -> Replica:
    """A gateway over a journal, listening on loopback."""
    sampler = ScriptedSampler(_TOKENIZER, script)
    answers = Answers(_TEMPLATE, _FORMAT, sampler, limits=CallLimits(256, 2048))
    sessions = Sessions(
        SessionsConfig(**config),
        new_recorder,
        SessionJournal(folder, name),
        admin_key_hash=keys.hash_key(ADMIN_KEY),
        peers=peers,
    )
    others = Upstreams(upstreams, upstream_keys, timeout_s=60.0)
    service = Service(answers=answers, door=sessions, upstreams=others)
    app = make_sessions_app(service, sessions)
    server = GatewayServer(app, port=port, grace_s=grace_s)
    replica = Replica(sessions, sampler, service, server, app)
    replica.url = await server.start()
    return replica


@asynccontextmanager
async def serving_sessions(
    folder: Path, script: Sequence[Said], **options: Any
) -> AsyncGenerator[Replica, None]:
    """`serve_replica`, stopped at the end; nothing of it may have been a defect."""
    replica = await serve_replica(folder, script, **options)
    try:
        yield replica
    finally:
        await replica.stop()
    assert replica.service.counts.num_defects == 0
