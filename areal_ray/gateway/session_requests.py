"""What `/rl/...` asks for, answered from the sessions: AReaL's routes and statuses."""

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from areal_ray.gateway import keys
from areal_ray.gateway.call import CallError
from areal_ray.gateway.conversation_names import hashed_name
from areal_ray.gateway.fields import read_count, read_number, read_text, refuse
from areal_ray.gateway.keys import Scope
from areal_ray.gateway.session_book import PastSession, PastStart
from areal_ray.gateway.session_export import exported
from areal_ray.gateway.session_state import Session, SessionGroup, SessionState, Start
from areal_ray.gateway.sessions import Caller, Sessions, no_session, session_over

_MOST_SIBLINGS = 256
_MOST_TEXT = 256
_MOST_REWARD = 1e9
_RETRY_S = 2.0
_STYLES = ("individual", "concat", "tree")
_WAIT_S = 120.0
_LOOK_S = 0.05
_REPLY_PREFIX = re.compile("[a-z]+[-_]")


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """One request to `/rl/...` or `/export_trajectories`."""

    key: str
    """As the client sent it."""
    body: Mapping[str, Any]
    idempotency_key: str = ""
    """Of the header; the body's `request_id` comes first."""

    def text(self, name: str, *, is_needed: bool = False) -> str:
        """A text of the body.

        Raises:
            CallError: 400.
        """
        text = read_text(self.body, name)
        if len(text) > _MOST_TEXT * 2 or (is_needed and not text):
            refuse(name, f"has {len(text)} characters; must have {int(is_needed)} to 512")
        return text

    @property
    def request_id(self) -> str:
        """What a request that is sent again is known by; empty if it has none."""
        return self.text("request_id") or self.idempotency_key[: _MOST_TEXT * 2]


class SessionRequests:
    """Answers requests about sessions.

    Args:
        sessions: Of this replica.
        clock: Seconds since the epoch.
    """

    def __init__(self, sessions: Sessions, clock: Callable[[], float]) -> None:
        self._sessions = sessions
        self._book = sessions.book
        self._rules = sessions.rules
        self._clock = clock

    # -- start ---------------------------------------------------------------------------------

    def start(self, request: SessionRequest) -> dict[str, Any]:
        """`{task_id, group_size = 1, api_key?, request_id?}`, with the admin key.

        Raises:
            CallError: 400, 401, 409 (the request id was another request's) or 429 (training wants
                no group now).
        """
        self._admin(request)
        self._rules.sweep()
        task_id, fixed = request.text("task_id", is_needed=True), request.text("api_key")
        size = read_count(request.body, "group_size") or 1
        if size > _MOST_SIBLINGS:
            refuse("group_size", f"is {size}; must be <= {_MOST_SIBLINGS}")
        digest = _digest(task_id, size, fixed)
        past = self._book.started_by(request.request_id)
        if past is not None:
            return self._told_again(request, past, digest, fixed)
        if fixed:
            self._make_room(fixed, size)
        if self._rules.headroom() < 1:
            raise CallError(
                429,
                "no_capacity",
                "sessions: training wants no more now. Try again later",
                retry_after_s=_RETRY_S,
            )
        name, now = self._sessions.name, self._clock()
        group_key = keys.new_id("g", name)
        starts = []
        for _ in range(size):
            nonce = secrets.token_bytes(16)
            key = fixed or keys.session_key(request.key, nonce, name)
            starts.append(
                Start(
                    session_id=keys.new_id("s", name),
                    group_key=group_key,
                    task_id=task_id,
                    key_hash=keys.hash_key(key),
                    is_agent_key=bool(fixed),
                    nonce=nonce,
                    started_s=now,
                    request_id=request.request_id,
                    request_digest=digest,
                )
            )
        self._book.start(starts)
        return self._told(request, group_key, [(s.session_id, s.nonce) for s in starts], fixed)

    def _make_room(self, fixed: str, size: int) -> None:
        """Take a fixed key from its session of the moment, if another may start."""
        weakness = keys.weakness(fixed)
        if keys.replica_of(fixed):
            weakness = "looks like a session's; must be one of your own, with another beginning"
        if weakness:
            refuse("api_key", weakness)
        hashed = keys.hash_key(fixed)
        if self._sessions.is_admin(hashed):
            refuse("api_key", "is the admin key; must be another")
        if size > 1:
            refuse("group_size", "must be 1 where api_key is given: a key has one session")
        old = self._book.of_key(hashed)
        if not isinstance(old, Session) or old.ended_s:
            return
        frees_its_slot = old.total_reward is None
        if not frees_its_slot or self._rules.headroom() >= 0:
            self._rules.supersede(old)

    def _told_again(
        self, request: SessionRequest, past: PastStart, digest: str, fixed: str
    ) -> dict[str, Any]:
        first_key = fixed or keys.session_key(request.key, past.sessions[0][1], self._sessions.name)
        is_same_key = keys.is_same(keys.hash_key(first_key), past.sessions[0][2])
        if past.digest != digest or not is_same_key:
            raise CallError(
                409,
                "request_id_reused",
                f"request_id {request.request_id[:80]!r}: was another request's. Choose a new one",
                param="request_id",
            )
        told = [(session_id, nonce) for session_id, nonce, _ in past.sessions]
        return self._told(request, past.group_key, told, fixed)

    def _told(
        self,
        request: SessionRequest,
        group_key: str,
        started: Sequence[tuple[str, bytes]],
        fixed: str,
    ) -> dict[str, Any]:
        sessions = []
        for session_id, nonce in started:
            key = fixed or keys.session_key(request.key, nonce, self._sessions.name)
            sessions.append({"session_id": session_id, "api_key": key})
        return {**sessions[0], "group_id": group_key, "sessions": sessions}

    # -- reward and end ------------------------------------------------------------------------

    def set_reward(self, request: SessionRequest) -> dict[str, Any]:
        """`{reward, session_id?, interaction_id?, turn?, conversation_id?, request_id?}`.

        Raises:
            CallError: 400, 401, 404, 409 (training has it) or 410.
        """
        caller = self._sessions.identify(request.key)
        reward = read_number(request.body, "reward", -_MOST_REWARD, _MOST_REWARD)
        if reward is None:
            refuse("reward", "is missing; must be a number")
        past = self._served_before(caller, request)
        if past is not None:
            return _rewarded(past.session_id, past.reward, past.num_turns)
        session = self._found(caller, request)
        turn = self._turn(session, request)
        if request.request_id and request.request_id in session.requests:
            return _told_reward(session)
        if session.state is SessionState.ADMITTED or session.group.is_held:
            raise CallError(
                409,
                "session_admitted",
                f"session {session.session_id}: training has taken it; its reward is fixed",
            )
        self._book.write(session, "reward", turn=turn, reward=reward, r=request.request_id)
        self._rules.settle(session)
        return _told_reward(session)

    def end(self, request: SessionRequest) -> dict[str, Any]:
        """`{session_id?, request_id?}`; the answer says how many calls were recorded.

        Raises:
            CallError: 400, 401, 404 or 410 (it had ended before, by another request).
        """
        caller = self._sessions.identify(request.key)
        past = self._served_before(caller, request)
        if past is not None:
            return _ended(past.session_id, past.num_turns)
        session = self._found(caller, request)
        is_again = bool(request.request_id) and request.request_id in session.requests
        if session.ended_s and not is_again:
            raise session_over(session)
        num_turns = session.recorder.num_turns
        if not is_again:
            self._rules.end(session, request_id=request.request_id)
        return _ended(session.session_id, num_turns)

    def _served_before(self, caller: Caller, request: SessionRequest) -> PastSession | None:
        """A session that is over since, and had this request."""
        past: Session | PastSession | None = caller.session
        if caller.scope is Scope.ADMIN:
            past = self._book.past.get(request.text("session_id"))
        is_past = isinstance(past, PastSession) and request.request_id in past.request_ids
        return past if is_past and isinstance(past, PastSession) else None

    def _found(self, caller: Caller, request: SessionRequest) -> Session:
        """The session that is meant, among those the caller may see."""
        session_id = request.text("session_id")
        conversation, reply = request.text("conversation_id"), request.text("interaction_id")
        found: Session | PastSession | None = None
        if session_id:
            found = self._book.sessions.get(session_id) or self._own_past(caller, session_id)
        elif conversation:
            found = self._of_conversation(caller, conversation)
        elif reply and (caller.scope is not Scope.SESSION):
            found = self._book.of_reply(_bare(reply))
        elif caller.scope is Scope.ADMIN:
            refuse("session_id", "is missing; must be given with the admin key")
        else:
            found = caller.session
        if isinstance(found, PastSession):
            raise session_over(found)
        if found is None or not caller.may_see(found):
            raise no_session(session_id or conversation or reply)
        return found

    def _own_past(self, caller: Caller, session_id: str) -> PastSession | None:
        past = self._book.past.get(session_id)
        return past if caller.scope is Scope.ADMIN or caller.session == past else None

    def _of_conversation(self, caller: Caller, name: str) -> Session | None:
        found = self._book.of_conversation(hashed_name(name))
        mine = [session for session in found if caller.may_see(session)]
        if len(mine) > 1:
            told = ", ".join(session.session_id for session in mine[:4])
            raise CallError(
                409,
                "ambiguous_conversation",
                f"conversation_id: {len(mine)} sessions have it ({told}). Name the session",
                param="conversation_id",
            )
        return mine[0] if mine else None

    def _turn(self, session: Session, request: SessionRequest) -> int:
        """The turn that is meant; -1 = the session as a whole."""
        turn, reply = request.body.get("turn"), request.text("interaction_id")
        if turn is None and not reply:
            return -1
        if reply:
            turn = session.calls.get(_bare(reply))
        elif type(turn) is not int or turn < 0:
            refuse("turn", "must be the number of a turn, from 0 on")
        if turn is None or not session.recorder.has_reply(turn):
            where = "interaction_id" if reply else "turn"
            raise CallError(
                404,
                "turn_not_found",
                f"{where}: session {session.session_id} has no such turn",
                param=where,
            )
        return int(turn)

    # -- export --------------------------------------------------------------------------------

    async def export(self, request: SessionRequest) -> dict[str, Any]:
        """`{session_id | group_id, style = individual, discount = 1, wait_s = 120}`, admin key.

        Waits for: the sessions to end, at most `wait_s`.

        Raises:
            CallError: 400, 401, 404, 409 (still open) or 410 (it was trained or rejected).
        """
        self._admin(request)
        style = request.text("style") or "individual"
        if style not in _STYLES:
            refuse("style", f"is {style[:40]!r}; must be one of {', '.join(_STYLES)}")
        discount = read_number(request.body, "discount", 0.0, 1.0)
        wait_s = read_number(request.body, "wait_s", 0.0, 3600.0)
        sessions = await self._sealed(request, _WAIT_S if wait_s is None else wait_s)
        discount = 1.0 if discount is None else discount
        told = await asyncio.to_thread(lambda: [exported(s, style, discount) for s in sessions])
        return {"style": style, "sessions": told}

    async def _sealed(self, request: SessionRequest, wait_s: float) -> list[Session]:
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            sessions = self._asked_for(request)
            early = (SessionState.OPEN, SessionState.REWARDED)
            is_open = [one for one in sessions if one.state in early]
            if not is_open:
                return sessions
            if asyncio.get_running_loop().time() >= deadline:
                raise CallError(
                    409,
                    "session_open",
                    f"session {is_open[0].session_id}: has not ended. End it before its export",
                )
            await asyncio.sleep(_LOOK_S)
            self._rules.sweep()

    def _asked_for(self, request: SessionRequest) -> list[Session]:
        session_id, group_key = request.text("session_id"), request.text("group_id")
        if group_key:
            group: SessionGroup | None = self._book.groups.get(group_key)
            if group is None:
                raise no_session(group_key)
            return list(group.sessions)
        if not session_id:
            refuse("session_id", "is missing; must be given, or group_id")
        if session_id in self._book.past:
            raise session_over(self._book.past[session_id])
        if session_id not in self._book.sessions:
            raise no_session(session_id)
        return [self._book.sessions[session_id]]

    def _admin(self, request: SessionRequest) -> None:
        if self._sessions.identify(request.key).scope is not Scope.ADMIN:
            _not_admin()


def _not_admin() -> NoReturn:
    raise CallError(401, "admin_key_required", "API key: must be the admin key for this")


def _bare(reply_id: str) -> str:
    """Without the prefix that a dialect gives it."""
    return _REPLY_PREFIX.sub("", reply_id, count=1)


def _digest(task_id: str, size: int, fixed: str) -> str:
    told = [task_id, size, keys.hash_key(fixed).hex() if fixed else ""]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=12).hexdigest()


def _told_reward(session: Session) -> dict[str, Any]:
    return _rewarded(session.session_id, session.total_reward, session.recorder.num_turns)


def _rewarded(session_id: str, reward: float | None, num_turns: int) -> dict[str, Any]:
    return {
        "message": "the reward is set",
        "session_id": session_id,
        "reward": reward,
        "interaction_count": num_turns,
    }


def _ended(session_id: str, num_turns: int) -> dict[str, Any]:
    return {
        "message": "the session has ended",
        "session_id": session_id,
        "interaction_count": num_turns,
    }
