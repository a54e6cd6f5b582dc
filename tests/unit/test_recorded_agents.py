"""The record under the habits of real agents: matched where resent, split where it differs."""

from typing import Any

import pytest

from areal_ray.core.trajectory import StopReason
from areal_ray.gateway.record_policy import CallLabel, RecordPolicy
from areal_ray.gateway.recorder import AGENT_EDITED, TEMPLATE_REWROTE_TURN, TOOLS_CHANGED
from areal_ray.gateway.turn_matching import (
    AGENT_OMITTED,
    BROKEN_OFF,
    MOVED_TAIL,
    REASONING_DROPPED,
    REASONING_INLINE,
    REASONING_LEFT_OUT,
    RESPELLED,
)
from tests.support.recorded_agents import (
    EXTRA_TOOL,
    TOOLS,
    TPL_T,
    RecordedModel,
    call,
    redumped,
    result,
    system,
    user,
)
from tests.support.templates import EOS, PAD

ODD = '{"command" :  "echo 42" }'
START = [system("be good"), user("17+25?")]


def left_out(model: RecordedModel) -> dict[str, int]:
    return dict(model.recorder.left_out)


def labels(model: RecordedModel) -> list[CallLabel]:
    return [turn.label for turn in model.recorder.outline()]


def test_an_exact_second_turn_is_prompt_sampled_ids_and_the_new_part():
    model = RecordedModel()
    said = model.say(START, f"<think>17+25.\n</think> Let me check.\n\n{call('run', ODD)}", TOOLS)
    resent = {**said, "content": said["content"], "name": None, "annotations": []}
    turn = model.open([*START, resent, result(said, "42")], TOOLS)
    begun = model.prompts[0] + model.log[0]
    assert turn.prompt_ids[: len(begun)].tolist() == begun
    assert model.text(turn.prompt_ids[len(begun) :]) == "[/]\n[tool]42[/]\n[assistant]"
    assert not model.recorder.splits
    assert not model.recorder.deviations


@pytest.mark.parametrize("spacing", [{"separators": (",", ":")}, {}, {"indent": 1}])
def test_arguments_written_anew_are_the_recorded_turn(spacing):
    model = RecordedModel()
    said = model.say(START, call("run", '{"a" :  1.0, "b": "x" }'), TOOLS)
    model.say([*START, redumped(said, **spacing), result(said, "ok")], "done", TOOLS)
    assert model.trained() == [call("run", '{"a" :  1.0, "b": "x" }') + "done"]


def test_a_float_that_comes_back_as_an_integer_is_the_same_number():
    model = RecordedModel()
    said = model.say(START, call("run", '{"a": 1.0}'), TOOLS)
    said["tool_calls"][0]["function"]["arguments"] = '{"a":1}'
    model.say([*START, said, result(said, "ok")], "done", TOOLS)
    assert len(model.lines()) == 1


@pytest.mark.parametrize("policy", ["splice", "branch"])
def test_dropped_reasoning_is_spliced_or_branches_as_the_policy_says(policy):
    model = RecordedModel(RecordPolicy(dropped_reasoning=policy))
    text = f"<think>hard</think>  Look.\n\n{call('run', ODD)}"
    said = model.say(START, text, TOOLS)
    del said["reasoning"]
    said["content"] = said["content"].strip()
    model.say([*START, redumped(said), result(said, "42")], "42", TOOLS)
    if policy == "splice":
        assert model.trained() == [f"{text}42"]
        assert model.recorder.deviations == {REASONING_DROPPED: 1}
        assert not model.recorder.splits
    else:
        assert model.trained() == [text, "42"]
        assert model.recorder.splits == {REASONING_LEFT_OUT: 1}
        assert "<think>" not in model.text(model.prompts[1])
    assert model.recorder.outline()[1].deviations == tuple(model.recorder.deviations)


def test_reasoning_that_a_handle_stands_for_is_kept_under_either_policy():
    model = RecordedModel(RecordPolicy(dropped_reasoning="branch"))
    turn = model.open(START)
    said = model.close(turn, "<think>hard</think>yes")
    resent = {"role": "assistant", "content": said["content"], "handle": turn.handle}
    model.say([*START, resent, user("so?")], "ok")
    assert model.trained() == ["<think>hard</think>yesok"]
    assert not model.recorder.deviations


def test_reasoning_put_into_the_text_is_recognised():
    model = RecordedModel()
    model.say(START, "<think>hard</think>yes")
    resent = {"role": "assistant", "content": "<think>hard</think>\nyes"}
    model.say([*START, resent, user("so?")], "ok")
    assert len(model.lines()) == 1
    assert model.recorder.deviations == {REASONING_INLINE: 1}


def test_a_deduplicated_call_is_another_turn_and_the_sampled_one_stays_a_leaf():
    model = RecordedModel()
    twice = call("run", '{"a": 1}') * 2
    said = model.say(START, twice, TOOLS)
    resent = {**said, "tool_calls": said["tool_calls"][:1]}
    model.say([*START, resent, result(said, "ok")], "done", TOOLS)
    assert model.trained() == [twice, "done"]
    assert model.recorder.splits == {AGENT_EDITED: 1}
    assert model.text(model.prompts[1]).count("<tool_call>") == 1


def test_a_turn_that_the_agent_deletes_stays_a_leaf():
    model = RecordedModel()
    said = model.say(START, call("run", ODD), TOOLS)
    history = [*START, said, result(said, "42")]
    model.say(history, "no call here", TOOLS)
    model.say([*history, user("Tool call error")], call("see", "{}"), TOOLS)
    assert model.recorder.splits == {AGENT_OMITTED: 1}
    assert model.trained() == [call("run", ODD) + "no call here", call("see", "{}")]


def test_json_that_moves_around_the_same_text_does_not_branch():
    model = RecordedModel()
    first = {"role": "user", "content": [{"type": "text", "text": "go", "cache_control": {}}]}
    said = model.say([first], call("run", ODD), TOOLS)
    back = {"role": "tool", "name": "run", **result(said, "")}
    back["content"] = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    said["refusal"] = said["audio"] = None
    again = model.say([user("go"), dict(reversed(said.items())), back], "so", TOOLS)
    plain = result(said, "42")
    model.say([user("go"), said, plain, again, user("bye")], "bye", TOOLS)
    assert len(model.lines()) == 1
    assert "None" not in model.text(model.lines()[0].token_ids)


def test_a_changed_character_is_not_linked_even_under_the_same_id_or_handle():
    model = RecordedModel()
    turn = model.open(START, TOOLS)
    said = model.close(turn, f"look{call('run', ODD)}")
    said |= {"content": "loop", "handle": turn.handle}
    model.say([*START, said, result(said, "42")], "done", TOOLS)
    assert model.recorder.splits == {AGENT_EDITED: 1}
    assert len(model.lines()) == 2


def test_blanks_inside_and_the_order_of_calls_may_change_where_ids_name_the_turn():
    model = RecordedModel()
    said = model.say(START, f"a  b{call('run', '{}')}{call('see', '{}')}", TOOLS)
    results = [result(said, "R", 0), result(said, "S", 1)]
    said["content"] = "a b"
    said["tool_calls"].reverse()
    model.say([*START, said, *results], "done", TOOLS)
    assert len(model.lines()) == 1
    assert model.recorder.deviations == {RESPELLED: 1}


def test_system_messages_in_the_middle_and_at_the_end_stay_in_place():
    model = RecordedModel()
    history: list[Any] = [user("hi"), system("it is Monday")]
    said = model.say(history, call("run", ODD), TOOLS)
    history += [said, result(said, "42"), system("agents: none")]
    history.append(model.say(history, "42", TOOLS))
    model.say([*history, user("bye")], "bye", TOOLS)
    (line,) = model.lines()
    assert "[tool]42[/]\n[system]agents: none[/]\n[assistant]42" in model.text(line.token_ids)


def test_a_tail_that_moves_leaves_a_branch_before_it_and_both_turns_their_prompts():
    model = RecordedModel()
    tail = user("<<<INTERNAL>>>")
    said = model.say([*START, tail], call("run", ODD), TOOLS)
    model.say([*START, said, result(said, "42"), tail], "42", TOOLS)
    assert model.recorder.splits == {MOVED_TAIL: 1}
    assert model.trained() == [call("run", ODD), "42"]
    assert model.trained_ids() == model.log
    assert model.recorder._turns[1].num_shared == len("[tool run]\n[tool see]\n") + len(
        "[system]be good[/]\n[user]17+25?[/]\n["
    )


@pytest.mark.parametrize(
    "rewrite", [lambda i: f"fc_{i}"[3:] + "_item_9f", lambda i: i[:4] + "-" + i[4:]]
)
def test_rewritten_ids_still_lead_to_the_call_and_its_result(rewrite):
    source = RecordedModel().template._source.replace(
        "{{ m.content }}", "{{ m.tool_call_id or '' }}{{ m.content }}"
    )
    model = RecordedModel(source=source)
    said = model.say(START, call("run", ODD), TOOLS)
    sampled_id = said["tool_calls"][0]["id"]
    said["tool_calls"][0]["id"] = rewrite(sampled_id)
    model.say([*START, said, result(said, "42")], "42", TOOLS)
    (line,) = model.lines()
    assert f"[tool]{sampled_id}42[/]" in model.text(line.token_ids)


def test_a_result_of_no_call_is_refused_by_its_place_and_id():
    model = RecordedModel()
    lost = {"role": "tool", "tool_call_id": "t1", "content": "42"}
    with pytest.raises(ValueError, match=r"messages\[2\]\.tool_call_id: 't1'"):
        model.open([*START, lost], TOOLS)


def test_the_result_of_a_call_in_the_text_keeps_the_agent_s_id():
    model = RecordedModel()
    said = model.say(START, "<tool>17+25</tool>")
    model.say([*START, said, {"role": "tool", "tool_call_id": "sum", "content": "42"}], "42")
    (line,) = model.lines()
    assert model.text(line.token_ids).count("17+25</tool>") == 1


def test_two_users_who_say_the_same_are_two_prompts():
    shows_names = TPL_T.replace("[{{ m.role }}]", "[{{ m.role }}{{ m.name or '' }}]")
    model = RecordedModel(source=shows_names)
    for name in ("ann", "bob"):
        model.say([{**user("hi"), "name": name}], "hello")
    assert [model.text(ids) for ids in model.prompts.values()] == [
        f"[user{name}]hi[/]\n[assistant]" for name in ("ann", "bob")
    ]


def test_a_billing_line_of_each_request_breaks_no_line():
    model = RecordedModel()
    said = model.say([system("x-billing: cch=ab12;\nbe good"), user("a")], "b")
    model.say([system("x-billing: cch=cd34;\nbe good"), user("a"), said, user("c")], "d")
    (line,) = model.lines()
    assert model.text(line.token_ids).startswith("[system]x-billing: cch=ab12;\nbe good[/]")
    assert model.trained() == ["bd"]


def test_a_time_out_storm_counts_one_turn():
    model = RecordedModel()
    first, second, third = (model.open(START) for _ in range(3))
    model.abort(first, "ye", "client timed out")
    model.abort(second, "")
    model.close(third, "yes")
    assert model.trained() == ["yes"]
    assert left_out(model) == {"aborted": 2}
    outline = model.recorder.outline()
    assert [turn.abort_reason for turn in outline] == ["client timed out", "client left", ""]
    assert [turn.stop_reason for turn in outline[:2]] == [StopReason.ABORT] * 2
    assert not model.recorder._open


def test_a_broken_off_turn_keeps_its_tokens_and_trains_only_where_that_is_asked():
    for policy in ("drop", "train"):
        model = RecordedModel(RecordPolicy(aborted=policy))
        model.abort(model.open(START), "half a tho")
        record = model.recorder.turn_record(0)
        assert model.text(record.token_ids) == "half a tho"
        (line,) = model.lines()
        assert line.num_sampled_tokens == (10 if policy == "train" else 0)
        assert line.stop_reason is StopReason.ABORT


@pytest.mark.parametrize("partial", ["", "half a"])
def test_what_came_through_of_a_broken_off_turn_is_no_history_of_ours(partial):
    model = RecordedModel()
    model.abort(model.open(START), "half a tho")
    resent = {"role": "assistant", "content": partial}
    model.say([*START, resent, user("continue")], "whole")
    assert model.recorder.splits == {BROKEN_OFF: 1}
    assert model.trained() == ["whole"]
    assert "tho[" not in model.text(model.prompts[1])


def test_a_retry_whose_answer_goes_on_is_the_path_and_the_other_is_left_out():
    model = RecordedModel()
    lost = model.say(START, "one")
    kept = model.say(START, "two")
    model.say([*START, kept, user("so?")], "ok")
    assert lost["content"] == "one"
    assert model.trained() == ["twook"]
    assert left_out(model) == {"untaken": 1}
    assert not model.recorder.splits
    assert [turn.branch for turn in model.recorder.outline()] == [-1, 0, 0]


def test_of_retries_that_nothing_follows_the_newest_trains_or_all_if_asked():
    for policy, expected in (("drop", ["two"]), ("train", ["one", "two"])):
        model = RecordedModel(RecordPolicy(untaken=policy))
        model.say(START, "one")
        model.say(START, "two")
        assert model.trained() == expected


def test_choices_of_one_call_are_siblings_and_train_together_until_one_is_taken():
    model = RecordedModel()
    first = model.open(START)
    second = model.recorder.sibling_turn(first)
    assert first.handle != second.handle
    assert second.prompt_ids.tolist() == first.prompt_ids.tolist()
    said = model.close(second, "two")
    model.close(first, "one")
    assert model.trained() == ["two", "one"]
    model.say([*START, said, user("so?")], "ok")
    assert model.trained() == ["twook"]


def test_the_handle_tells_apart_what_reads_the_same():
    model = RecordedModel()
    turns = [model.open(START), model.open(START)]
    for turn, thought in zip(turns, ("", "<think>x</think>"), strict=True):
        model.close(turn, f"{thought}yes")
    resent = {"role": "assistant", "content": "yes", "handle": turns[0].handle}
    model.say([*START, resent, user("so?")], "ok")
    assert model.recorder.outline()[2].parent == turns[0].turn_id


def test_a_stop_string_that_was_eaten_is_in_the_next_prompt():
    model = RecordedModel()
    said = model.close(model.open(START), "yes\nObservation:", stop=("Observation:",))
    assert said["content"] == "yes\n"
    model.say([*START, {**said, "content": "yes"}, user("so?")], "ok")
    assert model.trained() == ["yes\nObservation:ok"]


def test_more_tools_in_mid_session_begin_a_branch_with_the_reason():
    model = RecordedModel()
    said = model.say(START, "a", TOOLS)
    model.say([*START, said, user("b")], "c", [*TOOLS, EXTRA_TOOL])
    assert model.recorder.splits == {TOOLS_CHANGED: 1}
    assert model.trained() == ["a", "c"]
    assert labels(model) == [CallLabel.MAIN, CallLabel.MAIN]


def test_side_calls_are_labelled_and_the_main_line_holds_main_calls_alone():
    model = RecordedModel()
    title = model.open([system("You are a title generator"), user("17+25?")])
    naming = model.open([system("name it"), user("17+25?")])
    main = model.open(START, TOOLS)
    model.close(title, "Sums")
    model.close(naming, "Adding")
    said = model.close(main, call("run", ODD))
    sub = [system("you search"), user("find 42")]
    sub_turn = model.open(sub, TOOLS[:1], x_claude_code_agent_id="a1")
    history = [*START, said, result(said, "launched")]
    went_on = model.open(history, TOOLS)
    told = model.close(sub_turn, call("run", '{"find": 42}'))
    history.append(model.close(went_on, "waiting"))
    model.say(
        [*sub, told, result(told, "found")], "found it", TOOLS[:1], x_claude_code_agent_id="a1"
    )
    compact = [*history, user("CRITICAL: Respond with TEXT ONLY. Sum up")]
    summary = model.say(compact, "<summary>sums</summary>", TOOLS)
    fresh = [system("be good"), user(f"So far: {summary['content']}")]
    model.say(fresh, "going on", TOOLS)
    assert labels(model) == [
        *(CallLabel.TITLE, CallLabel.SIDE, CallLabel.MAIN, CallLabel.SUB_AGENT, CallLabel.MAIN),
        *(CallLabel.SUB_AGENT, CallLabel.COMPACTION, CallLabel.MAIN),
    ]
    assert left_out(model) == {"title": 1, "side": 1, "compaction": 1}
    lines = model.lines()
    assert model.trained() == [
        call("run", ODD) + "waiting",
        "going on",
        call("run", '{"find": 42}') + "found it",
    ]
    assert [line.parent_branch_id for line in lines] == [-1, -1, 0]
    assert lines[0].final_text == "going on"
    assert model.recorder.outline()[7].follows == 4, "the new main line is linked to the old"


@pytest.mark.parametrize(
    ("messages", "headers", "label"),
    [
        ([user("x")], {"x_parent_session_id": "p"}, CallLabel.SUB_AGENT),
        ([user("x")], {"x_openai_subagent": "collab_spawn"}, CallLabel.SUB_AGENT),
        ([system("x-b: cc_is_subagent=true;"), user("x")], {}, CallLabel.SUB_AGENT),
        (
            [user("x")],
            {"x_codex_turn_metadata": '{"request_kind":"compaction"}'},
            CallLabel.COMPACTION,
        ),
        ([user("x")], {"x_codex_turn_metadata": '{"request_kind":"review"}'}, CallLabel.SIDE),
        ([user("x")], {"x_codex_turn_metadata": '{"request_kind":"turn"}'}, CallLabel.MAIN),
        ([user("x")], {"x_codex_turn_metadata": "[}"}, CallLabel.MAIN),
        ([user("You are performing a CONTEXT CHECKPOINT COMPACTION")], {}, CallLabel.COMPACTION),
        ([system("You are a context summarization agent")], {}, CallLabel.COMPACTION),
        ([user("Generate a short, descriptive title (3-7 words)")], {}, CallLabel.TITLE),
    ],
)
def test_what_the_client_says_of_a_call_labels_it(messages, headers, label):
    model = RecordedModel()
    model.say(messages, "y", TOOLS, **headers)
    assert labels(model) == [label]


def test_a_conversation_under_another_system_prompt_is_a_sub_agent_and_an_edited_one_is_not():
    model = RecordedModel()
    said = model.say(START, "a", TOOLS)
    sub = [system("you search"), user("find")]
    found = model.say(sub, "b", TOOLS)
    model.say([*sub, found, user("more")], "c", TOOLS)
    model.say([system("be good. Tuesday"), START[1], said, user("d")], "e", TOOLS)
    assert labels(model) == [CallLabel.MAIN, *[CallLabel.SUB_AGENT] * 2, CallLabel.MAIN]
    assert model.recorder.splits == {AGENT_EDITED: 1}
    assert model.trained() == ["a", "e", "bc"]


def test_the_individual_style_gives_each_turn_its_own_prompt():
    model = RecordedModel()
    said = model.say(START, "a")
    model.say([*START, said, user("b")], "c")
    first, second = model.lines(style="individual")
    assert model.trained(style="individual") == ["a", "c"]
    assert first.token_ids.tolist() == model.prompts[0] + model.log[0]
    assert second.token_ids.tolist() == model.prompts[1] + model.log[1]


def test_handles_never_repeat_and_are_short_and_alphanumeric():
    handles = [RecordedModel().open(START).handle for _ in range(3)]
    assert len(set(handles)) == 3
    assert all(handle.isalnum() and len(handle) == 20 for handle in handles)


def test_a_template_that_drops_thoughts_splits_behind_the_gateway_too():
    model = RecordedModel(source=TPL_T.replace("m.reasoning_content %}", "loop.last and 0 %}"))
    said = model.say(START, "<think>hard</think>yes")
    model.say([*START, said, user("so?")], "<think>easy</think>ok")
    assert model.recorder.splits == {TEMPLATE_REWROTE_TURN: 1}
    assert model.trained() == ["<think>hard</think>yes", "<think>easy</think>ok"]
    assert model.trained_ids() == model.log


def test_an_end_of_turn_with_padding_is_joined_once_behind_the_gateway_too():
    model = RecordedModel(source=TPL_T.replace("[/]\n", f"{EOS}\n"))
    said = model.say(START, f"yes{EOS}{PAD}{PAD}")
    model.say([*START, said, user("so?")], f"ok{EOS}")
    (line,) = model.lines()
    assert model.trained() == [f"yes{EOS}ok{EOS}"]
    assert f"yes{EOS}\n[user]so?" in model.text(line.token_ids)


def test_half_a_character_is_refused_before_a_tokenizer_sees_it():
    with pytest.raises(ValueError, match=r"'\\ud800', half a character"):
        RecordedModel().open([user("a\ud800b")])


def test_of_turns_that_said_the_same_the_ids_tell_which_one_the_agent_went_on_from():
    model = RecordedModel()
    first = model.say(START, call("run", ODD), TOOLS)
    second = model.say(START, call("run", ODD), [*TOOLS, EXTRA_TOOL])
    for said, tools in ((first, TOOLS), (second, [*TOOLS, EXTRA_TOOL])):
        model.say([*START, said, result(said, "42")], "done", tools)
    outline = model.recorder.outline()
    assert [turn.parent for turn in outline] == [-1, -1, 0, 1]
    assert not model.recorder.splits
    assert model.trained() == [call("run", ODD) + "done"] * 2
