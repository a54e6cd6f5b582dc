"""The door of an actor that runs episodes itself: a key for each episode, which ends with it.

Beside model calls an episode's agent may score itself, by `POST /rl/set_reward {"reward": 1.0}`
under its key.

settled() waits for: the calls of an episode to be over; the edge breaks them off when the client's
sockets close.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request

from areal_ray.core.numeric import LARGEST_REWARD, as_number, is_reward
from areal_ray.gateway.call import CallError, CallHints
from areal_ray.gateway.door import PROMPT_FILLS_CONTEXT, SessionRecord, unknown_key
from areal_ray.gateway.exchange import Exchange
from areal_ray.gateway.fields import refuse
from areal_ray.gateway.keys import hash_key
from areal_ray.gateway.limits import EdgeLimits, parsed, unpacked

_SETTLE_S = 5.0


@dataclass(slots=True, eq=False)
class EpisodeSession:
    """One episode as the edge sees it."""

    record: SessionRecord
    max_turns: int
    key: str
    """What its agent sends."""
    limit_reached: str = ""
    """Which limit cut the episode short; empty if none did."""
    reward: float | None = None
    """If the agent scored itself."""
    model_s: float = 0.0
    """Wall time in which at least one call was under way."""
    num_turns: int = 0
    num_inside: int = 0
    """Calls under way."""
    entered_s: float = 0.0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ended_by(self) -> str:
        """Which limit ended it, be it that of the context window; empty if none did."""
        return self.limit_reached or (PROMPT_FILLS_CONTEXT if self.record.is_full else "")


class EpisodeDoor:
    """Lets the agents of running episodes in; a `Door`."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, EpisodeSession] = {}
        """By the key's hash: how long a look-up takes says nothing of a key."""
        self._inside: dict[int, EpisodeSession] = {}

    def open(self, record: SessionRecord, max_turns: int) -> EpisodeSession:
        """Let an episode's agent in from now on."""
        session = EpisodeSession(record, max_turns, f"ar_{secrets.token_urlsafe(24)}")
        session.idle.set()
        self._sessions[hash_key(session.key)] = session
        return session

    async def close(self, session: EpisodeSession) -> None:
        """Let it in no more, and wait until its calls are over, some seconds at most."""
        self._sessions.pop(hash_key(session.key), None)
        try:
            async with asyncio.timeout(_SETTLE_S):
                await session.idle.wait()
        except TimeoutError:
            pass  # a turn that is still open leaves no trace in the record

    def identify(self, key: str) -> EpisodeSession:
        """See `Door.identify`: the episode of a key.

        Raises:
            CallError: 401: there is none, or it is over.
        """
        found = self._sessions.get(hash_key(key))
        if found is None:
            raise unknown_key(key)
        return found

    async def enter(self, key: str, path_session: str, hints: CallHints) -> SessionRecord:
        """See `Door.enter`; a session in the path means nothing here."""
        session = self.identify(key)
        if session.num_turns >= session.max_turns:
            session.limit_reached = f"agent.max_turns = {session.max_turns}"
            raise CallError(410, "session_over", f"{session.limit_reached}: the episode is over")
        session.num_turns += 1
        session.num_inside += 1
        if session.num_inside == 1:
            session.entered_s = time.monotonic()
            session.idle.clear()
        self._inside[id(session.record)] = session
        return session.record

    def leave(self, record: SessionRecord) -> None:
        """See `Door.leave`."""
        session = self._inside[id(record)]
        session.num_inside -= 1
        if not session.num_inside:
            session.model_s += time.monotonic() - session.entered_s
            session.idle.set()
            del self._inside[id(record)]


def add_reward_route(app: FastAPI, door: EpisodeDoor) -> None:
    """Let agents score themselves."""

    @app.post("/rl/set_reward")
    async def set_reward(request: Request) -> dict[str, Any]:
        """Score the episode of the key; the last call counts."""
        limits = EdgeLimits()
        exchange = Exchange.of_route(request.scope, request.receive, limits)
        session = door.identify(exchange.key())
        body = parsed(unpacked(await exchange.body(), exchange.encoding, limits), limits)
        if body.get("interaction_id") is not None or body.get("turn") is not None:
            refuse("turn", "an episode is scored as a whole here. Leave it out")
        reward = as_number(body.get("reward"))
        if reward is None or not is_reward(reward):
            refuse("reward", f"must be a finite number within +-{LARGEST_REWARD:g}")
        session.reward = reward
        return {"session_id": session.record.session_id, "reward": reward}
