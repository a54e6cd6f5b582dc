"""All sessions of one replica and their journal: what is written holds, also after a restart.

Every change goes through `write`: into the journal first, then into the session. Records of
sessions that are over are forgotten; where old segments hold little else, what still lives there
is written anew, so that the journal's size follows what lives.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_ray.core.reasons import count_reason
from areal_ray.gateway.door import SessionRecord
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.session_journal import (
    JournalRecord,
    SessionJournal,
    pack_many,
    unpack_many,
)
from areal_ray.gateway.session_state import (
    Session,
    SessionGroup,
    SessionState,
    Start,
    start_of,
)
from areal_ray.gateway.text_record import TextRecord
from areal_ray.gateway.turn_record import encode_turn

_log = logging.getLogger(__name__)

_MOST_REMEMBERED = 4096
"""Sessions that are over and still known by name and key; requests that started some."""
_MOST_CALLS = 64
"""Of them, replies that feedback may name yet."""
JOURNAL_DAMAGED = "journal_damaged"


@dataclass(frozen=True, slots=True)
class PastSession:
    """What is still known of a session that is over."""

    session_id: str
    state: SessionState
    reason: str
    requests: Mapping[str, str]
    """Request ids of rewards and of its end, and digests of what they asked."""
    reward: float | None
    num_turns: int
    key_hash: bytes
    calls: frozenset[str]
    """Replies by the ids their client knows them by: of a fixed key's session, the last ones."""
    conversations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PastStart:
    """What a request to start sessions was answered with."""

    digest: str
    group_key: str
    sessions: tuple[tuple[str, bytes, bytes], ...] = ()
    """Id, nonce and key hash of each."""


class SessionBook:
    """See the module.

    Args:
        journal: Of this replica; read here.
        new_recorder: Makes an empty record.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        journal: SessionJournal,
        new_recorder: Callable[[], Recorder],
        clock: Callable[[], float],
    ) -> None:
        self.journal = journal
        self._new_recorder = new_recorder
        self._clock = clock
        self.sessions: dict[str, Session] = {}
        """Those that are not over, the oldest first."""
        self.groups: dict[str, SessionGroup] = {}
        self.past: OrderedDict[str, PastSession] = OrderedDict()
        self._session_of_key: dict[bytes, str] = {}
        self._past_keys: OrderedDict[bytes, str] = OrderedDict()
        self._starts: OrderedDict[str, PastStart] = OrderedDict()
        self._num_first: Counter[int] = Counter()
        """Sessions by the segment that their oldest record is in."""
        self._live_bytes = 0
        self.num_trained = 0
        self.rejected: Counter[str] = Counter()
        self.failed_groups: Counter[str] = Counter()
        self._replay()

    # -- finding -------------------------------------------------------------------------------

    def of_key(self, key_hash: bytes) -> Session | PastSession | None:
        """The session that a key is of; of a fixed key, the latest."""
        session_id = self._session_of_key.get(key_hash) or self._past_keys.get(key_hash, "")
        return self.sessions.get(session_id) or self.past.get(session_id)

    def started_by(self, request_id: str) -> PastStart | None:
        """What a request was answered with."""
        return self._starts.get(request_id) if request_id else None

    # -- writing -------------------------------------------------------------------------------

    def start(self, starts: Sequence[Start]) -> None:
        """Write down the sessions of a new group.

        Raises:
            StorageError: The disk did not take it; nothing happened.
        """
        head = {"k": "start", "starts": [start.facts() for start in starts]}
        size = self.journal.append(JournalRecord(head))
        self._take_up_start(head, self.journal.number, size)

    def write(self, session: Session, kind: str, body: bytes = b"", **facts: Any) -> None:
        """Write down what happens to a session, and let it happen.

        Raises:
            StorageError: The disk did not take it; nothing happened.
        """
        record = self._append(session, kind, body, **facts)
        session.apply(record)

    def finish(self, session: Session, state: SessionState, reason: str = "", **facts: Any) -> None:
        """Write down that a session is over, and forget it."""
        self._append(session, "state", state=str(state), why=reason, **facts)
        self._forget(session, state, reason)
        self._tidy()

    def _turn_over(self, session_id: str, turn_id: int, reply_id: str) -> None:
        session = self.sessions.get(session_id)
        if session is None:  # it was rejected while the call ran
            return
        facts: dict[str, Any] = {"c": reply_id, "i": turn_id}
        if session.new_conversations:
            facts["names"] = list(session.new_conversations)
        self.write(session, "turn", encode_turn(session.turns.turn_record(turn_id)), **facts)

    def _append(
        self, session: Session, kind: str, body: bytes = b"", **facts: Any
    ) -> JournalRecord:
        head = {"k": kind, "s": session.session_id, "n": session.num_records, "t": self._clock()}
        head |= facts
        record = JournalRecord(head, body)
        session.num_records += 1  # whether it is written or not: a gap tells of what was not
        size = self.journal.append(record)
        self._count(session, self.journal.number, size)
        return record

    def _count(self, session: Session, segment: int, size: int) -> None:
        if session.first_segment < 0:
            session.first_segment = segment
            self._num_first[segment] += 1
        session.num_bytes += size
        self._live_bytes += size

    def _uncount(self, session: Session) -> None:
        self._num_first[session.first_segment] -= 1
        if not self._num_first[session.first_segment]:
            del self._num_first[session.first_segment]
        self._live_bytes -= session.num_bytes
        session.first_segment, session.num_bytes = -1, 0

    # -- what is known -------------------------------------------------------------------------

    def _opened(self, start: Start) -> Session:
        group = self.groups.get(start.group_key)
        if group is None:
            group = SessionGroup(start.group_key, start.task_id)
            self.groups[start.group_key] = group
        record = SessionRecord(
            start.session_id,
            self._new_recorder(),
            is_trained=not start.upstream,
            prefix_key=start.group_key,
            texts=TextRecord(start.upstream) if start.upstream else None,
            turn_over=partial(self._turn_over, start.session_id),
        )
        session = Session(start, group, record)
        group.sessions.append(session)
        self.sessions[start.session_id] = session
        self._session_of_key[start.key_hash] = start.session_id
        if start.request_id:
            known = self._starts.get(start.request_id)
            given = () if known is None else known.sessions
            mine = (start.session_id, start.nonce, start.key_hash)
            if mine not in given:
                given = (*given, mine)
            past = PastStart(start.request_digest, start.group_key, given)
            _remember(self._starts, start.request_id, past)
        return session

    def _forget(self, session: Session, state: SessionState, reason: str) -> None:
        start, group = session.start, session.group
        del self.sessions[start.session_id]
        self._uncount(session)
        group.sessions.remove(session)
        if state is SessionState.REJECTED:
            count_reason(self.rejected, reason)
            group.failure = group.failure or reason
        else:
            self.num_trained += 1
            group.has_trained = True
        if not group.sessions:
            del self.groups[group.key]
            if not group.has_trained:
                count_reason(self.failed_groups, group.failure)
        past = _past_of(session, state, reason)
        _remember(self.past, start.session_id, past)
        if self._session_of_key.get(start.key_hash) == start.session_id:
            del self._session_of_key[start.key_hash]
            _remember(self._past_keys, start.key_hash, start.session_id)

    def _tidy(self) -> None:
        """Delete segments in which nothing lives; where little does, write that anew first.

        One segment's worth is kept all the same: requests for what is over may come again.
        """
        journal = self.journal
        if journal.num_bytes <= journal.segment_bytes:
            return
        for _ in range(1 + journal.number - journal.oldest):
            oldest = min(self._num_first, default=journal.number)
            journal.delete_before(oldest)
            bound = 2 * (self._live_bytes + journal.segment_bytes)
            if journal.num_bytes <= bound or journal.oldest < oldest:
                return
            for session in [s for s in self.sessions.values() if s.first_segment == oldest]:
                self._write_anew(session)

    def _write_anew(self, session: Session) -> None:
        facts = {"k": "whole", "s": session.session_id, "n": session.num_records}
        size = self.journal.append(
            JournalRecord(facts, pack_many(list(session.records()))), is_moved=True
        )
        session.num_records += 1
        self._uncount(session)
        self._count(session, self.journal.number, size)

    # -- replay --------------------------------------------------------------------------------

    def _replay(self) -> None:
        lost: dict[str, Session] = {}
        for segment, size, record in self.journal.read():
            head = record.head
            if head["k"] == "start":
                self._take_up_start(head, segment, size)
            elif head["s"] not in lost:
                try:
                    self._take_up(segment, size, record)
                except (ValueError, LookupError) as error:
                    _log.error("session %s: its journal has a gap: %s", head["s"], error)
                    if head["s"] in self.sessions:
                        lost[head["s"]] = self.sessions[head["s"]]
        self.num_trained = 0
        self.rejected.clear()
        self.failed_groups.clear()
        for session in lost.values():
            self.finish(session, SessionState.REJECTED, JOURNAL_DAMAGED)
        now = self._clock()
        for session in self.sessions.values():
            session.active_s = now

    def _take_up_start(self, head: Mapping[str, Any], segment: int, size: int) -> None:
        starts = [start_of(facts) for facts in head["starts"]]
        for start in starts:
            if start.session_id not in self.sessions:
                self._count(self._opened(start), segment, size // len(starts))

    def _take_up(self, segment: int, size: int, record: JournalRecord) -> None:
        head = record.head
        session = self.sessions.get(head["s"])
        if head["k"] == "whole":
            self._take_up_whole(session, segment, size, record)
            return
        if session is None:  # it is over, or began in what was deleted and was written anew since
            return
        if head["n"] != session.num_records:
            raise ValueError(f"record {session.num_records} is missing")
        session.num_records += 1
        self._count(session, segment, size)
        if head["k"] != "state" or not SessionState(head["state"]).is_over:
            session.apply(record, is_replayed=True)
        else:
            self._forget(session, SessionState(head["state"]), head["why"])

    def _take_up_whole(
        self, session: Session | None, segment: int, size: int, record: JournalRecord
    ) -> None:
        first, *rest = unpack_many(record.body)
        start = start_of(first.head)
        if session is None:
            session = self._opened(start)
        else:
            self._uncount(session)
            session.group.sessions.remove(session)
            session = self._opened(start)
        session.num_records = record.head["n"] + 1
        self._count(session, segment, size)
        for one in rest:
            session.apply(one, is_replayed=True)


def _past_of(session: Session, state: SessionState, reason: str) -> PastSession:
    start = session.start
    return PastSession(
        start.session_id,
        state,
        reason,
        session.requests,
        session.total_reward,
        session.turns.num_turns,
        start.key_hash,
        frozenset([*session.calls][-_MOST_CALLS:]) if start.is_agent_key else frozenset(),
        session.conversations,
    )


def _remember(known: OrderedDict[Any, Any], name: Any, fact: Any) -> None:
    known[name] = fact
    known.move_to_end(name)
    while len(known) > _MOST_REMEMBERED:
        known.popitem(last=False)
