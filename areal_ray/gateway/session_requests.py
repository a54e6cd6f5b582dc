"""What `/rl/...` asks for, answered from the sessions: AReaL's routes and statuses."""

import asyncio
import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from areal_ray.gateway import keys
from areal_ray.gateway.call import CallError
from areal_ray.gateway.fields import read_count, read_number, refuse
from areal_ray.gateway.keys import Scope
from areal_ray.gateway.session_book import PastStart
from areal_ray.gateway.session_export import exported
from areal_ray.gateway.session_search import SessionRequest, SessionSearch
from areal_ray.gateway.session_state import Session, SessionState, Start
from areal_ray.gateway.sessions import Sessions, session_over

_MOST_SIBLINGS = 256
_MOST_REWARD = 1e9
_MOST_TEXT_SESSIONS = 10_000
_RETRY_S = 2.0
_REWARD, _END = "set_reward", "end_session"
_STYLES = ("individual", "concat", "tree")
_WAIT_S = 120.0
_LOOK_S = 0.05


class SessionRequests:
    """Answers requests about sessions.

    Args:
        sessions: Of this replica.
        clock: Seconds since the epoch.
        upstreams: Names of providers that sessions may be started with, in place of the policy.
        least_siblings: Sessions that a group needs for training to take it.
    """

    def __init__(
        self,
        sessions: Sessions,
        clock: Callable[[], float],
        upstreams: Collection[str] = (),
        least_siblings: int = 1,
    ) -> None:
        self._upstreams = sorted(upstreams)
        self._least_siblings = least_siblings
        self._sessions = sessions
        self._book = sessions.book
        self._rules = sessions.rules
        self._search = SessionSearch(sessions)
        self._clock = clock

    # -- start ---------------------------------------------------------------------------------

    def start(self, request: SessionRequest) -> dict[str, Any]:
        """`{task_id, group_size = 1, api_key?, model?, request_id?}`, with the admin key.

        `model` names a provider of the recipe that answers in place of the policy; training takes
        nothing of such a session.

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
        upstream = self._upstream(request)
        if not upstream:
            _check_size(size, self._least_siblings, fixed)
        digest = _digest(task_id, size, fixed, upstream)
        past = self._book.started_by(request.request_id)
        if past is not None:
            return self._told_again(request, past, digest, fixed)
        self._check_stays()
        if fixed:
            self._make_room(fixed, size)
        if upstream:
            self._check_room(size)
        elif self._rules.headroom() < 1:
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
                    upstream=upstream,
                )
            )
        self._book.start(starts)
        return self._told(request, group_key, [(s.session_id, s.nonce) for s in starts], fixed)

    def _upstream(self, request: SessionRequest) -> str:
        name, known = request.text("model"), self._upstreams
        if name and name not in known:
            told = f"must be one of {', '.join(known)}" if known else "gateway.upstream names none"
            refuse("model", f"is {name[:80]!r}; {told}. Leave it out for the policy")
        return name

    def _check_stays(self) -> None:
        if self._sessions.is_leaving:
            raise CallError(
                429,
                "no_capacity",
                f"gateway {self._sessions.name}: leaves. Start at another",
                retry_after_s=_RETRY_S,
            )

    def _check_room(self, size: int) -> None:
        num_kept = sum(bool(one.start.upstream) for one in self._book.sessions.values())
        if num_kept + size > _MOST_TEXT_SESSIONS:
            raise CallError(
                429,
                "no_capacity",
                f"sessions: {num_kept} that other providers serve are kept, at most "
                f"{_MOST_TEXT_SESSIONS}. Try again later, or lower gateway.sessions.text_kept_s",
                retry_after_s=_RETRY_S,
            )

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
        frees_its_slot = old.total_reward is None and not old.start.upstream
        if not frees_its_slot or self._rules.headroom() >= 0:
            self._rules.supersede(old)

    def _told_again(
        self, request: SessionRequest, past: PastStart, digest: str, fixed: str
    ) -> dict[str, Any]:
        first_key = fixed or keys.session_key(request.key, past.sessions[0][1], self._sessions.name)
        is_same_key = keys.is_same(keys.hash_key(first_key), past.sessions[0][2])
        if past.digest != digest or not is_same_key:
            raise request.id_reused()
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
            CallError: 400, 401, 404, 409 (training has it, or the request id was another
                request's) or 410.
        """
        caller = self._sessions.identify(request.key)
        reward = read_number(request.body, "reward", -_MOST_REWARD, _MOST_REWARD)
        if reward is None:
            refuse("reward", "is missing; must be a number")
        past = self._search.served_before(caller, request, _REWARD)
        if past is not None:
            return _rewarded(past.session_id, past.reward, past.num_turns)
        session = self._search.found(caller, request)
        turn = self._search.turn(session, request)
        if request.is_among(session.requests, _REWARD):
            return _told_reward(session)
        if session.state is SessionState.ADMITTED or session.group.is_held:
            raise CallError(
                409,
                "session_admitted",
                f"session {session.session_id}: training has taken it; its reward is fixed",
            )
        self._book.write(session, "reward", turn=turn, reward=reward, **request.facts(_REWARD))
        self._rules.settle(session)
        return _told_reward(session)

    def end(self, request: SessionRequest) -> dict[str, Any]:
        """`{session_id?, request_id?}`; the answer says how many calls were recorded.

        Raises:
            CallError: 400, 401, 404, 409 (the request id was another request's) or 410 (it had
                ended before, by another request).
        """
        caller = self._sessions.identify(request.key)
        past = self._search.served_before(caller, request, _END)
        if past is not None:
            return _ended(past.session_id, past.num_turns)
        session = self._search.found(caller, request)
        is_again = request.is_among(session.requests, _END)
        if session.ended_s and not is_again:
            raise session_over(session)
        num_turns = session.turns.num_turns
        if not is_again:
            self._rules.end(session, **request.facts(_END))
        return _ended(session.session_id, num_turns)

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
            sessions = self._search.asked_for(request)
            early = (SessionState.OPEN, SessionState.REWARDED)
            is_open = [one for one in sessions if one.state in early]
            if not is_open:
                return sessions
            if asyncio.get_running_loop().time() >= deadline:
                raise CallError(
                    409,
                    "session_open",
                    f"session {is_open[0].session_id}: has not ended within wait_s = {wait_s:g}. "
                    "End it before its export",
                )
            await asyncio.sleep(_LOOK_S)
            self._rules.sweep()

    def _admin(self, request: SessionRequest) -> None:
        if self._sessions.identify(request.key).scope is not Scope.ADMIN:
            _not_admin()


def _check_size(size: int, least: int, fixed: str) -> None:
    """A group that training could not take is told now, not after the agents' work."""
    if size >= least:
        return
    mend = f"Ask for {least} or more"
    if fixed:
        mend = "A fixed key has one session at a time: set admission.n_samples=1 in the recipe"
    told = f"is {size}; must be >= {least}, the rewards that a group needs. {mend}"
    refuse("group_size", told)


def _not_admin() -> NoReturn:
    raise CallError(401, "admin_key_required", "API key: must be the admin key for this")


def _digest(task_id: str, size: int, fixed: str, upstream: str) -> str:
    told = [task_id, size, keys.hash_key(fixed).hex() if fixed else "", upstream]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=12).hexdigest()


def _told_reward(session: Session) -> dict[str, Any]:
    return _rewarded(session.session_id, session.total_reward, session.turns.num_turns)


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
