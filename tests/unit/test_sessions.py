"""Sessions: who may call what, how they end, and what training is given of them."""

import logging
import re
from contextlib import ExitStack

import pytest

from areal_ray.core.trajectory import Outcome
from areal_ray.errors import ArealRayError
from areal_ray.gateway import keys
from areal_ray.gateway.call import CallError
from areal_ray.gateway.door import PROMPT_FILLS_CONTEXT
from areal_ray.gateway.session_book import JOURNAL_DAMAGED
from areal_ray.gateway.session_state import NO_REWARD
from tests.support.sessions import ADMIN_KEY, FIXED_KEY, Desk, sampled


@pytest.fixture
def new_desk(tmp_path):
    with ExitStack() as desks:
        yield lambda **options: desks.enter_context(Desk(tmp_path, **options))


@pytest.fixture
def desk(new_desk):
    return new_desk()


def refused(status):
    return pytest.raises(CallError, check=lambda error: error.status == status)


# -- life ----------------------------------------------------------------------------------------


def test_a_rewarded_session_is_given_to_training_once_as_it_was_sampled(desk):
    started = desk.rewarded(0.5, task_id="sum")
    group = desk.ready()
    assert group.session_ids == (started["session_id"],)
    assert (group.group_key, group.task_id, group.num_turns) == (started["group_id"], "sum", 1)
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.outcome) == (0.5, Outcome.OK)
    assert trajectory.episode_id == started["session_id"]
    assert trajectory.group_id == group.group_key
    assert len(sampled(group)[0]) == 3
    with pytest.raises(TimeoutError):
        desk.ready(0.05)
    desk.sessions.admitted(group.session_ids, "0/sum/0")
    desk.sessions.admitted(group.session_ids, "0/sum/0")
    assert desk.sessions.counts().num_admitted == 1
    desk.sessions.trained(group.session_ids, 3)
    desk.sessions.trained(group.session_ids, 3)
    desk.sessions.rejected(group.session_ids, "too late")
    counts = desk.sessions.counts()
    assert (counts.num_trained, counts.num_admitted, counts.rejected) == (1, 0, {})
    assert desk.sessions.book.groups == {}


@pytest.mark.parametrize("reward", [1.0, None])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_session_whose_prompt_filled_the_context_is_truncated_and_keeps_its_reward(
    desk, reward, is_restarted
):
    started = desk.start()
    key = started["api_key"]
    desk.call(key)
    record = desk.enter(key)
    turn = record.recorder.open_turn([{"role": "user", "content": "more than there is room for"}])
    record.recorder.abort_turn(turn, None, PROMPT_FILLS_CONTEXT)
    record.turn_over(turn.turn_id, "")
    record.is_full = True
    desk.sessions.leave(record)
    if is_restarted:
        desk.restart()
        desk.sessions.open_slot()
    if reward is not None:
        desk.ask("set_reward", key, reward=reward)
    desk.ask("end", key)
    desk.clock.now_s += 700  # the feedback is late
    (trajectory,) = desk.ready().trajectories
    assert trajectory.reward == reward
    is_scored = reward is not None
    assert trajectory.outcome is (Outcome.TRUNCATED if is_scored else Outcome.UNSCORED)
    assert trajectory.failure == (PROMPT_FILLS_CONTEXT if is_scored else NO_REWARD)
    assert trajectory.details["limit_reached"] == PROMPT_FILLS_CONTEXT


@pytest.mark.parametrize("is_admitted", [False, True])
def test_a_group_that_is_handed_back_is_offered_again_with_the_same_samples(desk, is_admitted):
    desk.rewarded()
    first = desk.ready()
    if is_admitted:
        desk.sessions.admitted(first.session_ids, "g")
        desk.restart()
    desk.sessions.hand_back(first.group_key)
    again = desk.ready()
    assert again.session_ids == first.session_ids
    assert sampled(again) == sampled(first)


def test_siblings_are_ready_together_and_a_rejected_one_leaves_its_group(desk):
    desk.config = {"idle_timeout_s": 100, "feedback_timeout_s": 0}
    desk.restart()
    started = desk.start(group_size=3)
    one, two, silent = started["sessions"]
    for number, each in enumerate((one, two)):
        desk.call(each["api_key"])
        desk.ask("set_reward", each["api_key"], reward=number)
        desk.ask("end", each["api_key"])
        with pytest.raises(TimeoutError):
            desk.ready(0.05)
    desk.call(silent["api_key"])
    desk.clock.now_s += 101
    group = desk.ready()
    assert group.session_ids == (one["session_id"], two["session_id"])
    assert [t.reward for t in group.trajectories] == [0, 1]
    assert desk.sessions.counts().rejected == {"idle_timeout": 1}
    assert desk.sessions.counts().failed_groups == {}


def test_a_group_without_a_session_left_has_failed_with_its_reason_and_frees_its_slot(desk):
    started = desk.start(group_size=2)
    with refused(429):
        desk.ask("start", task_id="t")
    for one in started["sessions"]:
        desk.ask("end", one["api_key"])
    counts = desk.sessions.counts()
    assert counts.failed_groups == {"no_turns": 1}
    assert counts.rejected == {"no_turns": 2}
    desk.ask("start", task_id="t")


# -- rewards -------------------------------------------------------------------------------------


def test_a_session_that_ends_without_a_reward_waits_for_it_then_is_unscored_and_never_zero(desk):
    for _ in range(2):
        started = desk.start()
        desk.call(started["api_key"])
        desk.ask("end", started["api_key"])
    assert desk.sessions.counts().num_waiting == 2
    with pytest.raises(TimeoutError):
        desk.ready(0.05)
    late = desk.ask("set_reward", session_id=started["session_id"], reward=0)
    assert late["reward"] == 0
    assert desk.ready().trajectories[0].reward == 0
    desk.clock.now_s += 601
    group = desk.ready()
    (trajectory,) = group.trajectories
    assert trajectory.outcome is Outcome.UNSCORED
    assert trajectory.reward is None
    desk.sessions.admitted(group.session_ids, "g")
    assert desk.sessions.counts().num_unscored == 1


def test_a_reward_may_be_changed_until_training_takes_the_session(desk):
    started = desk.rewarded(1.0)
    key = started["api_key"]
    with refused(410):
        desk.call(key)
    assert desk.ask("set_reward", key, reward=0.25)["reward"] == 0.25
    group = desk.ready()
    assert group.trajectories[0].reward == 0.25
    with refused(409):
        desk.ask("set_reward", key, reward=0.5)
    desk.sessions.hand_back(group.group_key)
    desk.ask("set_reward", key, reward=0.75)
    group = desk.ready()
    assert group.trajectories[0].reward == 0.75
    desk.sessions.admitted(group.session_ids, "g")
    with refused(409):
        desk.ask("set_reward", key, reward=0.5)
    desk.sessions.trained(group.session_ids, 1)
    with refused(410):
        desk.ask("set_reward", key, reward=0.5)


def test_rewards_of_turns_add_up_to_that_of_the_session_and_stand_beside_it(desk):
    started = desk.start()
    key = started["api_key"]
    first = desk.call(key)
    desk.call(key, "43")
    desk.ask("set_reward", key, interaction_id=f"chatcmpl-{first}", reward=0.5)
    desk.ask("set_reward", key, turn=1, reward=-0.25)
    assert desk.ask("set_reward", key, reward=1)["reward"] == 1.25
    desk.ask("end", key)
    for is_new in (False, True):
        if is_new:
            desk.sessions.hand_back(started["group_id"])
            desk.restart()
        trajectory = desk.ready().trajectories[0]
        assert trajectory.reward == 1.25
        assert trajectory.details == {"turn_rewards": {"0": 0.5, "1": -0.25}}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"reward": None}, 400),
        ({"reward": True}, 400),
        ({"reward": "1"}, 400),
        ({"reward": float("nan")}, 400),
        ({"reward": float("inf")}, 400),
        ({"reward": 1e12}, 400),
        ({"reward": 1, "turn": -1}, 400),
        ({"reward": 1, "turn": True}, 400),
        ({"reward": 1, "turn": 7}, 404),
        ({"reward": 1, "interaction_id": "chatcmpl-none"}, 404),
        ({"reward": 1, "session_id": "s-a-none"}, 404),
        ({"reward": 1, "conversation_id": "none"}, 404),
    ],
)
def test_a_reward_for_nothing_or_of_nothing_is_refused(desk, body, status):
    started = desk.start()
    desk.call(started["api_key"])
    with refused(status):
        desk.ask("set_reward", started["api_key"], **body)
    desk.ask("set_reward", started["api_key"], reward=1)


@pytest.mark.parametrize("evil", ["\x1b]0;owned\x07", "a\nb", "\x9b2J", "\u202eb"])
def test_names_that_a_terminal_would_obey_are_refused_at_the_door(desk, evil):
    for field in ("task_id", "request_id", "api_key", "model"):
        with refused(400):
            desk.start(**{field: evil})
    started = desk.start()
    for field in ("session_id", "conversation_id", "interaction_id", "request_id"):
        with refused(400):
            desk.ask("set_reward", started["api_key"], reward=1, **{field: evil})


def test_late_feedback_finds_its_session_by_reply_or_by_the_clients_own_name_for_it(desk):
    one, two = desk.start(), desk.start()
    reply = desk.call(one["api_key"], x_conversation_id="ticket-1", thread_id="shared")
    desk.call(two["api_key"], x_conversation_id="ticket-2", thread_id="shared")
    for each in (one, two):
        desk.ask("end", each["api_key"])
    desk.restart()
    told = desk.ask("set_reward", conversation_id="ticket-2", reward=0.5)
    assert told["session_id"] == two["session_id"]
    with refused(409):
        desk.ask("set_reward", conversation_id="shared", reward=1)
    with refused(400):
        desk.ask("set_reward", reward=1)
    told = desk.ask("set_reward", interaction_id=f"msg_{reply}", reward=1)
    assert told["session_id"] == one["session_id"]
    assert b"ticket" not in desk.journal_bytes()


# -- times ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "wait_s", "reason"),
    [
        ({"idle_timeout_s": 10, "feedback_timeout_s": 0}, 11, "idle_timeout"),
        ({"session_timeout_s": 10, "feedback_timeout_s": 0}, 11, "session_timeout"),
    ],
)
def test_a_session_whose_time_is_up_is_rejected_with_the_reason_or_counts_as_rewarded(
    new_desk, config, wait_s, reason
):
    desk = new_desk(config=config)
    good, bad, _never_called = desk.start(), desk.start(), desk.start()
    for each in (good, bad):
        desk.call(each["api_key"])
    desk.ask("set_reward", good["api_key"], reward=1)
    desk.clock.now_s += wait_s
    assert desk.ready().session_ids == (good["session_id"],)
    assert desk.sessions.counts().rejected == {reason: 2}
    with refused(410) as error:
        desk.call(bad["api_key"])
    assert reason in error.value.message


def test_a_session_is_not_idle_while_a_call_runs_and_is_sealed_when_the_last_one_is_over(desk):
    started = desk.start()
    desk.call(started["api_key"])
    record = desk.enter(started["api_key"])
    turn = record.recorder.open_turn([{"role": "user", "content": "more"}])
    desk.clock.now_s += 1000
    desk.sessions.rules.sweep()
    desk.ask("set_reward", started["api_key"], reward=1)
    desk.ask("end", started["api_key"])
    with refused(410):
        desk.enter(started["api_key"])
    assert desk.sessions.counts().num_ready == 0
    record.recorder.abort_turn(turn, None, "the client left")
    record.turn_over(turn.turn_id, "x")
    desk.sessions.leave(record)
    assert desk.ready().num_turns == 2


def test_a_restart_is_no_silence_of_the_agents(desk):
    started = desk.start()
    desk.call(started["api_key"])
    desk.clock.now_s += 2000
    desk.restart()
    desk.clock.now_s += 800
    desk.call(started["api_key"])


# -- keys ----------------------------------------------------------------------------------------


def test_keys_open_their_own_session_alone(desk):
    one, two = desk.start(), desk.start()
    for key in ("", "nonsense", "x" * 10_000, one["api_key"][:-1], one["session_id"]):
        with refused(401):
            desk.enter(key)
        for verb in ("start", "set_reward", "end"):
            with refused(401):
                desk.ask(verb, key, task_id="t", reward=1)
    with refused(401):
        desk.enter(ADMIN_KEY)
    with refused(404):
        desk.enter(one["api_key"], two["session_id"])
    with refused(404):
        desk.enter(ADMIN_KEY, "s-a-none")
    assert desk.enter(ADMIN_KEY, two["session_id"]).session_id == two["session_id"]
    assert desk.enter(one["api_key"], one["session_id"]).session_id == one["session_id"]
    reply = desk.call(two["api_key"], x_session_id="mine")
    for verb, body in (
        ("set_reward", {"reward": 1, "session_id": two["session_id"]}),
        ("set_reward", {"reward": 1, "interaction_id": reply}),
        ("set_reward", {"reward": 1, "conversation_id": "mine"}),
        ("end", {"session_id": two["session_id"]}),
    ):
        with refused(404):
            desk.ask(verb, one["api_key"], **body)
    with refused(401):
        desk.ask("start", one["api_key"], task_id="t")


def test_secrets_are_neither_in_the_journal_nor_in_the_log(desk, caplog):
    with caplog.at_level(logging.DEBUG):
        started = [desk.rewarded(), desk.start(api_key=FIXED_KEY), desk.start(group_size=2)]
        desk.call(FIXED_KEY)
        with refused(410):
            desk.call(started[0]["api_key"])
        desk.restart()
        desk.call(FIXED_KEY)
    secrets = {one["api_key"] for each in started for one in each["sessions"]} | {ADMIN_KEY}
    assert len(secrets) == 5
    written = desk.journal_bytes().decode("latin-1") + caplog.text + repr(desk.sessions.counts())
    for secret in secrets:
        assert secret not in written
        assert secret[-20:] not in written


def test_hashes_are_compared_in_constant_time_and_for_all_of_their_length():
    hashed = keys.hash_key(ADMIN_KEY)
    assert len(hashed) == 32
    assert keys.is_same(hashed, keys.hash_key(ADMIN_KEY))
    assert not keys.is_same(hashed, hashed[:-1] + b"x")
    assert not keys.is_same(hashed, hashed[:-1])


def test_a_fixed_key_goes_on_from_session_to_session(desk):
    first = desk.start(api_key=FIXED_KEY)
    assert first["api_key"] == FIXED_KEY
    desk.call(FIXED_KEY)
    desk.ask("set_reward", FIXED_KEY, reward=1)
    second = desk.start(api_key=FIXED_KEY)
    desk.call(FIXED_KEY)
    third = desk.start(api_key=FIXED_KEY)
    assert desk.ready().session_ids == (first["session_id"],)
    assert desk.sessions.counts().rejected == {"superseded": 1}
    desk.restart()
    desk.call(FIXED_KEY)
    assert len({one["session_id"] for one in (first, second, third)}) == 3
    desk.ask("end", FIXED_KEY)
    with refused(410):
        desk.call(FIXED_KEY)
    told = desk.ask("set_reward", FIXED_KEY, session_id=third["session_id"], reward=2)
    assert told["session_id"] == third["session_id"]


def test_feedback_that_comes_after_its_key_went_on_is_told_where_the_key_is_now(desk):
    first = desk.start(api_key=FIXED_KEY)
    reply = desk.call(FIXED_KEY, x_conversation_id="chat-1")
    second = desk.start(api_key=FIXED_KEY)
    for is_restarted in (False, True):
        if is_restarted:
            desk.restart()
        for named in (
            {"interaction_id": reply},
            {"conversation_id": "chat-1"},
            {"session_id": first["session_id"]},
        ):
            for key in (ADMIN_KEY, FIXED_KEY):
                with refused(410) as error:
                    desk.ask("set_reward", key, reward=1, **named)
                told = str(error.value)
                assert f"session {first['session_id']}: is over (rejected: superseded)" in told
                assert f"Its key's session is {second['session_id']} now" in told
                assert "end a session with /rl/end_session before" in told
    desk.sessions.open_slot()  # the restart forgot them
    stranger = desk.start()
    for named in ({"session_id": first["session_id"]}, {"conversation_id": "chat-1"}):
        with refused(404):
            desk.ask("set_reward", stranger["api_key"], reward=1, **named)
    with refused(404):
        desk.ask("set_reward", ADMIN_KEY, reward=1, interaction_id="chatcmpl-unheard-of")


def test_a_fixed_key_gives_up_no_session_for_one_that_may_not_start(desk):
    first = desk.start(api_key=FIXED_KEY)
    second = desk.ask("start", task_id="t", api_key=FIXED_KEY)
    assert desk.sessions.counts().rejected == {"superseded": 1}
    desk.sessions.close_slot()
    with refused(429):
        desk.ask("start", task_id="t", api_key=FIXED_KEY)
    desk.call(FIXED_KEY)
    assert first["session_id"] != second["session_id"]
    desk.ask("set_reward", FIXED_KEY, reward=1)
    with refused(429):  # but what is rewarded goes to training, which frees its slot
        desk.ask("start", task_id="t", api_key=FIXED_KEY)
    assert desk.ready().session_ids == (second["session_id"],)


@pytest.mark.parametrize(
    "key", [ADMIN_KEY, "short", "with blanks in it 123456", "ar-a-0123456789012345", "x" * 600]
)
def test_a_fixed_key_that_cannot_be_one_is_refused(desk, key):
    with refused(400):
        desk.start(api_key=key)
    with refused(400):
        desk.start(api_key=FIXED_KEY, group_size=2)


@pytest.mark.parametrize(
    "body", [{"task_id": ""}, {"task_id": 3}, {"group_size": 0}, {"group_size": 10_000}]
)
def test_a_start_that_makes_no_sense_is_refused(desk, body):
    with refused(400):
        desk.start(**body)
    assert desk.sessions.counts().num_open == 0


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "group_size: is 1; must be >= 2, the rewards that a group needs. Ask for 2"),
        ({"group_size": 1}, "is 1; must be >= 2"),
        (
            {"api_key": FIXED_KEY},
            "one session at a time: set admission.n_samples=1",
        ),
    ],
)
def test_a_group_that_training_could_not_take_is_refused_before_agents_work_for_it(
    new_desk, body, says
):
    desk = new_desk(least_siblings=2)
    with pytest.raises(CallError, match=re.escape(says)):
        desk.start(**body)
    assert desk.sessions.counts().num_open == 0
    assert len(desk.start(group_size=2)["sessions"]) == 2
    assert desk.start(api_key=FIXED_KEY, model="big")["session_id"]  # training takes none of it


@pytest.mark.parametrize(
    ("verb", "body", "says"),
    [
        ("start", {"task_id": None}, "task_id: is missing; must be a string"),
        ("start", {"task_id": ""}, "task_id: is empty; must be a string"),
        ("set_reward", {"reward": 1, "session_id": "x"}, "session 'x': there is none"),
        ("set_reward", {"reward": 1, "conversation_id": "x"}, "conversation 'x': there is none"),
        ("set_reward", {"reward": 1, "interaction_id": "x"}, "reply 'x': there is none"),
        ("set_reward", {"reward": 1}, "session_id: is missing"),
    ],
)
def test_what_is_missing_is_called_by_its_name(desk, verb, body, says):
    with pytest.raises(CallError, match=re.escape(says)):
        desk.ask(verb, **body)


def test_a_replica_has_a_name_that_can_be_part_of_a_key(tmp_path):
    with pytest.raises(ArealRayError, match="1 to 16"):
        Desk(tmp_path, name="a-b")


# -- slots and requests that come twice ------------------------------------------------------------


def test_a_session_starts_only_while_training_wants_one(desk):
    with refused(429) as error:
        desk.ask("start", task_id="t")
    assert error.value.retry_after_s
    desk.sessions.open_slot()
    desk.ask("start", task_id="t")
    with refused(429):
        desk.ask("start", task_id="t")
    desk.sessions.close_slot()
    desk.sessions.close_slot()
    desk.sessions.open_slot()
    with refused(429):
        desk.ask("start", task_id="t")


@pytest.mark.parametrize("is_new", [False, True])
def test_what_is_asked_twice_by_one_request_id_happens_once(desk, is_new):
    def again(verb, key=ADMIN_KEY, **body):
        first = desk.ask(verb, key, **body)
        if is_new:
            desk.restart()
        second = desk.ask(verb, key, **body)
        assert second == first
        return first

    desk.sessions.open_slot()
    started = again("start", task_id="t", group_size=2, request_id="r1")
    with refused(409):
        desk.ask("start", task_id="other", request_id="r1")
    key = started["api_key"]
    desk.call(key)
    again("set_reward", key, reward=1, request_id="r2")
    desk.ask("set_reward", key, reward=0, request_id="r3")
    desk.ask("set_reward", key, reward=1, request_id="r2")
    again("end", key, request_id="r4")
    with refused(410):
        desk.ask("end", key)
    desk.ask("end", started["sessions"][1]["api_key"])
    group = desk.ready()
    assert [t.reward for t in group.trajectories] == [0]
    desk.sessions.trained(group.session_ids, 1)
    again("end", key, request_id="r4")
    again("set_reward", key, reward=1, request_id="r2")


@pytest.mark.parametrize("when", ["at once", "after a restart", "after training"])
def test_a_request_id_that_comes_with_another_request_is_refused_and_changes_nothing(desk, when):
    started = desk.start()
    key, other = started["api_key"], {"request_id": "visit 1"}
    desk.call(key)
    desk.ask("set_reward", key, reward=1, **other)
    if when == "after a restart":
        desk.restart()
    elif when == "after training":
        desk.ask("end", key)
        desk.sessions.trained(desk.ready().session_ids, 1)
    for verb, body in (
        ("end", {}),
        ("set_reward", {"reward": 2}),
        ("set_reward", {"reward": 1, "turn": 0}),
    ):
        with refused(409):
            desk.ask(verb, key, **body, **other)
    assert desk.ask("set_reward", key, reward=1, **other)["reward"] == 1
    if when != "after training":
        desk.call(key)  # it has not ended
        desk.ask("end", key, request_id="visit 1, end")
        assert [t.reward for t in desk.ready().trajectories] == [1]


# -- restarts and the journal --------------------------------------------------------------------


def test_a_restarted_gateway_goes_on_where_the_old_one_was(desk):
    sealed, taken, admitted = (desk.rewarded(n, f"4{n}") for n in range(3))
    half = desk.start()
    desk.call(half["api_key"])
    first = desk.ready()
    desk.sessions.hand_back(first.group_key)
    before = [desk.ready() for _ in range(3)]
    desk.sessions.admitted((admitted["session_id"],), "g")
    desk.restart()
    counts = desk.sessions.counts()
    assert (counts.num_ready, counts.num_admitted, counts.num_open) == (2, 1, 1)
    after = {desk.ready().session_ids[0]: None for _ in range(2)}
    assert set(after) == {sealed["session_id"], taken["session_id"]}
    assert sampled(before[0]) == sampled(first)
    for _ in range(4):  # what was begun before takes its slots first
        desk.sessions.open_slot()
    again = desk.ask("start", task_id="t")
    assert again["session_id"] not in {one["session_id"] for one in (sealed, taken, half)}
    desk.call(half["api_key"])
    desk.ask("set_reward", half["api_key"], reward=1)
    desk.ask("end", half["api_key"])
    assert desk.ready().num_turns == 2


def test_a_session_with_a_gap_in_its_journal_is_rejected_and_the_others_are_not(desk):
    good, bad = desk.start(), desk.start()
    for said in ("41", "42", "43"):
        desk.call(good["api_key"], said)
        desk.call(bad["api_key"], f"bad {said}")
    (path,) = desk.folder.glob("*.seg")
    raw = bytearray(path.read_bytes())
    place = raw.index(b'"s":"' + bad["session_id"].encode() + b'","n":1,')
    raw[place] ^= 1
    path.write_bytes(raw)
    desk.restart()
    assert desk.sessions.counts().rejected == {JOURNAL_DAMAGED: 1}
    with refused(410):
        desk.call(bad["api_key"])
    desk.ask("set_reward", good["api_key"], reward=1)
    desk.ask("end", good["api_key"])
    assert desk.ready().num_turns == 3


def test_the_journal_follows_what_lives_though_one_session_lives_long(new_desk):
    desk = new_desk(segment_bytes=4096)
    old = desk.start()
    desk.call(old["api_key"], "41")
    most = 0
    for number in range(120):
        started = desk.rewarded()
        group = desk.ready()
        desk.sessions.admitted(group.session_ids, "g")
        desk.sessions.trained(group.session_ids, number)
        desk.sessions.close_slot()
        most = max(most, len(desk.journal_bytes()))
        assert group.session_ids == (started["session_id"],)
    assert most < 8 * 4096
    desk.restart()
    assert desk.sessions.counts().num_ready == 0
    desk.call(old["api_key"], "42")
    desk.ask("set_reward", old["api_key"], reward=1)
    desk.ask("end", old["api_key"])
    group = desk.ready()
    assert (group.num_turns, group.session_ids) == (2, (old["session_id"],))
