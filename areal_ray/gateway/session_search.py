"""Which session, and which turn of it, a request about sessions means."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_ray.gateway.call import CallError
from areal_ray.gateway.conversation_names import hashed_name
from areal_ray.gateway.fields import read_text, refuse, shown
from areal_ray.gateway.keys import Scope
from areal_ray.gateway.session_book import PastSession
from areal_ray.gateway.session_state import Session, SessionGroup
from areal_ray.gateway.sessions import Caller, Sessions, no_session, session_over
from areal_ray.telemetry.terminal import is_one_line

_MOST_TEXT = 512
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
        if is_needed and not text:
            what = "missing" if self.body.get(name) is None else "empty"
            refuse(name, f"is {what}; must be a string")
        if len(text) > _MOST_TEXT:
            refuse(name, f"has {len(text)} characters; must have at most {_MOST_TEXT}")
        # They are names, which journals, exports and other people's tools show again.
        if not is_one_line(text):
            refuse(name, f"is {shown(text)}; must be one line without control characters")
        return text

    @property
    def request_id(self) -> str:
        """What a request that is sent again is known by; empty if it has none."""
        return self.text("request_id") or self.idempotency_key[:_MOST_TEXT]

    def facts(self, verb: str) -> dict[str, Any]:
        """What is written down of it with what it does to a session: its id, and what it asks."""
        asked = [verb, *(self.body.get(name) for name in ("reward", "turn", "interaction_id"))]
        digest = hashlib.blake2b(json.dumps(asked).encode(), digest_size=8).hexdigest()
        return {"r": self.request_id, "asked": digest} if self.request_id else {}

    def is_among(self, served: Mapping[str, str], verb: str) -> bool:
        """Whether it was served before.

        Args:
            served: Digests of what requests of the session asked, by their ids.
            verb: What it asks for.

        Raises:
            CallError: 409: its id was another request's.
        """
        asked = served.get(self.request_id) if self.request_id else None
        if asked and asked != self.facts(verb)["asked"]:
            raise self.id_reused()
        return asked is not None

    def id_reused(self) -> CallError:
        """409, for an id that was another request's."""
        return CallError(
            409,
            "request_id_reused",
            f"request_id {self.request_id[:80]!r}: was another request's. Choose a new one",
            param="request_id",
        )


class SessionSearch:
    """Finds what requests name.

    Args:
        sessions: Of this replica.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._book = sessions.book

    def served_before(
        self, caller: Caller, request: SessionRequest, verb: str
    ) -> PastSession | None:
        """A session that is over since, and had this request."""
        past: Session | PastSession | None = caller.session
        if caller.scope is Scope.ADMIN:
            past = self._book.past.get(request.text("session_id"))
        is_past = isinstance(past, PastSession) and request.is_among(past.requests, verb)
        return past if is_past and isinstance(past, PastSession) else None

    def found(self, caller: Caller, request: SessionRequest) -> Session:
        """The session that is meant, among those the caller may see."""
        session_id = request.text("session_id")
        conversation, reply = request.text("conversation_id"), request.text("interaction_id")
        found: Session | PastSession | None = None
        if session_id:
            found = self._book.sessions.get(session_id) or self._own_past(caller, session_id)
        elif conversation:
            found = self._of_conversation(caller, conversation)
        elif reply and (caller.scope is not Scope.SESSION):
            live = self._book.sessions.values()
            found = next((one for one in live if _bare(reply) in one.calls), None)
        elif caller.scope is Scope.ADMIN:
            refuse("session_id", "is missing; must be given with the admin key")
        else:
            found = caller.session
        if found is None:
            found = self._past_of(caller, conversation, reply)
        if isinstance(found, PastSession):
            raise session_over(found, self._holder(found))
        if found is None or not caller.may_see(found):
            raise _not_found(session_id, conversation, reply)
        return found

    def _own_past(self, caller: Caller, session_id: str) -> PastSession | None:
        past = self._book.past.get(session_id)
        return past if past is not None and caller.owns(past.key_hash) else None

    def _past_of(self, caller: Caller, conversation: str, reply: str) -> PastSession | None:
        """The latest session that is over and that feedback came too late for."""
        if not conversation and (not reply or caller.scope is Scope.SESSION):
            return None
        hashed = hashed_name(conversation) if conversation else ""
        for past in reversed(self._book.past.values()):
            is_meant = hashed in past.conversations if hashed else _bare(reply) in past.calls
            if is_meant and caller.owns(past.key_hash):
                return past
        return None

    def _holder(self, past: PastSession) -> str:
        """The session that has the key now; empty if none has."""
        latest = self._book.of_key(past.key_hash)
        return latest.session_id if isinstance(latest, Session) else ""

    def _of_conversation(self, caller: Caller, name: str) -> Session | None:
        hashed = hashed_name(name)
        mine = [
            session
            for session in self._book.sessions.values()
            if hashed in (*session.conversations, *session.new_conversations)
            and caller.may_see(session)
        ]
        if len(mine) > 1:
            told = ", ".join(session.session_id for session in mine[:4])
            raise CallError(
                409,
                "ambiguous_conversation",
                f"conversation_id: {len(mine)} sessions have it ({told}). Name the session",
                param="conversation_id",
            )
        return mine[0] if mine else None

    def turn(self, session: Session, request: SessionRequest) -> int:
        """The turn that is meant; -1 = the session as a whole."""
        turn, reply = request.body.get("turn"), request.text("interaction_id")
        if turn is None and not reply:
            return -1
        if reply:
            turn = session.calls.get(_bare(reply))
        elif type(turn) is not int or turn < 0:
            refuse("turn", "must be the number of a turn, from 0 on")
        if turn is None or not _has_reply(session, turn):
            where = "interaction_id" if reply else "turn"
            raise CallError(
                404,
                "turn_not_found",
                f"{where}: session {session.session_id} has no such turn",
                param=where,
            )
        return int(turn)

    def asked_for(self, request: SessionRequest) -> list[Session]:
        """The session that is named, or those of the group."""
        session_id, group_key = request.text("session_id"), request.text("group_id")
        if group_key:
            group: SessionGroup | None = self._book.groups.get(group_key)
            if group is None:
                raise no_session(group_key, "group")
            return list(group.sessions)
        if not session_id:
            refuse("session_id", "is missing; must be given, or group_id")
        if session_id in self._book.past:
            raise session_over(self._book.past[session_id])
        if session_id not in self._book.sessions:
            raise no_session(session_id)
        return [self._book.sessions[session_id]]


def _not_found(session_id: str, conversation: str, reply: str) -> CallError:
    if session_id:
        return no_session(session_id)
    return no_session(conversation, "conversation") if conversation else no_session(reply, "reply")


def _has_reply(session: Session, turn: int) -> bool:
    """Whether a turn was answered to its end."""
    try:
        return bool(session.turns.turn_record(turn).reply)
    except KeyError:
        return False


def _bare(reply_id: str) -> str:
    """Without the prefix that a dialect gives it."""
    return _REPLY_PREFIX.sub("", reply_id, count=1)
