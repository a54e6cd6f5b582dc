"""One session, as the records of its journal make it: live, and again after a restart.

`open -> rewarded -> sealed -> admitted -> trained`, or `rejected` from any of them but the last. A
session that ended waits for calls still under way, and for its reward, before it is sealed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from areal_ray.core.trajectory import Outcome, Trajectory
from areal_ray.gateway.door import PROMPT_FILLS_CONTEXT, SessionRecord
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.session_journal import JournalRecord
from areal_ray.gateway.text_record import TurnKeeper
from areal_ray.gateway.turn_record import decode_turn, encode_turn

_MOST_REQUESTS = 64
"""Request ids of rewards and ends that a session knows again."""
_MOST_CONVERSATIONS = 8
NO_REWARD = "no reward was set"


class SessionState(StrEnum):
    """Where a session is."""

    OPEN = "open"
    REWARDED = "rewarded"
    SEALED = "sealed"
    ADMITTED = "admitted"
    REJECTED = "rejected"
    TRAINED = "trained"

    @property
    def is_over(self) -> bool:
        """Whether nothing comes after it."""
        return self in (SessionState.REJECTED, SessionState.TRAINED)


@dataclass(slots=True, eq=False)
class SessionGroup:
    """Sessions that were started together."""

    key: str
    task_id: str
    sessions: "list[Session]" = field(default_factory=list)
    """Those that are not over."""
    is_held: bool = False
    failure: str = ""
    """Why the first one that was rejected was."""
    has_trained: bool = False

    @property
    def is_sealed(self) -> bool:
        """Whether it may be trained on, as a whole."""
        return {session.state for session in self.sessions} == {SessionState.SEALED}

    @property
    def trains(self) -> bool:
        """Whether the policy samples in it; what another provider says is for export alone."""
        return not any(session.start.upstream for session in self.sessions)


@dataclass(frozen=True, slots=True)
class Start:
    """What a session is from its first moment on."""

    session_id: str
    group_key: str
    task_id: str
    key_hash: bytes
    is_agent_key: bool
    """Whether the key is a fixed one of a deployed agent, and outlives the session."""
    nonce: bytes
    """[16] what its key follows from, with the admin key."""
    started_s: float
    request_id: str = ""
    request_digest: str = ""
    upstream: str = ""
    """Name of the provider that answers its calls; empty = the policy does."""

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "s": self.session_id,
            "t": self.started_s,
            "g": self.group_key,
            "task": self.task_id,
            "key": self.key_hash.hex(),
            "agent": self.is_agent_key,
            "nonce": self.nonce.hex(),
            "r": self.request_id,
            "digest": self.request_digest,
            **({"upstream": self.upstream} if self.upstream else {}),
        }


def start_of(facts: Mapping[str, Any]) -> Start:
    """Inverse of `Start.facts`."""
    return Start(
        session_id=facts["s"],
        group_key=facts["g"],
        task_id=facts["task"],
        key_hash=bytes.fromhex(facts["key"]),
        is_agent_key=facts["agent"],
        nonce=bytes.fromhex(facts["nonce"]),
        started_s=facts["t"],
        request_id=facts["r"],
        request_digest=facts["digest"],
        upstream=facts.get("upstream", ""),
    )


class Session:
    """One session that is not over.

    Args:
        start: Its first record.
        group: That it belongs to.
        record: What its calls are recorded in.
    """

    __slots__ = (
        "active_s",
        "calls",
        "conversations",
        "end_reason",
        "ended_s",
        "first_segment",
        "group",
        "new_conversations",
        "num_bytes",
        "num_inside",
        "num_records",
        "record",
        "requests",
        "reward",
        "start",
        "state",
        "turn_rewards",
    )

    def __init__(self, start: Start, group: SessionGroup, record: SessionRecord) -> None:
        self.start = start
        self.group = group
        self.record = record
        self.state = SessionState.OPEN
        self.reward: float | None = None
        """Of the whole session."""
        self.turn_rewards: dict[int, float] = {}
        self.calls: dict[str, int] = {}
        """`turn_id` of the first choice of each reply, by the id its client knows it by."""
        self.conversations: tuple[str, ...] = ()
        """Hashes of the client's own names for what it does here."""
        self.new_conversations: tuple[str, ...] = ()
        """Those that the journal does not have yet."""
        self.requests: dict[str, str] = {}
        """Request ids that were served, the newest last, and digests of what they asked."""
        self.active_s = start.started_s
        self.ended_s = 0.0
        """0 = it may be called."""
        self.end_reason = ""
        self.num_inside = 0
        """Calls under way."""
        self.num_records = 0
        self.num_bytes = 0
        """Of its records in the journal."""
        self.first_segment = -1

    @property
    def session_id(self) -> str:
        """Unique for ever."""
        return self.start.session_id

    @property
    def recorder(self) -> Recorder:
        """The record of its turns."""
        return self.record.recorder

    @property
    def turns(self) -> TurnKeeper:
        """Its turns, whoever answers."""
        return self.recorder if self.record.texts is None else self.record.texts

    @property
    def total_reward(self) -> float | None:
        """Of the session and of its turns together; None if none was set."""
        if self.reward is None and not self.turn_rewards:
            return None
        return (self.reward or 0.0) + sum(self.turn_rewards.values())

    @property
    def has_samples(self) -> bool:
        """Whether a turn of it trains, or of another provider's, is there at all."""
        if self.record.texts is not None:
            return bool(self.record.texts.turns)
        return sum(self.recorder.left_out.values()) < self.recorder.num_turns

    def note_conversations(self, names: Iterator[str]) -> None:
        """The client calls what it does here by these names."""
        for name in names:
            known = (*self.conversations, *self.new_conversations)
            if name not in known and len(known) < _MOST_CONVERSATIONS:
                self.new_conversations += (name,)

    # -- records -------------------------------------------------------------------------------

    def apply(self, record: JournalRecord, *, is_replayed: bool = False) -> None:
        """What a record says has happened.

        Args:
            record: Of this session, but for its start.
            is_replayed: Whether the recorder has to be told of turns, too.

        Raises:
            ValueError: A turn cannot be read.
            LookupError: What a turn builds on is missing.
        """
        head = record.head
        kind = head["k"]
        if head.get("r"):
            self._note_request(head["r"], head.get("asked", ""))
        if kind == "turn":
            self._apply_turn(record, is_replayed=is_replayed)
        elif kind == "reward":
            self._apply_reward(head)
        elif kind == "end":
            self.ended_s, self.end_reason = head["t"], head["why"]
        elif kind == "state":
            self.state = SessionState(head["state"])

    def _note_request(self, request_id: str, asked: str) -> None:
        self.requests[request_id] = asked
        if len(self.requests) > _MOST_REQUESTS:
            del self.requests[next(iter(self.requests))]

    def _apply_turn(self, record: JournalRecord, *, is_replayed: bool) -> None:
        head = record.head
        if is_replayed:
            self.turns.replay(decode_turn(record.body))
        if head["c"]:
            self.calls[head["c"]] = min(self.calls.get(head["c"], head["i"]), head["i"])
        if names := head.get("names"):
            self.conversations += tuple(names)
            self.new_conversations = ()
        self.active_s = head["t"]

    def _apply_reward(self, head: Mapping[str, Any]) -> None:
        if head["turn"] < 0:
            self.reward = head["reward"]
        else:
            self.turn_rewards[head["turn"]] = head["reward"]
        if self.state is SessionState.OPEN:
            self.state = SessionState.REWARDED

    def records(self) -> Iterator[JournalRecord]:
        """All that made the session what it is, the start first, in the fewest records."""
        yield JournalRecord(self.start.facts())
        call_of = {turn: call for call, turn in self.calls.items()}
        names = list(self.conversations)
        for turn in self.turns.turn_records():
            told = {"c": call_of.get(turn.turn_id, ""), "i": turn.turn_id, "t": self.active_s}
            yield self._made("turn", encode_turn(turn), **told, names=names)
            names = []
        if self.reward is not None:
            yield self._made("reward", turn=-1, reward=self.reward)
        for turn_id, reward in self.turn_rewards.items():
            yield self._made("reward", turn=turn_id, reward=reward)
        if self.ended_s:
            yield self._made("end", t=self.ended_s, why=self.end_reason)
        for request_id, asked in self.requests.items():
            yield self._made("known", r=request_id, asked=asked)
        yield self._made("state", state=str(self.state))

    def _made(self, kind: str, body: bytes = b"", **facts: Any) -> JournalRecord:
        return JournalRecord({"k": kind, "s": self.session_id, **facts}, body)

    # -- what training gets --------------------------------------------------------------------

    def trajectories(self, style: Any = "concat") -> list[Trajectory]:
        """What trains of it.

        Raises:
            ValueError: The engine's samples are none that may train.
        """
        reward = self.total_reward
        outcome, failure = Outcome.OK, ""
        details: dict[str, Any] = {}
        if self._is_full():
            outcome, failure = Outcome.TRUNCATED, PROMPT_FILLS_CONTEXT
            details["limit_reached"] = failure
        if reward is None:
            outcome, failure = Outcome.UNSCORED, NO_REWARD
        if self.turn_rewards:
            details["turn_rewards"] = {str(turn): one for turn, one in self.turn_rewards.items()}
        return self.recorder.trajectories(
            style,
            task_id=self.start.task_id,
            group_id=self.group.key,
            episode_id=self.session_id,
            reward=reward,
            outcome=outcome,
            failure=failure,
            details=details,
        )

    def _is_full(self) -> bool:
        """Whether the last call was refused because the context is full, in an earlier process
        too."""
        outline = self.recorder.outline()
        last = outline[-1].abort_reason if outline else ""
        return self.record.is_full or last == PROMPT_FILLS_CONTEXT

    def splits(self) -> Counter[str]:
        """Conversations that stopped extending their record, by reason."""
        return self.recorder.splits
