"""The agent service of kind online: groups come from a gateway's sessions.

Exactly once over every death: a gateway keeps each session in its own journal until it is told what
became of it, and tells the driver's ledger nothing twice. It is told `admitted` once the ledger has
the group, `rejected` where that was dropped, and `trained` only once a checkpoint holds the step: a
run that goes on from an earlier one takes its sessions again, as it takes the step again.

run_group waits for: clients that end their sessions; unblocked by them and by the time-outs of
`gateway.sessions`. Notes wait for a gateway that restarts, for as long as the run lasts.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray import ObjectRef

from areal_ray.core.ledger import Lease
from areal_ray.core.summaries import GroupSummary
from areal_ray.errors import ActorGone, ActorLost
from areal_ray.gateway.keys import replica_of
from areal_ray.runtime.fleet import Fleet, unheard
from areal_ray.runtime.gateway_notes import Note
from areal_ray.runtime.services import Tracker

_RETRY_S = 0.5
_ENDS = ("trained", "rejected")
"""Notes after which a session is not offered again."""
MOST_OVER = 4096
"""Sessions that ended and are still known, should an offer have been on its way."""


@dataclass(slots=True)
class Delivery:
    """Sessions that the driver has, by the ledger's name of their group."""

    group_id: str
    session_group: str
    sessions: tuple[str, ...]


@dataclass(slots=True)
class _Outbox:
    """Notes for one gateway, in order."""

    notes: list[Note] = field(default_factory=list)
    sending: "asyncio.Future[None] | None" = None
    is_behind: bool = False
    """The gateway has not heard yet what a run that goes on knows of its sessions."""


class SessionService:
    """Gateway actors, as the driver's loops see them."""

    def __init__(self, fleet: Fleet, tracker: Tracker, *, max_attempts: int) -> None:
        """`max_attempts`: times a group may fail before its sessions are rejected."""
        self.fleet = fleet
        self._tracker = tracker
        self._max_attempts = max_attempts
        self._of_group: dict[str, Delivery] = {}
        """Of groups in flight, by group id."""
        self._trained: list[tuple[int, Delivery]] = []
        """Steps that no checkpoint holds yet."""
        self._known: set[str] = set()
        """Sessions that are in flight or have ended here: what else is delivered is new."""
        self._over: deque[str] = deque()
        """Those whose gateway has heard, and written down, how they ended; the oldest first."""
        self._failures: Counter[str] = Counter()
        """Of groups of sessions that were handed back."""
        self._outboxes = {name: _Outbox() for name in fleet.names()}
        self.urls: dict[str, str] = {}
        """Of each gateway, by name."""
        self._owing: Counter[str] = Counter()
        """Groups that a gateway that leaves has begun and that nobody has asked it for."""

    def join(self, name: str, url: str) -> None:
        """A gateway more."""
        self._outboxes[name] = _Outbox()
        self.urls[name] = url

    def first_urls(self, count: int) -> tuple[str, ...]:
        """Of the gateways that the run begins with; those that it only takes back come after."""
        return tuple(self.urls.values())[:count]

    def part(self, name: str) -> None:
        """A gateway less; it holds no session."""
        del self._outboxes[name], self.urls[name], self._owing[name]

    def owes(self, name: str, num_groups: int) -> None:
        """So many groups of a gateway that leaves are to be asked for."""
        self._owing[name] = num_groups

    async def run_group(self, lease: Lease) -> tuple[GroupSummary, ObjectRef]:
        """The oldest group of sessions that is over, or the next one to be.

        Raises:
            ActorGone: A gateway died for good.
        """
        try:
            while True:
                self._tracker.enter(lease.group_id, "gateway", "restart")
                member = self._owing_one() or await self.fleet.least_busy()
                self._tracker.enter(lease.group_id, member, "wait for clients")
                await self._caught_up(member)
                try:
                    made, payload = await self.fleet.submit_payload(
                        member, "serve_group", lease.group_id
                    )
                except ActorGone:
                    raise
                except ActorLost:  # what was sealed there is offered again after its restart
                    await asyncio.sleep(_RETRY_S)
                    continue
                if made is not None and self._is_new(made):  # None: it leaves the run
                    return made, payload
        finally:
            self._tracker.leave(lease.group_id)

    def dump(self, payloads: Sequence[ObjectRef], step: int) -> None:
        """Have the first gateway write these groups' episodes down; nobody waits for it."""
        first = self.fleet.names()[0]  # one writer a file
        self.fleet.handles[first].dump_episodes.remote(list(payloads), step)

    def follow(self, event: Mapping[str, Any]) -> None:
        """Take an event of the run's ledger, and tell the gateways what it means to them."""
        if event["event"] == "trained":
            step = int(event["step"])
            self._trained += [(step, self._of_group.pop(group)) for group in event["groups"]]
            return
        delivery = self._of_group.get(event.get("group", ""))
        if delivery is None:  # a lease that never got sessions
            return
        if event["event"] == "committed":
            self._tell(delivery, "admitted", delivery.group_id)
            return
        del self._of_group[delivery.group_id]
        if event["event"] == "failed" and not self._is_given_up(delivery):
            self._known.difference_update(delivery.sessions)
            self._tell(delivery, "hand_back", "")
        else:
            self._tell(delivery, "rejected", str(event["reason"]))

    def saved(self, step: int) -> None:
        """A checkpoint holds all steps up to `step`."""
        for trained_at, delivery in self._trained:
            if trained_at <= step:
                self._tell(delivery, "trained", str(trained_at))
        self._trained = [one for one in self._trained if one[0] > step]

    def go_on(self, events: Iterable[Mapping[str, Any]], step: int) -> None:
        """Tell the gateways what a run that goes on from `step` knows of their sessions.

        Args:
            events: All of its ledger's journal, from before this resumption.
            step: Steps that its checkpoint holds.
        """
        # The oldest last: what is handed back comes before all that a gateway has to offer.
        for delivery, (verb, fact) in reversed(ends_of(events, step)):
            if verb != "hand_back":
                self._known.update(delivery.sessions)
            self._tell(delivery, verb, fact)
        for outbox in self._outboxes.values():
            outbox.is_behind = bool(outbox.notes)

    async def _caught_up(self, name: str) -> None:
        """Wait until a gateway has heard what `go_on` told: before, it would offer what it holds
        in another order, and the oldest groups would be too old by their turn."""
        outbox = self._outboxes.get(name)
        if outbox is not None and outbox.is_behind and outbox.sending is not None:
            await asyncio.wait({outbox.sending})

    def _owing_one(self) -> str:
        name = next((name for name, count in self._owing.items() if count), "")
        if name:
            self._owing[name] -= 1
        return name

    def _is_new(self, made: GroupSummary) -> bool:
        """Whether the driver has none of these sessions.

        A gateway that died before it was told what became of them offers them again. It holds them
        now, and is told by the note that is on its way or to come.
        """
        if not self._known.isdisjoint(made.sessions):
            return False
        delivery = Delivery(made.group_id, made.session_group, made.sessions)
        self._of_group[made.group_id] = delivery
        self._known.update(made.sessions)
        return True

    def _is_given_up(self, delivery: Delivery) -> bool:
        self._failures[delivery.session_group] += 1
        return self._failures[delivery.session_group] >= self._max_attempts

    # -- notes to the gateways -----------------------------------------------------------------

    def _tell(self, delivery: Delivery, verb: str, fact: str) -> None:
        name = f"gateway-{replica_of(delivery.session_group)}"
        outbox = self._outboxes.get(name)
        if outbox is None:  # a run that goes on with fewer gateways
            return
        outbox.notes.append(Note(verb, delivery.session_group, delivery.sessions, fact))
        if outbox.sending is None or outbox.sending.done():
            outbox.sending = unheard(self._send(name, outbox))

    async def _send(self, name: str, outbox: _Outbox) -> None:
        while outbox.notes:
            notes = list(outbox.notes)
            try:
                await self.fleet.submit(name, "take_notes", notes)
            except ActorGone:
                return
            except ActorLost:
                await asyncio.sleep(_RETRY_S)
            else:
                del outbox.notes[: len(notes)]
                self._forget_ended(notes)
        outbox.is_behind = False

    def _forget_ended(self, heard: Sequence[Note]) -> None:
        for note in heard:
            if note.verb in _ENDS:
                self._over.extend(note.sessions)
                self._failures.pop(note.session_group, None)
        while len(self._over) > MOST_OVER:
            self._known.discard(self._over.popleft())


def ends_of(
    events: Iterable[Mapping[str, Any]], step: int
) -> list[tuple[Delivery, tuple[str, str]]]:
    """What became of each group of sessions, as of the checkpoint after `step`: verb and fact."""
    of_group: dict[str, Delivery] = {}
    ends: dict[str, tuple[Delivery, tuple[str, str]]] = {}
    for event in events:
        kind = event["event"]
        if kind == "committed" and "sessions" in event:
            delivery = Delivery(event["group"], event["session_group"], tuple(event["sessions"]))
            of_group[delivery.group_id] = delivery
            ends[delivery.session_group] = (delivery, ("hand_back", ""))
        elif kind == "resumed":  # what was trained after that checkpoint was forgotten
            for key, (delivery, (verb, fact)) in list(ends.items()):
                if verb == "trained" and int(fact) > event["step"]:
                    ends[key] = (delivery, ("hand_back", ""))
            of_group.clear()  # slots have their names again: what ends from here on is another's
        elif kind == "trained":
            for group in event["groups"]:
                if group in of_group:
                    delivery = of_group.pop(group)
                    is_held = event["step"] <= step
                    end = ("trained", str(event["step"])) if is_held else ("hand_back", "")
                    ends[delivery.session_group] = (delivery, end)
        elif kind in ("dropped", "failed") and event["group"] in of_group:
            delivery = of_group.pop(event["group"])
            ends[delivery.session_group] = (delivery, ("rejected", event["reason"]))
    return list(ends.values())
