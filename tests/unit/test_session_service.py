"""What a run that goes on tells its gateways of their sessions, from its ledger's journal."""

import asyncio
from collections import Counter
from typing import Any

from areal_ray.core.ledger import Lease, Ledger
from areal_ray.core.summaries import GroupSummary
from areal_ray.core.task import Task
from areal_ray.runtime.gateway_notes import Note
from areal_ray.runtime.services import Tracker
from areal_ray.runtime.session_service import MOST_OVER, SessionService, ends_of


def committed(group: str, *sessions: str) -> dict[str, Any]:
    return {
        "event": "committed",
        "group": group,
        "sessions": list(sessions),
        "session_group": f"g-0-{sessions[0]}",
    }


def trained(step: int, *groups: str) -> dict[str, Any]:
    return {"event": "trained", "step": step, "groups": list(groups)}


def told(events: list[dict[str, Any]], step: int) -> dict[str, tuple[str, str]]:
    """Verb and fact by session."""
    return {
        session: end for delivery, end in ends_of(events, step) for session in delivery.sessions
    }


def test_what_the_checkpoint_holds_is_trained_and_what_it_does_not_is_offered_again():
    events = [
        committed("0/slot-0/0", "a", "b"),
        committed("0/slot-1/0", "c"),
        committed("0/slot-2/0", "d"),
        committed("0/slot-3/0", "e"),
        trained(1, "0/slot-0/0"),
        {"event": "dropped", "group": "0/slot-3/0", "reason": "too_stale"},
        trained(2, "0/slot-1/0"),
    ]
    assert told(events, 1) == {
        "a": ("trained", "1"),
        "b": ("trained", "1"),
        "c": ("hand_back", ""),
        "d": ("hand_back", ""),
        "e": ("rejected", "too_stale"),
    }


def test_a_step_that_an_earlier_resumption_forgot_counts_for_nothing():
    events = [
        committed("0/slot-0/0", "a"),
        trained(1, "0/slot-0/0"),
        committed("0/slot-1/0", "b"),
        trained(2, "0/slot-1/0"),
        {"event": "resumed", "step": 1, "version": 1},
        committed("0/slot-1/0", "c"),
        trained(2, "0/slot-1/0"),
    ]
    assert told(events, 2) == {
        "a": ("trained", "1"),
        "b": ("hand_back", ""),
        "c": ("trained", "2"),
    }


def test_a_slot_that_failed_after_a_resumption_says_nothing_of_the_sessions_that_it_had_before():
    events = [
        committed("0/slot-0/0", "a"),
        {"event": "resumed", "step": 0, "version": 0},
        {"event": "failed", "group": "0/slot-0/0", "reason": "actor lost"},
    ]
    assert told(events, 0) == {"a": ("hand_back", "")}


def test_groups_without_sessions_are_nobodys_business():
    events = [{"event": "committed", "group": "0/t/0"}, trained(1, "0/t/0")]
    assert told(events, 1) == {}
    assert told([{"event": "failed", "group": "0/t/1", "reason": "x"}], 0) == {}


class Gateways:
    """Answers for the gateway actors: each group is one session, and every note is heard."""

    def __init__(self) -> None:
        self.num_offered, self.heard = 0, Counter()

    def names(self) -> list[str]:
        return ["gateway-0"]

    async def least_busy(self) -> str:
        return "gateway-0"

    async def submit_payload(self, name: str, verb: str, group: str) -> tuple[GroupSummary, None]:
        self.num_offered += 1
        session = f"s-{self.num_offered}"
        made = GroupSummary(
            group, "t", 1, versions=(0,), num_tokens=1, num_sampled_tokens=1, num_turns=1,
            payload_bytes=0, sessions=(session,), session_group=f"g-0-{session}",
        )  # fmt: skip
        return made, None

    async def submit(self, name: str, verb: str, notes: list[Note]) -> None:
        self.heard.update(note.verb for note in notes)


def test_sessions_that_ended_are_forgotten_in_time_and_a_late_offer_is_still_refused():
    async def scenario() -> None:
        gateways, count = Gateways(), 3 * MOST_OVER
        service = SessionService(gateways, Tracker(), max_attempts=1)
        ledger = Ledger()
        ledger.follow(service.follow)
        for number in range(count):
            lease = ledger.reserve(Lease(0, Task(f"t{number}", ()), 0, 0))
            made, _ = await service.run_group(lease)
            ledger.lease(lease.group_id)
            if number % 3:
                ledger.commit(lease.group_id, {})
                ledger.train([lease.group_id], number)
            else:
                ledger.fail(lease.group_id, "nothing was sampled")
            service.saved(number)
            await asyncio.sleep(0)
        assert gateways.heard["trained"] + gateways.heard["rejected"] == count
        assert len(service._known) <= MOST_OVER
        assert not service._is_new(made)

    asyncio.run(scenario())


def test_who_follows_a_ledger_hears_of_each_end_after_the_journal():
    heard: list[tuple[str, str]] = []
    ledger = Ledger(lambda event: heard.append(("journal", event["event"])))
    ledger.follow(lambda event: heard.append(("follower", event["event"])))
    lease = Lease(0, Task("t", ()), 0, 0)
    ledger.reserve(lease)
    ledger.lease(lease.group_id)
    ledger.commit(lease.group_id, {})
    ledger.train([lease.group_id], 1)
    assert heard == [
        *(("journal", "committed"), ("follower", "committed")),
        *(("journal", "trained"), ("follower", "trained")),
    ]


def test_a_run_that_goes_on_asks_a_gateway_for_groups_once_it_has_heard_what_was_before():
    class Hearing(Gateways):
        def __init__(self) -> None:
            super().__init__()
            self.notes: list[Note] = []
            self.may_hear = asyncio.Event()

        async def submit(self, name: str, verb: str, notes: list[Note]) -> None:
            await self.may_hear.wait()
            self.notes += notes

    async def go() -> None:
        gateways = Hearing()
        service = SessionService(gateways, Tracker(), max_attempts=2)
        events = [committed(f"0/slot-{n}/0", f"old-{n}") for n in range(3)]
        service.go_on([*events, trained(1, "0/slot-0/0")], step=1)
        lease = Lease(0, Task("t", ()), 0, 0)
        asking = asyncio.ensure_future(service.run_group(lease))
        await asyncio.sleep(0.01)
        assert (gateways.num_offered, asking.done()) == (0, False)
        gateways.may_hear.set()
        await asking
        assert gateways.num_offered == 1
        # Each goes before all others, so the oldest has to be the last.
        handed_back = [note.sessions for note in gateways.notes if note.verb == "hand_back"]
        assert handed_back == [("old-2",), ("old-1",)]

    asyncio.run(go())
