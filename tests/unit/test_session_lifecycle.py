"""Whatever agents, training and crashes do: a session ends once, and is trained on at most once."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from areal_ray.gateway.call import CallError
from areal_ray.gateway.session_state import SessionState
from tests.support.sessions import FIXED_KEY, Desk, sampled, sampled_ids

INDEX = st.integers(0, 7)
CONFIG = {"idle_timeout_s": 50.0, "session_timeout_s": 200.0, "feedback_timeout_s": 20.0}


def status_of(ask: Callable[[], Any]) -> tuple[int, Any]:
    """The status that something would be answered with, and the answer."""
    try:
        return 200, ask()
    except CallError as error:
        return error.status, None


class Gateway(RuleBasedStateMachine):
    """Sessions, beside the little that a reader of the issue would write down about them."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.desk = Desk(self.folder, config=CONFIG, segment_bytes=3000)
        self.keys: dict[str, str] = {}
        self.said: dict[str, list[str]] = {}
        self.rewards: dict[str, float] = {}
        self.held: list[Any] = []
        self.admitted: list[Any] = []
        self.ended: dict[str, SessionState] = {}
        self.ids: set[str] = set()
        self.number = 0
        self.num_slots = 0

    def teardown(self) -> None:
        self.desk.sessions.close()
        self.desk.runner.close()
        shutil.rmtree(self.folder)

    def some(self, index: int) -> str:
        """One of the sessions that were started, also of those that are over."""
        return sorted(self.keys)[index % len(self.keys)]

    def note(self, started: Any) -> None:
        for one in started["sessions"]:
            assert one["session_id"] not in self.ids
            self.ids.add(one["session_id"])
            if one["api_key"] != FIXED_KEY:
                self.keys[one["session_id"]] = one["api_key"]
            self.said[one["session_id"]] = []

    # -- agents ------------------------------------------------------------------------------

    @rule(size=st.integers(1, 3), is_fixed=st.booleans())
    def start(self, size: int, is_fixed: bool) -> None:
        body = {"api_key": FIXED_KEY} if is_fixed else {"group_size": size}
        num_groups = len(self.desk.sessions.book.groups)
        status, told = status_of(lambda: self.desk.ask("start", task_id="t", **body))
        if status == 200:
            self.note(told)
        else:
            assert status == 429
            assert num_groups >= self.num_slots

    @precondition(lambda self: self.keys)
    @rule(index=INDEX, is_fixed=st.booleans())
    def call(self, index: int, is_fixed: bool) -> None:
        key = FIXED_KEY if is_fixed else self.keys[self.some(index)]
        self.number += 1
        status, record = status_of(lambda: self.desk.enter(key))
        if status != 200:
            assert status == 410 or is_fixed
            return
        self.desk.sessions.leave(record)
        assert record.session_id not in self.ended
        if not is_fixed:
            assert record.session_id == self.some(index)
        self.desk.call(key, str(self.number))
        self.said[record.session_id].append(str(self.number))

    @precondition(lambda self: self.said)
    @rule(index=INDEX, reward=st.sampled_from([0.0, 0.5, 1.0]))
    def set_reward(self, index: int, reward: float) -> None:
        session_id = sorted(self.said)[index % len(self.said)]
        body = {"session_id": session_id, "reward": reward}
        status, _ = status_of(lambda: self.desk.ask("set_reward", **body))
        if status == 200:
            self.rewards[session_id] = reward
            assert session_id not in self.ended
        else:
            taken = (*self.held, *self.admitted)
            is_taken = any(session_id in group.session_ids for group in taken)
            assert status == (409 if is_taken else 410)

    @precondition(lambda self: self.keys)
    @rule(index=INDEX)
    def end(self, index: int) -> None:
        status, _ = status_of(lambda: self.desk.ask("end", self.keys[self.some(index)]))
        assert status in (200, 410)

    # -- the world ---------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 25.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.desk.clock.now_s += seconds
        self.desk.sessions.rules.sweep()

    @rule()
    def restart(self) -> None:
        self.desk.sessions.close()
        self.desk.restart()
        self.held.clear()
        self.num_slots = 0

    # -- training ----------------------------------------------------------------------------

    @rule()
    def want(self) -> None:
        self.desk.sessions.open_slot()
        self.num_slots += 1

    @precondition(lambda self: self.desk.sessions.rules.ready)
    @rule()
    def take(self) -> None:
        group = self.desk.ready()
        owned = [one for each in (*self.held, *self.admitted) for one in each.session_ids]
        assert not set(group.session_ids) & (set(owned) | set(self.ended))
        for trajectory, ids in zip(group.trajectories, sampled(group), strict=True):
            assert trajectory.reward == self.rewards.get(trajectory.episode_id)
            own = [sampled_ids(said) for said in self.said[trajectory.episode_id]]
            assert ids in own, "tokens of another session"
        self.held.append(group)

    @precondition(lambda self: self.held)
    @rule(index=INDEX)
    def hand_back(self, index: int) -> None:
        self.desk.sessions.hand_back(self.held.pop(index % len(self.held)).group_key)

    @precondition(lambda self: self.held)
    @rule(index=INDEX)
    def admit(self, index: int) -> None:
        group = self.held.pop(index % len(self.held))
        self.desk.sessions.admitted(group.session_ids, "g")
        self.admitted.append(group)

    @precondition(lambda self: self.admitted)
    @rule(index=INDEX, is_trained=st.booleans())
    def finish(self, index: int, is_trained: bool) -> None:
        group = self.admitted.pop(index % len(self.admitted))
        if is_trained:
            self.desk.sessions.trained(group.session_ids, 1)
        else:
            self.desk.sessions.rejected(group.session_ids, "stale")
        if self.num_slots:
            self.num_slots -= 1
            self.desk.sessions.close_slot()

    # -- what always holds -------------------------------------------------------------------

    @invariant()
    def a_session_ends_once_and_stays_so(self) -> None:
        book = self.desk.sessions.book
        for session_id, past in book.past.items():
            assert self.ended.setdefault(session_id, past.state) is past.state
            assert session_id not in book.sessions
        for session_id in self.ended:
            assert session_id not in book.sessions
        assert self.ids == set(book.sessions) | set(self.ended)

    @invariant()
    def every_session_is_counted_in_one_place(self) -> None:
        counts = self.desk.sessions.counts()
        book = self.desk.sessions.book
        in_groups = sum(len(group.sessions) for group in book.groups.values())
        assert in_groups == len(book.sessions)
        assert counts.num_open + counts.num_waiting + counts.num_admitted <= in_groups
        assert counts.num_held == len(self.held)


Gateway.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestLifecycle = Gateway.TestCase
