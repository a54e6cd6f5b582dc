"""A gateway on loopback with a scripted sampler behind it, and records that tests can look into."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI

from areal_ray.core.turn import TurnRequest
from areal_ray.gateway.answer import Answers
from areal_ray.gateway.app import Service, make_app
from areal_ray.gateway.call import CallError, CallHints
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.door import SessionRecord
from areal_ray.gateway.limits import EdgeLimits
from areal_ray.gateway.record_policy import RecordPolicy
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.reply_store import ReplyStore
from areal_ray.gateway.server import GatewayServer
from areal_ray.gateway.structured import Mode, StructuredOutput
from areal_ray.gateway.template import ChatTemplate
from tests.support.scripted_sampler import Said, ScriptedSampler
from tests.support.tiny_models import tiny_tokenizer

Script = Sequence[Said] | Callable[[TurnRequest], Said]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@dataclass
class KeptDoor:
    """Lets everybody in; keeps a record for each session in a path, and one for the rest."""

    template: ChatTemplate
    reply_format: ReplyFormat
    is_trained: bool = False
    records: dict[str, SessionRecord] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    num_inside: int = 0

    def identify(self, key: str) -> None:
        """See `Door.identify`."""

    async def enter(self, key: str, path_session: str, hints: CallHints) -> SessionRecord:
        """See `Door.enter`."""
        self.keys.append(key)
        if path_session == "over":
            raise CallError(410, "session_over", "session over: it has ended. Open another")
        if path_session == "later":
            raise CallError(429, "no_room", "no session is wanted now", retry_after_s=0.2)
        self.num_inside += 1
        return self.record(path_session)

    def leave(self, record: SessionRecord) -> None:
        """See `Door.leave`."""
        self.num_inside -= 1

    def record(self, session: str = "") -> SessionRecord:
        """Of a session, made when it is first asked for."""
        if session not in self.records:
            recorder = Recorder(self.template, RecordPolicy(), self.reply_format)
            self.records[session] = SessionRecord(session, recorder, self.is_trained)
        return self.records[session]


@dataclass
class Gateway:
    """What a test holds of a gateway."""

    sampler: Any
    """Usually a `ScriptedSampler`."""
    door: KeptDoor
    service: Service
    url: str = ""

    @property
    def recorder(self) -> Recorder:
        """Of calls without a session."""
        return self.door.record().recorder

    def client(self, path: str = "/v1", **options: Any) -> AsyncOpenAI:
        """The real SDK, pointed here."""
        options = {"max_retries": 0, "api_key": "key", **options}
        return AsyncOpenAI(base_url=self.url + path, **options)

    async def until_idle(self) -> None:
        """Return once nothing is sampled and nobody is inside; fails after 10 s."""
        async with asyncio.timeout(10):
            while self.sampler.num_running or self.door.num_inside:
                await asyncio.sleep(0.01)


def make_gateway(
    script: Script,
    *,
    tokenizer: Any = None,
    chat_template: str | None = None,
    limits: CallLimits | None = None,
    edge: EdgeLimits | None = None,
    is_trained: bool = False,
    replies: ReplyStore | None = None,
    sampler: Any = None,
    structured_output: Mode = "off",
    why_unconstrained: str = "",
) -> Gateway:
    """A gateway that listens nowhere yet; with `sampler` in place of a script."""
    tokenizer = tokenizer or tiny_tokenizer()
    template = ChatTemplate(tokenizer, chat_template)
    reply_format = ReplyFormat(template)
    sampler = sampler or ScriptedSampler(tokenizer, script)
    door = KeptDoor(template, reply_format, is_trained)
    answers = Answers(template, reply_format, sampler, limits=limits or CallLimits(64, 1024))
    service = Service(
        answers=answers,
        door=door,
        limits=edge or EdgeLimits(),
        replies=ReplyStore() if replies is None else replies,
        structured=StructuredOutput(
            template, reply_format, mode=structured_output, why_not=why_unconstrained
        ),
    )
    return Gateway(sampler, door, service)


@asynccontextmanager
async def serving(script: Script, **options: Any) -> AsyncGenerator[Gateway, None]:
    """`make_gateway` on a port of loopback; nothing of it may have been a defect."""
    gateway = make_gateway(script, **options)
    server = GatewayServer(make_app(gateway.service), grace_s=2.0)
    gateway.url = await server.start()
    try:
        yield gateway
    finally:
        await server.stop()
    assert gateway.service.counts.num_defects == 0
    assert gateway.service.counts.num_open == 0


@dataclass(frozen=True)
class Answered:
    """What came back to one request."""

    status: int
    headers: dict[str, str]
    text: str

    def json(self) -> Any:
        """The text as JSON that is JSON to everybody: without NaN and its like."""
        return json.loads(self.text, parse_constant=_no_json)

    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, `[DONE]` left out; each has to be well-formed."""
        assert self.text.endswith("\n\n")
        told = []
        for event in self.text[:-2].split("\n\n"):
            fields = dict(line.split(": ", 1) for line in event.split("\n"))
            if fields["data"] != "[DONE]":
                told.append(json.loads(fields["data"], parse_constant=_no_json))
                assert fields.get("event", told[-1].get("type")) == told[-1].get("type")
        return told


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


async def ask(
    gateway: Gateway,
    body: Any,
    *,
    method: str = "POST",
    path: str = "/v1/chat/completions",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> Answered:
    """One request straight into the application."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    pieces = [{"type": "http.request", "body": raw, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if pieces:
            return pieces.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(headers),
    }
    await make_app(gateway.service)(scope, receive, send)
    told = {name.decode(): text.decode() for name, text in sent[0]["headers"]}
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return Answered(sent[0]["status"], told, content.decode())
