"""Whatever agents do: each sampled token trains once, and a replayed record goes on alike."""

import gc
import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_ray.core.trajectory import Trajectory
from areal_ray.gateway.record_policy import CallLabel, RecordPolicy
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.turn_record import decode_turn, encode_turn
from tests.support.recorded_agents import (
    TOOLS,
    RecordedModel,
    call,
    redumped,
    result,
    system,
    user,
)

HABITS = ("plain", "redump", "strip", "no_reasoning", "dedup", "edit", "delete", "handle", "ids")
FATES = ("close", "close", "close", "retry", "abort", "storm", "choices")


class Agent:
    """One conversation whose client has habits; several run side by side."""

    def __init__(self, model: RecordedModel, name: str, draw: Any, *, tail: bool) -> None:
        self.model, self.draw = model, draw
        self.headers = {} if name == "main" else {"x_claude_code_agent_id": name}
        self.history: list[Any] = [system(f"you are {name}"), user("go")]
        self.tail = [user("<<<INTERNAL>>>")] if tail else []
        self.open: list[Any] = []
        self.number = 0

    def ask(self) -> None:
        """Send the next request, or the same one several times."""
        fate = self.draw(st.sampled_from(FATES))
        prompt = [*self.history, *self.tail]
        turns = [self.model.open(prompt, TOOLS, **self.headers)]
        if fate == "retry":
            turns.append(self.model.open(prompt, TOOLS, **self.headers))
        if fate == "choices":
            turns.append(self.model.recorder.sibling_turn(turns[0]))
            self.model.prompts[turns[1].turn_id] = turns[1].prompt_ids.tolist()
        if fate == "storm":
            turns += [self.model.open(prompt, TOOLS, **self.headers) for _ in range(2)]
        self.open = [(turn, fate) for turn in turns]

    def answer(self) -> None:
        """The model answers, and the client makes of it what it does."""
        said = None
        for turn, fate in self.open:
            text = self.sampled()
            if fate == "abort" or (fate == "storm" and turn is not self.open[-1][0]):
                self.model.abort(turn, text)
            else:
                said = self.model.close(turn, text)
                said_turn = turn
        self.open = []
        if said is None:
            self.history.append(user("are you there?"))
            return
        self.resend(said, said_turn.handle)

    def sampled(self) -> str:
        """What the model says next."""
        self.number += 1
        kind = self.draw(st.sampled_from(("text", "call", "twice", "think", "same")))
        made = call("run", f'{{"n" :  {self.number}.0 }}')
        return {
            "text": f" said {self.number}\n",
            "call": f"look{made}",
            "twice": made * 2,
            "same": call("run", "{}"),
            "think": f"<think>hm {self.number}</think> well\n{made}",
        }[kind]

    def resend(self, said: Any, handle: str) -> None:
        """Put the reply into the history, as this client does."""
        habit = self.draw(st.sampled_from(HABITS))
        said = redumped(said) if habit == "redump" else dict(said)
        calls = said.get("tool_calls", [])
        if habit == "handle":
            said["handle"] = handle
        if habit in ("strip", "no_reasoning"):
            said["content"] = said["content"].strip()
        if habit in ("handle", "no_reasoning"):
            said.pop("reasoning", None)
        if habit == "dedup" and len(calls) == 2:
            said["tool_calls"] = calls[:1]
        if habit == "ids":
            said["tool_calls"] = [{**c, "id": c["id"] + "_x-1"} for c in calls]
        if habit == "edit":
            said["content"] += "!"
        if habit == "delete":
            self.history.append(user("again, with a call"))
            return
        self.history.append(said)
        for index in range(len(said.get("tool_calls", ()))):
            self.history.append(result(said, f"result {self.number}", index))
        if not said.get("tool_calls"):
            self.history.append(user(f"and {self.number}?"))


def run_agents(data: Any, policy: RecordPolicy) -> tuple[RecordedModel, list[Agent]]:
    model = RecordedModel(policy)
    agents = [
        Agent(model, name, data.draw, tail=data.draw(st.booleans()))
        for name in ("main", "left", "right")
    ]
    for _ in range(data.draw(st.integers(2, 9))):
        agent = data.draw(st.sampled_from(agents))
        if agent.open:
            agent.answer()
        else:
            agent.ask()
    for agent in agents:
        if agent.open:
            agent.answer()
    return model, agents


POLICIES = st.builds(
    RecordPolicy,
    dropped_reasoning=st.sampled_from(("splice", "branch")),
    untaken=st.sampled_from(("drop", "train")),
    aborted=st.sampled_from(("drop", "train")),
)
quick = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(data=st.data(), policy=POLICIES)
def test_the_engine_s_log_trains_exactly_once_but_for_what_is_labelled(data, policy):
    model, _ = run_agents(data, policy)
    outline = {turn.turn_id: turn for turn in model.recorder.outline()}
    assert outline.keys() == model.log.keys()
    kept = {i for i, turn in outline.items() if not turn.left_out}
    trained = model.trained_ids()
    assert trained == {i: ids for i, ids in model.log.items() if i in kept and ids}
    reasons = {turn.left_out for turn in outline.values()} - {""}
    allowed = {"untaken"} if policy.untaken == "drop" else set()
    assert reasons <= allowed | ({"aborted"} if policy.aborted == "drop" else set())
    for turn_id in outline:
        record = model.recorder.turn_record(turn_id)
        assert record.token_ids.tolist() == model.log[turn_id]
    assert all(turn.left_out != "untaken" for turn in outline.values() if is_only(turn, outline))


def is_only(turn: Any, outline: Any) -> bool:
    same = [other for other in outline.values() if other.num_prompt == turn.num_prompt]
    return len(same) == 1


def same(first: Trajectory, second: Trajectory) -> None:
    for name in Trajectory.__slots__:
        np.testing.assert_equal(getattr(first, name), getattr(second, name))


def replayed(model: RecordedModel) -> Recorder:
    """The record of a later process, from what was written down."""
    ended = [turn.turn_id for turn in model.recorder._turns]
    fresh = model.fresh_recorder()
    for turn_id in ended:
        fresh.replay(decode_turn(encode_turn(model.recorder.turn_record(turn_id))))
    return fresh


@quick
@given(data=st.data(), policy=POLICIES)
def test_a_replayed_record_is_the_same_and_goes_on_alike(data, policy):
    model, agents = run_agents(data, policy)
    fresh = replayed(model)
    for style in ("concat", "individual"):
        lines, again = model.lines(style=style), model.lines(fresh, style=style)
        assert len(lines) == len(again)
        for line, other in zip(lines, again, strict=True):
            same(line, other)
    assert fresh.outline() == model.recorder.outline()
    assert fresh.splits == model.recorder.splits
    assert fresh.deviations == model.recorder.deviations
    assert fresh.num_turns == model.recorder.num_turns
    for agent in agents:
        history = [*agent.history, *agent.tail]
        ours, theirs = (record.open_turn(history, TOOLS) for record in (model.recorder, fresh))
        assert ours.turn_id == theirs.turn_id
        assert ours.prompt_ids.tolist() == theirs.prompt_ids.tolist()
    assert fresh.splits == model.recorder.splits
    for turn_id in model.log:
        first, second = (r.turn_record(turn_id) for r in (model.recorder, fresh))
        assert encode_turn(first) == encode_turn(second)


def test_a_record_is_json_and_arrays_and_holds_only_what_a_turn_added():
    model = RecordedModel()
    history = [system("x" * 900), user("go")]
    for number in range(20):
        said = model.say(history, call("run", f'{{"n": {number}}}'), TOOLS)
        history += [said, result(said, "ok")]
    sizes = [len(encode_turn(model.recorder.turn_record(number))) for number in range(20)]
    assert max(sizes[1:]) < 2200
    record = decode_turn(encode_turn(model.recorder.turn_record(19)))
    assert json.loads(json.dumps(record.facts)) == record.facts
    assert record.messages == (history[-3],) or len(record.messages) == 1
    assert len(record.added_ids) < 40


def converse(model: RecordedModel, num_calls: int) -> None:
    """So many calls in one conversation, of which the record alone is left."""
    history = [system("be good. " * 40), user("go")]
    recorder = model.recorder = model.fresh_recorder()
    for number in range(num_calls):
        turn = recorder.open_turn(history, TOOLS)
        said = model.close(turn, call("run", f'{{"n": {number}}}'))
        history += [said, result(said, "total 12")]
    model.log.clear()


def bytes_of_session(num_calls: int) -> int:
    """What a session of this many calls holds while it waits for the next."""
    model = RecordedModel()
    converse(model, num_calls)  # fills what all sessions of a template share
    tracemalloc.start()
    try:
        model.recorder = model.fresh_recorder()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        converse(model, num_calls)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_an_idle_session_is_small_and_grows_by_what_its_turns_add():
    bytes_of_session(1)
    few, more = bytes_of_session(8), bytes_of_session(24)
    assert bytes_of_session(3) < 20_000
    assert more < 3.5 * few


@pytest.mark.parametrize("damage", [b"", b"no", b"\xff\xff\xff\x7f{}"])
def test_a_damaged_record_says_so(damage):
    with pytest.raises(ValueError, match="turn record"):
        decode_turn(damage)


def test_a_label_the_client_said_outlives_the_process():
    model = RecordedModel()
    model.say([user("Generate a short, descriptive title (3-7 words)")], "Sums", None)
    assert [turn.label for turn in replayed(model).outline()] == [CallLabel.TITLE]


def test_siblings_that_say_the_same_are_siblings_in_a_replayed_record_too():
    model = RecordedModel()
    for _ in range(3):
        model.say([user("go")], "ok")
    again = model.fresh_recorder()
    for record in model.recorder.turn_records():
        again.replay(decode_turn(encode_turn(record)))
    assert again.left_out == model.recorder.left_out == {"untaken": 2}
    assert [turn.branch for turn in again.outline()] == [-1, -1, 0]
