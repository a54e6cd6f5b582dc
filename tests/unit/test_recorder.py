"""The record of an episode: each sampled token once, as sampled, and nothing else trained."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_ray.core.trajectory import StopReason, Trajectory
from areal_ray.gateway.recorder import (
    AGENT_EDITED,
    TEMPLATE_REWROTE_TURN,
    TOKENS_MERGE,
    Recorder,
)
from areal_ray.gateway.template import ChatTemplate
from tests.support.templates import (
    EOS,
    PAD,
    TPL_A,
    TPL_B,
    TPL_E,
    TPL_J,
    ScriptedTurn,
    letter_tokenizer,
    merging_tokenizer,
)

NAMES = {"task_id": "t", "group_id": "g", "episode_id": "e"}


def template(source: str = TPL_A) -> ChatTemplate:
    return ChatTemplate(letter_tokenizer(), source)


def say(recorder: Recorder, messages: list[Any], text: str, **options: Any) -> Any:
    """One turn in which the model samples `text`; returns the reply as a message."""
    tools = options.pop("tools", None)
    ids = recorder._template.encode(text)
    reply = recorder.close_turn(recorder.open_turn(messages, tools), ScriptedTurn(ids, **options))
    return {"role": "assistant", "content": reply.text}


def text_of(record: Recorder, ids: Any) -> str:
    return "".join(record._template.token_text(int(i)) for i in ids)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def finish(recorder: Recorder) -> list[Trajectory]:
    return recorder.trajectories(**NAMES)


def test_a_second_turn_extends_the_recorded_ids_and_keeps_the_newline_unmasked():
    recorder = Recorder(template())
    history = [user("2+3?")]
    history += [say(recorder, history, "<t>easy</t>5", version=3), user("and 4+4?")]
    say(recorder, history, "8", version=4)
    (line,) = finish(recorder)
    assert text_of(recorder, line.token_ids) == (
        "[user]2+3?[/]\n[assistant]<t>easy</t>5[/]\n[user]and 4+4?[/]\n[assistant]8"
    )
    assert text_of(recorder, line.token_ids[line.loss_mask]) == "<t>easy</t>58"
    assert line.versions[line.loss_mask].tolist() == [3] * 12 + [4]
    assert line.turn_ids[line.loss_mask].tolist() == [0] * 12 + [1]
    assert (line.versions[~line.loss_mask] == -1).all()
    assert (line.behaviour_logprobs[~line.loss_mask] == 0).all()
    assert not recorder.splits


def test_a_template_that_drops_thoughts_splits_and_trains_each_sampled_token_once():
    recorder = Recorder(template(TPL_B))
    history = [user("2+3?")]
    history += [say(recorder, history, "<t>easy</t>5"), user("and 4+4?")]
    say(recorder, history, "8")
    first, second = finish(recorder)
    assert text_of(recorder, second.token_ids) == (
        "[user]2+3?[/]\n[assistant]5[/]\n[user]and 4+4?[/]\n[assistant]8"
    )
    assert text_of(recorder, first.token_ids[first.loss_mask]) == "<t>easy</t>5"
    assert text_of(recorder, second.token_ids[second.loss_mask]) == "8"
    assert (first.branch_id, second.branch_id) == (0, 1)
    assert second.parent_branch_id == -1, "the same agent goes on"
    assert recorder.splits == {TEMPLATE_REWROTE_TURN: 1}


def test_a_sampled_end_of_turn_that_the_template_writes_itself_appears_once():
    source = TPL_A.replace("[/]\n", EOS + "\n")
    recorder = Recorder(template(source))
    history = [user("hi")]
    history += [say(recorder, history, f"yo{EOS}"), user("bye")]
    say(recorder, history, f"ok{EOS}")
    (line,) = finish(recorder)
    assert text_of(recorder, line.token_ids) == (
        f"[user]hi{EOS}\n[assistant]yo{EOS}\n[user]bye{EOS}\n[assistant]ok{EOS}"
    )
    assert text_of(recorder, line.token_ids[line.loss_mask]) == f"yo{EOS}ok{EOS}"


def test_an_end_of_turn_that_was_not_sampled_is_written_but_not_trained():
    source = TPL_A.replace("[/]\n", EOS + "\n")
    recorder = Recorder(template(source))
    history = [user("hi")]
    history += [say(recorder, history, "yo", stop_reason=StopReason.LENGTH), user("bye")]
    say(recorder, history, "ok")
    (line,) = finish(recorder)
    assert text_of(recorder, line.token_ids).startswith(f"[user]hi{EOS}\n[assistant]yo{EOS}\n")
    assert text_of(recorder, line.token_ids[line.loss_mask]) == "yook"
    assert line.loss_mask.sum() == np.count_nonzero(line.behaviour_logprobs)


@pytest.mark.parametrize("reason", list(StopReason))
def test_a_turn_without_its_end_sampled_trains_its_samples_alone_whatever_ended_it(reason):
    recorder = Recorder(template(TPL_A.replace("[/]\n", EOS + "\n")))
    history = [user("hi")]
    history += [say(recorder, history, "yo", stop_reason=reason), user("bye")]
    say(recorder, history, "ok", stop_reason=reason)
    (line,) = finish(recorder)
    assert text_of(recorder, line.token_ids[line.loss_mask]) == "yook"
    assert (
        np.flatnonzero(line.behaviour_logprobs).tolist() == np.flatnonzero(line.loss_mask).tolist()
    )


def test_padding_with_the_end_of_turn_itself_is_dropped_too():
    tokenizer = letter_tokenizer()
    tokenizer.pad_token = EOS
    recorder = Recorder(ChatTemplate(tokenizer, TPL_A.replace("[/]\n", EOS + "\n")))
    history = [user("hi")]
    history += [say(recorder, history, f"yo{EOS}{EOS}{EOS}"), user("bye")]
    say(recorder, history, f"ok{EOS}{EOS}")
    (line,) = finish(recorder)
    assert text_of(recorder, line.token_ids) == (
        f"[user]hi{EOS}\n[assistant]yo{EOS}\n[user]bye{EOS}\n[assistant]ok{EOS}"
    )
    assert line.loss_mask.sum() == np.count_nonzero(line.behaviour_logprobs) == 6


def test_padding_after_the_end_of_a_turn_is_dropped_and_the_end_kept_once():
    source = TPL_A.replace("[/]\n", EOS + "\n")
    recorder = Recorder(template(source))
    history = [user("hi")]
    history += [say(recorder, history, f"yo{EOS}{PAD}{PAD}"), user("bye")]
    say(recorder, history, f"ok{EOS}{PAD}")
    (line,) = finish(recorder)
    assert PAD not in text_of(recorder, line.token_ids)
    assert text_of(recorder, line.token_ids[line.loss_mask]) == f"yo{EOS}ok{EOS}"


def test_results_of_two_tool_calls_follow_the_sampled_calls_in_order_without_loss():
    source = (
        TPL_J.replace("<c ", '<tool_call>{"name": "')
        .replace("{{ c.function.name }} ", '{{ c.function.name }}", "arguments": ')
        .replace("}}>{% endfor %}", "}}}</tool_call>{% endfor %}")
    )
    recorder = Recorder(template(source))
    both = "".join(
        f'<tool_call>{{"name": "add", "arguments": {{"a": {n}}}}}</tool_call>' for n in (1, 2)
    )
    turn = recorder.open_turn([user("2+3?")], TOOLS)
    reply = recorder.close_turn(turn, ScriptedTurn(recorder._template.encode(both)))
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
        for c in reply.tool_calls
    ]
    history = [
        user("2+3?"),
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": "A1"},
        {"role": "tool", "tool_call_id": calls[1]["id"], "content": "B2"},
    ]
    turn = recorder.open_turn(history, TOOLS)
    recorder.close_turn(turn, ScriptedTurn(recorder._template.encode("5")))
    (line,) = finish(recorder)
    assert text_of(recorder, line.token_ids) == (
        f"[user]2+3?[/]\n[assistant]{both}[/]\n[tool]A1[/]\n[tool]B2[/]\n[assistant]5"
    )
    assert text_of(recorder, line.token_ids[line.loss_mask]) == f"{both}5"
    assert not recorder.splits


def test_a_stop_string_is_not_shown_but_recorded_trained_and_continued_as_sampled():
    recorder = Recorder(template())
    history = [user("hi")]
    ids = recorder._template.encode("yo\nObs:")
    turn = recorder.open_turn(history)
    reply = recorder.close_turn(turn, ScriptedTurn(ids, version=4), stop=("Obs:", "\n", "x"))
    assert reply.text == "yo"
    history += [{"role": "assistant", "content": reply.text}, user("bye")]
    say(recorder, history, "ok")
    (line,) = finish(recorder)
    assert not recorder.splits
    whole = "[user]hi[/]\n[assistant]yo\nObs:[/]\n[user]bye[/]\n[assistant]ok"
    assert text_of(recorder, line.token_ids) == whole
    assert text_of(recorder, line.token_ids[line.loss_mask]) == "yo\nObs:ok"
    assert line.versions[line.versions > 0].tolist() == [4] * len(ids)


def test_a_turn_without_its_stop_string_is_shown_whole():
    recorder = Recorder(template())
    turn = recorder.open_turn([user("hi")])
    reply = recorder.close_turn(turn, ScriptedTurn(recorder._template.encode("yo")), stop=("x",))
    assert reply.text == "yo"


def test_several_tool_results_in_a_row_are_all_kept_in_order_without_loss():
    recorder = Recorder(template())
    history = [user("both")]
    history.append(say(recorder, history, "calling"))
    history += [{"role": "tool", "content": "A1"}, {"role": "tool", "content": "B2"}]
    say(recorder, history, "done")
    (line,) = finish(recorder)
    assert "[tool]A1[/]\n[tool]B2[/]\n[assistant]done" in text_of(recorder, line.token_ids)
    assert text_of(recorder, line.token_ids[line.loss_mask]) == "callingdone"


@pytest.mark.parametrize(
    "resent",
    [
        {"content": "yo", "role": "assistant", "refusal": None, "audio": None, "annotations": []},
        {"role": "assistant", "content": [{"type": "text", "text": "yo"}]},
        {"role": "assistant", "content": " yo\n", "tool_calls": []},
        {"role": "assistant", "content": "yo", "tool_calls": None},
    ],
)
def test_a_resent_reply_is_recognised_however_the_client_spells_it(resent):
    recorder = Recorder(template())
    history = [user("hi")]
    say(recorder, history, "yo")
    reply = recorder.open_turn([*history, resent, user("bye")])
    assert "[assistant]yo[/]\n[user]bye" in text_of(recorder, reply.prompt_ids)
    assert not recorder.splits


def test_a_reply_changed_by_one_character_is_another_conversation_and_counted():
    recorder = Recorder(template())
    history = [user("hi")]
    said = say(recorder, history, "yo")
    edited = {**said, "content": "yO"}
    say(recorder, [*history, edited, user("bye")], "ok")
    first, second = finish(recorder)
    assert recorder.splits == {AGENT_EDITED: 1}
    assert text_of(recorder, second.token_ids[second.loss_mask]) == "ok"
    assert text_of(recorder, first.token_ids[first.loss_mask]) == "yo"


def test_the_same_request_sent_twice_gives_two_branches_and_is_no_edit():
    recorder = Recorder(template())
    say(recorder, [user("hi")], "one")
    say(recorder, [user("hi")], "two")
    texts = [text_of(recorder, line.token_ids[line.loss_mask]) for line in finish(recorder)]
    assert texts == ["one", "two"]
    assert not recorder.splits


def test_going_back_to_an_earlier_turn_forks_without_training_it_twice():
    recorder = Recorder(template())
    history = [user("q")]
    history.append(say(recorder, history, "A"))
    say(recorder, [*history, user("x")], "B")
    say(recorder, [*history, user("y")], "C")
    first, second = finish(recorder)
    assert text_of(recorder, first.token_ids[first.loss_mask]) == "AB"
    assert text_of(recorder, second.token_ids[second.loss_mask]) == "C"
    assert "[assistant]A[/]\n[user]y" in text_of(recorder, second.token_ids)


def test_interleaved_sub_agents_have_a_branch_each():
    recorder = Recorder(template())
    main, sub = [user("main")], [user("sub")]
    main_turn, sub_turn = recorder.open_turn(main), recorder.open_turn(sub)
    encode = recorder._template.encode
    recorder.close_turn(sub_turn, ScriptedTurn(encode("s1")))
    recorder.close_turn(main_turn, ScriptedTurn(encode("m1")))
    say(recorder, [*sub, {"role": "assistant", "content": "s1"}, user("go")], "s2")
    say(recorder, [*main, {"role": "assistant", "content": "m1"}, user("go")], "m2")
    texts = {text_of(recorder, line.token_ids[line.loss_mask]) for line in finish(recorder)}
    assert texts == {"s1s2", "m1m2"}
    assert not recorder.splits


def test_a_turn_that_was_never_answered_leaves_no_trace():
    recorder = Recorder(template())
    recorder.open_turn([user("hi")])
    say(recorder, [user("hi")], "yo")
    (line,) = finish(recorder)
    assert text_of(recorder, line.token_ids[line.loss_mask]) == "yo"


def test_ids_that_do_not_re_encode_to_themselves_are_kept_as_sampled():
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("bc", EOS)
    recorder = Recorder(ChatTemplate(tokenizer))
    reply = recorder.close_turn(recorder.open_turn([user("a")]), ScriptedTurn([0, 4]))
    assert reply.text == "abc"
    history = [user("a"), {"role": "assistant", "content": "abc"}, user("b")]
    prompt = recorder.open_turn(history).prompt_ids.tolist()
    eos = tokenizer.eos_token_id
    assert prompt == [0, eos, 2, 0, 4, eos, 1, eos, 2]
    assert recorder._template.encode("abc") == [3, 2]


def test_a_merge_across_the_turn_border_is_noticed_and_splits():
    recorder = Recorder(ChatTemplate(merging_tokenizer()))
    recorder.close_turn(recorder.open_turn([user("c")]), ScriptedTurn([0]))
    recorder.open_turn([user("c"), {"role": "assistant", "content": "a"}, user("c")])
    assert recorder.splits == {TOKENS_MERGE: 1}


CALL = '<tool_call>{"name": "add",  "arguments": {"a": 2}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.mark.parametrize(
    ("source", "written"), [(TPL_E, "<c add a=2>"), (TPL_J, '<c add {"a": 2}>')]
)
def test_tool_call_arguments_sent_as_a_string_reach_the_template_as_a_mapping(source, written):
    recorder = Recorder(template(source))
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 2}'}}
    history = [user("q"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = recorder.open_turn([*history, {"role": "tool", "content": "2"}]).prompt_ids
    assert f"[assistant]{written}[/]\n" in text_of(recorder, prompt)


def test_tool_call_arguments_that_are_not_json_are_refused_with_their_place():
    recorder = Recorder(template())
    call = {"id": "1", "function": {"name": "add", "arguments": "{a"}}
    with pytest.raises(ValueError, match=r"messages\[1\].*'add'.*not JSON"):
        recorder.open_turn([user("q"), {"role": "assistant", "tool_calls": [call]}])


def test_a_tool_call_is_read_from_the_text_and_its_sampled_ids_are_spliced_when_resent():
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
        '<tool_call>{"name": "{{ c.function.name }}", '
        '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}[/]\n'
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    recorder = Recorder(template(source))
    ids = recorder._template.encode(CALL)
    reply = recorder.close_turn(recorder.open_turn([user("q")], TOOLS), ScriptedTurn(ids))
    (call,) = reply.tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 2}')
    resent = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "other", "function": {"name": "add", "arguments": '{"a":2}'}}],
    }
    prompt = recorder.open_turn([user("q"), resent, {"role": "tool", "content": "2"}], TOOLS)
    assert f"[assistant]{CALL}[/]\n[tool]2[/]\n" in text_of(recorder, prompt.prompt_ids)
    assert not recorder.splits


@pytest.mark.parametrize(
    "inside",
    [
        "{bad}",
        '{"name": 3}',
        '{"name":"add","arguments":{"a":1}} }',
        '{"name":"add","arguments":{"a":1}} {"name":"add","arguments":{"a":2}}',
        '{"name":"add","arguments":[1]}',
        '{"name":"add","arguments":"1"}',
        '{"arguments":{"a":1}}',
        '{"name":"add","arguments":{"a":1}',
        '{"name":"add","arguments":' + '{"a":' * 10**5 + "1" + "}" * 10**5 + "}",
        "{}",
        "",
    ],
)
def test_malformed_tool_calls_stay_text_with_every_id(inside):
    recorder = Recorder(template())
    text = f"so: <tool_call>{inside}</tool_call>"
    ids = recorder._template.encode(text)
    turn = recorder.open_turn([user("q")], TOOLS)
    reply = recorder.close_turn(turn, ScriptedTurn(ids))
    assert reply.text == text
    assert not reply.tool_calls
    (line,) = finish(recorder)
    assert line.token_ids[line.loss_mask].tolist() == ids


def test_a_good_tool_call_beside_a_malformed_one_is_read_and_the_other_stays_text():
    recorder = Recorder(template())
    text = f"<tool_call>{{bad}}</tool_call>{CALL}"
    turn = recorder.open_turn([user("q")], TOOLS)
    reply = recorder.close_turn(turn, ScriptedTurn(recorder._template.encode(text)))
    assert [call.name for call in reply.tool_calls] == ["add"]
    assert reply.text == "<tool_call>{bad}</tool_call>"


def test_nothing_sampled_gives_the_prompt_without_loss():
    recorder = Recorder(template())
    recorder.open_turn([user("hi")])
    (line,) = finish(recorder)
    assert text_of(recorder, line.token_ids) == "[user]hi[/]\n[assistant]"
    assert line.num_sampled_tokens == 0


_TEXT = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(_TEXT, _TEXT), min_size=1, max_size=5), drops=st.booleans())
def test_every_sampled_token_is_trained_exactly_once_whatever_the_template_does(turns, drops):
    recorder = Recorder(template(TPL_B if drops else TPL_A))
    history: list[Any] = []
    for asked, said in turns:
        history.append(user(asked))
        history.append(say(recorder, history, f"<t>{said}</t>{said}"))
    lines = finish(recorder)
    trained = sorted(
        (int(turn), text_of(recorder, line.token_ids[line.turn_ids == turn]))
        for line in lines
        for turn in np.unique(line.turn_ids[line.loss_mask])
    )
    assert trained == [(i, f"<t>{said}</t>{said}") for i, (_, said) in enumerate(turns)]
    assert len(lines) == (len(turns) if drops else 1)
