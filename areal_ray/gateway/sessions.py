"""The gateway's sessions: who may call into which record, and what training gets of them."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from areal_ray.core.clock import steady_time
from areal_ray.core.trajectory import Trajectory
from areal_ray.errors import ArealRayError
from areal_ray.gateway import keys
from areal_ray.gateway.call import CallError, CallHints
from areal_ray.gateway.conversation_names import conversation_names
from areal_ray.gateway.door import SessionRecord, unknown_key
from areal_ray.gateway.keys import Scope
from areal_ray.gateway.peers import Peers
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.session_book import PastSession, SessionBook
from areal_ray.gateway.session_journal import SessionJournal
from areal_ray.gateway.session_rules import SessionRules, SessionsConfig
from areal_ray.gateway.session_state import Session, SessionGroup, SessionState

__all__ = ["Caller", "ReadyGroup", "SessionCounts", "Sessions", "SessionsConfig"]

_log = logging.getLogger(__name__)

UNUSABLE = "unusable_samples"


class SlotWithdrawn(ArealRayError):
    """A gateway that leaves gives no more groups than were begun there."""


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """Sessions that were opened together and are over; those rejected are left out."""

    group_key: str
    """Unique for ever."""
    task_id: str
    session_ids: tuple[str, ...]
    trajectories: tuple[Trajectory, ...]
    """`group_id` = `group_key`, `episode_id` = the session. Outcome ok with the session's reward
    (rewards of turns add up to it, and stand in `details["turn_rewards"]` by turn), or unscored."""
    num_turns: int
    splits: Mapping[str, int] = field(default_factory=dict)
    """Conversations that stopped extending their record, by reason."""


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """What a gateway holds now, and what has ended here."""

    num_sessions: int
    """All that are kept, whatever became of them, until they are trained on or rejected."""
    num_slots: int
    """Groups that training waits for."""
    num_unserved: int
    """Groups begun beyond those that training waits for, as after a restart."""
    num_open: int
    """Sessions that may be called."""
    num_waiting: int
    """Sessions that ended and wait for a reward or for their siblings."""
    num_ready: int
    """Groups that nobody holds."""
    num_held: int
    """Groups that were taken and not yet admitted."""
    num_admitted: int
    """Sessions admitted and not yet trained."""
    num_trained: int
    """Sessions, since the process began; so with the next two."""
    num_unscored: int
    rejected: Mapping[str, int]
    """Sessions by reason."""
    failed_groups: Mapping[str, int]
    """Groups whose sessions were all rejected, by the first one's reason."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    scope: Scope
    key_hash: bytes
    session: Session | PastSession | None = None
    """Of the key; of a fixed one, its latest. None for the admin key."""

    def may_see(self, session: Session) -> bool:
        """Whether a session is the caller's own."""
        return self.owns(session.start.key_hash)

    def owns(self, key_hash: bytes) -> bool:
        """Whether what a key began is the caller's own."""
        return self.scope is Scope.ADMIN or keys.is_same(key_hash, self.key_hash)


class Sessions:
    """Sessions of one gateway replica; a `Door`. For one event loop alone.

    A session lives open -> rewarded -> sealed -> admitted -> trained(step), or ends
    rejected(reason). Each step of it and each turn is in the journal, and a new object over the
    same folder goes on where the old one was: open sessions with the agent's next call; sealed
    ones that were not admitted are offered again.

    Args:
        config: Time-outs.
        new_recorder: Makes an empty record.
        journal: Of this replica. Its name, 1 to 16 lower-case letters or digits, is part of keys
            and ids.
        admin_key_hash: `keys.hash_key` of the admin key.
        peers: All replicas; a call for a session of another one is passed on.
        clock: Seconds since the epoch.

    Raises:
        ArealRayError: The name cannot be part of a key.
        StorageError: The journal cannot be written.
    """

    def __init__(
        self,
        config: SessionsConfig,
        new_recorder: Callable[[], Recorder],
        journal: SessionJournal,
        *,
        admin_key_hash: bytes,
        peers: Callable[[], Peers] = Peers,
        clock: Callable[[], float] = steady_time,
    ) -> None:
        self.name = keys.check_name(journal.name)
        self.peers = peers
        self._admin_key_hash = admin_key_hash
        self._clock = clock
        self.book = SessionBook(journal, new_recorder, clock)
        self.rules = SessionRules(self.book, config, clock)
        self._num_unscored = 0

    # -- for training --------------------------------------------------------------------------

    def open_slot(self) -> None:
        """Training wants one more group: agents may start one, unless one is there already."""
        self.rules.num_slots += 1

    def close_slot(self) -> None:
        """Training has got it, or wants it no more; what agents began goes on."""
        self.rules.num_slots = max(0, self.rules.num_slots - 1)

    async def next_ready(self) -> ReadyGroup:
        """The oldest group that is over and that nobody holds; the caller holds it from then on.

        Its rewards are fixed until it is handed back. Waits for: agents to end their sessions, or
        their time-outs; without a deadline, cancel it.

        Raises:
            StorageError: The journal cannot be written.
            SlotWithdrawn: This replica leaves, and no group that was begun is left for the caller.
        """
        while True:
            self.rules.sweep()
            if self.is_leaving and self.rules.headroom() > 0:
                raise SlotWithdrawn(f"gateway {self.name}: leaves; ask another for a group")
            group = next(iter(self.rules.ready.values()), None)
            if group is None:
                await self.rules.changed()
                continue
            await self.book.journal.settled()
            if group.key in self.rules.ready:
                ready = self._held(group)
                if ready is not None:
                    return ready

    def hand_back(self, group_key: str) -> None:
        """A group that is held or admitted was lost on its way: it is offered again."""
        group = self.book.groups.get(group_key)
        if group is None:
            return
        for session in group.sessions:
            if session.state is SessionState.ADMITTED:
                self.book.write(session, "state", state=str(SessionState.SEALED))
        group.is_held = False
        self.rules.note(group, is_first=True)

    def admitted(self, session_ids: Sequence[str], group_id: str) -> None:
        """The sessions are in the run's own journal, as `group_id`: they are not offered again.

        Sessions that are not known any more, or were admitted before, are passed over, so that a
        caller may tell twice; so with `trained` and `rejected`.
        """
        for session in self._known(session_ids, SessionState.SEALED):
            self.book.write(session, "state", state=str(SessionState.ADMITTED), g=group_id)
            self._num_unscored += session.total_reward is None
            session.group.is_held = False
            self.rules.note(session.group)

    def trained(self, session_ids: Sequence[str], step: int) -> None:
        """The sessions shaped the weights of `step`: their records are deleted."""
        for session in self._known(session_ids, SessionState.SEALED, SessionState.ADMITTED):
            self.book.finish(session, SessionState.TRAINED, step=step)
            self.rules.note(session.group)

    def rejected(self, session_ids: Sequence[str], reason: str) -> None:
        """The sessions will not be trained: their records are deleted."""
        for session in self._known(session_ids, SessionState.SEALED, SessionState.ADMITTED):
            self.rules.reject(session, reason)

    def counts(self) -> SessionCounts:
        """What is held here now."""
        return _counted(self.book, self.rules, self._num_unscored)

    def close(self) -> None:
        """Close the journal; a new object may take over."""
        self.book.journal.close()

    def _held(self, group: SessionGroup) -> ReadyGroup | None:
        """The group, now held; None if nothing of it may train."""
        trajectories: list[Trajectory] = []
        splits: Counter[str] = Counter()
        for session in list(group.sessions):
            try:
                trajectories += session.trajectories()
                splits += session.recorder.splits
            except ValueError as error:
                _log.error("session %s: %s", session.session_id, error)
                self.rules.reject(session, UNUSABLE)
        if not group.sessions:
            return None
        group.is_held = True
        self.rules.note(group)
        return ReadyGroup(
            group_key=group.key,
            task_id=group.task_id,
            session_ids=tuple(session.session_id for session in group.sessions),
            trajectories=tuple(trajectories),
            num_turns=sum(session.recorder.num_turns for session in group.sessions),
            splits=dict(splits),
        )

    def _known(self, session_ids: Sequence[str], *states: SessionState) -> list[Session]:
        found = [self.book.sessions.get(session_id) for session_id in session_ids]
        return [one for one in found if one is not None and one.state in states]

    # -- as a door -----------------------------------------------------------------------------

    def is_admin(self, key_hash: bytes) -> bool:
        """Whether a hash is the admin key's."""
        return keys.is_same(key_hash, self._admin_key_hash)

    def home(self, key: str, session_id: str = "") -> str:
        """The replica that a call belongs to; empty if it is this one.

        Args:
            key: As the client sent it, or a fixed one that a session is started with.
            session_id: Of a session or group, where the call names one.
        """
        peers = self.peers()
        home = keys.replica_of(session_id) or keys.replica_of(key)
        if not home and not session_id and key and peers.urls:
            is_admin = len(key) <= keys.MOST_KEY_CHARACTERS and self.is_admin(keys.hash_key(key))
            home = "" if is_admin else peers.home(key)
            if home == self.name and self.is_leaving and self.rules.live_of_key(key) is None:
                home = peers.successor(key)
        return home if home in peers.urls and home != self.name else ""

    @property
    def is_leaving(self) -> bool:
        """Whether this replica starts nothing more."""
        return self.name in self.peers().leaving

    def identify(self, key: str) -> Caller:
        """Who sends this key.

        Raises:
            CallError: 401.
        """
        if not key:
            raise unknown_key(key)
        if len(key) > keys.MOST_KEY_CHARACTERS:
            raise _refused_key("is none of this server's")
        hashed = keys.hash_key(key)
        if self.is_admin(hashed):
            return Caller(Scope.ADMIN, hashed)
        session = self.book.of_key(hashed)
        if session is None:
            raise _refused_key("is none of this server's, or was forgotten since its session ended")
        is_fixed = not keys.replica_of(key)
        return Caller(Scope.AGENT if is_fixed else Scope.SESSION, hashed, session)

    async def enter(self, key: str, path_session: str, hints: CallHints) -> SessionRecord:
        """See `Door.enter`."""
        self.rules.sweep()
        session = self._entered(self.identify(key), path_session)
        session.num_inside += 1
        session.active_s = self._clock()
        rest_s = self.rules.rest_s(session)
        session.record.ends_at = asyncio.get_running_loop().time() + rest_s
        session.note_conversations(conversation_names(hints))
        return session.record

    def leave(self, record: SessionRecord) -> None:
        """See `Door.leave`."""
        session = self.book.sessions.get(record.session_id)
        if session is not None and session.num_inside:
            session.num_inside -= 1
            session.active_s = self._clock()
            self.rules.settle(session)

    def _entered(self, caller: Caller, path_session: str) -> Session:
        session = caller.session
        if caller.scope is Scope.ADMIN:
            if not path_session:
                raise _refused_key(
                    "is the admin key, which has no session. Send the api_key that "
                    "/rl/start_session gave"
                )
            session = self.book.sessions.get(path_session) or self.book.past.get(path_session)
        elif path_session and session is not None and session.session_id != path_session:
            session = None
        if session is None:
            raise no_session(path_session)
        if isinstance(session, PastSession) or session.ended_s:
            raise session_over(session)
        return session


def _counted(book: SessionBook, rules: SessionRules, num_unscored: int) -> SessionCounts:
    sessions, groups = book.sessions.values(), book.groups.values()
    early = (SessionState.OPEN, SessionState.REWARDED)
    num_open = sum(one.state in early and not one.ended_s for one in sessions)
    num_admitted = sum(one.state is SessionState.ADMITTED for one in sessions)
    num_done = sum(len(group.sessions) for group in groups if group.is_sealed)
    return SessionCounts(
        num_sessions=len(sessions),
        num_slots=rules.num_slots,
        num_unserved=max(0, -rules.headroom()),
        num_open=num_open,
        num_waiting=len(sessions) - num_open - num_admitted - num_done,
        num_ready=len(rules.ready),
        num_held=sum(group.is_held for group in groups),
        num_admitted=num_admitted,
        num_trained=book.num_trained,
        num_unscored=num_unscored,
        rejected=dict(book.rejected),
        failed_groups=dict(book.failed_groups),
    )


def no_session(name: str, what: str = "session") -> CallError:
    """404, for a session that is none or is another's.

    Args:
        name: As the client gave it.
        what: That is the name of: session, group, conversation or reply.
    """
    return CallError(404, "session_not_found", f"{what} {name[:80]!r}: there is none here")


def session_over(session: Session | PastSession, holder: str = "") -> CallError:
    """410, for a session that nothing may be asked of any more.

    Args:
        session: That is over.
        holder: The session that its key was given to since.
    """
    if isinstance(session, PastSession):
        told = f"{session.state}: {session.reason}" if session.reason else str(session.state)
    else:
        told = session.end_reason
    then = "Start another with /rl/start_session"
    if holder:
        then = (
            f"Its key's session is {holder} now. Where feedback comes late, end a session with "
            "/rl/end_session before its key is given to the next"
        )
    return CallError(410, "session_over", f"session {session.session_id}: is over ({told}). {then}")


def _refused_key(what: str) -> CallError:
    return CallError(401, "invalid_api_key", f"API key: {what}")
