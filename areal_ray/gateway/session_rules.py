"""When a session ends, what becomes of it then, and whether another may start."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from pydantic import Field

from areal_ray.core.config import Config
from areal_ray.gateway.keys import hash_key
from areal_ray.gateway.session_book import SessionBook
from areal_ray.gateway.session_state import Session, SessionGroup, SessionState

IDLE_TIMEOUT = "idle_timeout"
SESSION_TIMEOUT = "session_timeout"
SUPERSEDED = "superseded"
NO_TURNS = "no_turns"
ENDED = "ended"
NOT_KEPT = "not_kept"
"""Of another provider's: it was there to be exported for long enough."""
_TIMEOUTS = (IDLE_TIMEOUT, SESSION_TIMEOUT)
_SWEEP_S = 1.0


class SessionsConfig(Config):
    """How long sessions last."""

    session_timeout_s: float = Field(3600.0, gt=0.0)
    """Longest life of a session; a call under way then is broken off. After it, as with the next
    one, it counts with the reward that it has, or is given within `feedback_timeout_s`; without one
    it is rejected, with the time-out as reason."""
    idle_timeout_s: float = Field(900.0, gt=0.0)
    """Longest silence of a session between two calls."""
    feedback_timeout_s: float = Field(600.0, ge=0.0)
    """How long a session that ended without a reward waits for one. Then it is unscored, which is
    no reward of 0. Set 0 where the recipe has a reward function for those."""
    text_kept_s: float = Field(86_400.0, ge=0.0)
    """How long a session that another provider served is kept for export after its end."""


class SessionRules:
    """What happens to the sessions of a book.

    Args:
        book: All sessions.
        config: Time-outs.
        clock: Seconds since the epoch.
    """

    def __init__(
        self, book: SessionBook, config: SessionsConfig, clock: Callable[[], float]
    ) -> None:
        self._book = book
        self._config = config
        self._clock = clock
        self._next_sweep_s = 0.0
        self._changes = asyncio.Event()
        self.num_slots = 0
        """Groups that training waits for."""
        self.ready: dict[str, SessionGroup] = {}
        """Groups that may be trained on and that nobody holds, the oldest first."""
        for session in list(book.sessions.values()):
            self.settle(session)
        for group in list(book.groups.values()):
            self.note(group)

    def headroom(self) -> int:
        """Groups that may be started."""
        groups = self._book.groups.values()
        return self.num_slots - sum(g.trains and not _is_admitted(g) for g in groups)

    def note(self, group: SessionGroup, *, is_first: bool = False) -> None:
        """A group may have become ready, before all others if told so, or be so no more."""
        if not group.is_sealed or group.is_held or not group.trains:
            self.ready.pop(group.key, None)
        elif is_first:
            self.ready = {group.key: group, **self.ready}
        else:
            self.ready[group.key] = group
        self._changes.set()

    async def changed(self) -> None:
        """Return when something may have changed.

        Waits for: a change, at most a second, which time-outs need.
        """
        self._changes.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SWEEP_S):
                await self._changes.wait()

    # -- a session's end -----------------------------------------------------------------------

    def end(self, session: Session, why: str = ENDED, **request: Any) -> None:
        """Nothing more may be called in a session; it is sealed once nothing is under way.

        `request`: `SessionRequest.facts` of the one that asks for it.
        """
        self._book.write(session, "end", why=why, **request)
        self.settle(session)

    def supersede(self, session: Session) -> None:
        """Its key is given to another session."""
        if session.total_reward is None and not session.start.upstream:
            self.reject(session, SUPERSEDED)
        else:
            self.end(session, SUPERSEDED)

    def live_of_key(self, key: str) -> Session | None:
        """The session that a fixed key has here, if it may be called."""
        session = self._book.of_key(hash_key(key))
        return session if isinstance(session, Session) and not session.ended_s else None

    def let_go(self, key: str) -> None:
        """A fixed key has a session at another replica from now on."""
        old = self.live_of_key(key)
        if old is not None:
            self.supersede(old)

    def reject(self, session: Session, reason: str) -> None:
        """It will not be trained."""
        self._book.finish(session, SessionState.REJECTED, reason)
        self.note(session.group)

    def settle(self, session: Session) -> None:
        """Seal or reject a session that ended, if nothing is to be waited for."""
        is_due = session.ended_s and session.state in (SessionState.OPEN, SessionState.REWARDED)
        if not is_due or session.num_inside:
            return
        if not session.has_samples:
            self.reject(session, session.end_reason if _is_late(session) else NO_TURNS)
            return
        if session.total_reward is None and not session.start.upstream:
            if self._clock() < session.ended_s + self._config.feedback_timeout_s:
                return
            if _is_late(session):
                self.reject(session, session.end_reason)
                return
        self._book.write(session, "state", state=str(SessionState.SEALED))
        self.note(session.group)

    def rest_s(self, session: Session) -> float:
        """How long a session may still last."""
        return session.start.started_s + self._config.session_timeout_s - self._clock()

    def sweep(self) -> None:
        """End sessions whose time is up; looks at most once a second."""
        now = self._clock()
        if now < self._next_sweep_s:
            return
        self._next_sweep_s = now + _SWEEP_S
        config = self._config
        for session in list(self._book.sessions.values()):
            if session.start.upstream and 0 < session.ended_s < now - config.text_kept_s:
                self.reject(session, NOT_KEPT)
                continue
            if session.state not in (SessionState.OPEN, SessionState.REWARDED):
                continue
            if session.ended_s:
                self.settle(session)
            elif now >= session.start.started_s + config.session_timeout_s:
                self.end(session, SESSION_TIMEOUT)
            elif not session.num_inside and now >= session.active_s + config.idle_timeout_s:
                self.end(session, IDLE_TIMEOUT)


def _is_late(session: Session) -> bool:
    return session.end_reason in _TIMEOUTS


def _is_admitted(group: SessionGroup) -> bool:
    return all(session.state is SessionState.ADMITTED for session in group.sessions)
