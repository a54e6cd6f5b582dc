"""Messages in one form, however a client or a data set spells them."""

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from areal_ray.gateway.messages import (
    CallIds,
    canonical,
    conversation,
    in_call_order,
    message_key,
)
from areal_ray.gateway.template import ChatTemplate
from tests.support.templates import TPL_A, TPL_E, letter_tokenizer


def call(arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "1", "function": {"name": "add", "arguments": arguments}, **fields}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([], ""),
        ("", ""),
        ("x", "x"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        (["a", {"text": "b"}], "ab"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "text", "text": None}, {"type": "text", "text": "b"}], "b"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant", "tool", "system"])
def test_content_is_text_and_nothing_is_never_the_word_none(role, content, text):
    assert canonical({"role": role, "content": content}) == {"role": role, "content": text}
    template = ChatTemplate(letter_tokenizer(), TPL_A)
    shown = template.render(conversation([{"role": role, "content": content}]))
    assert shown == f"[{role}]{text}[/]\n[assistant]"


def test_content_may_be_left_out_beside_tool_calls():
    message = {"role": "assistant", "tool_calls": [call('{"a": 2}')]}
    template = ChatTemplate(letter_tokenizer(), TPL_E)
    assert template.render(conversation([message])) == "[assistant]<c add a=2>[/]\n[assistant]"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (3, "content: is int; must be text or a list of text parts"),
        ({"text": "x"}, "content: is dict; "),
        (b"x", "content: is bytes; "),
        (["a", {"type": "image_url", "image_url": "x"}], "content[1]: is of type image_url; "),
        ([None], "content[0]: is NoneType; must be a text part"),
        ([{"type": "text", "text": 5}], "content[0].text: is int; must be a string"),
        ([{"text": None}], "content[0]: is of type None; must be a text part"),
    ],
)
def test_content_that_is_no_text_is_refused_with_its_place(content, told):
    with pytest.raises(ValueError, match="^" + re.escape(f"messages[1].{told}")):
        conversation([{"role": "user", "content": "x"}, {"role": "user", "content": content}])


@pytest.mark.parametrize("message", [{}, {"content": "x"}, {"role": 3}, {"role": ""}, 5, None, "x"])
def test_a_message_without_a_role_is_refused_with_its_place(message):
    with pytest.raises(ValueError, match=r"messages\[0\]\.role: "):
        conversation([message])


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, None, 3])
def test_what_is_no_list_of_messages_is_refused(messages):
    with pytest.raises(ValueError, match="must be a list of messages"):
        conversation(messages)


@pytest.mark.parametrize(
    "sent",
    [
        call('{"a": 2}'),
        call({"a": 2}),
        call('{"a":2}', type="function", index=0),
        {"function": {"arguments": ' {"a": 2} ', "name": "add"}},
        SimpleNamespace(id="9", function=SimpleNamespace(name="add", arguments='{"a": 2}')),
    ],
)
def test_a_tool_call_says_the_same_with_or_without_type_id_or_quotes(sent):
    message = canonical({"role": "assistant", "content": None, "tool_calls": [sent]})
    assert message_key(message) == ("assistant", "", (("add", '{"a": 2}'),))
    assert message["tool_calls"][0]["type"] == "function"


def test_who_of_several_users_speaks_counts_and_names_of_results_and_agents_do_not():
    def key(role: str, **name: str) -> Any:
        return message_key(canonical({"role": role, "content": "x", **name}))

    for role in ("user", "system"):
        assert len({key(role), key(role, name="ann"), key(role, name="bob")}) == 3
    for role in ("assistant", "tool"):
        assert key(role) == key(role, name="ann")


def test_results_find_their_calls_by_the_longest_id_and_in_no_time_however_many_there_are():
    ids = [f"call_{number}" for number in range(9000)]
    calls = [{**call({}), "id": one} for one in ids]
    asked = canonical({"role": "assistant", "tool_calls": calls})
    given = [{"role": "tool", "content": one, "tool_call_id": f"{one}|fc"} for one in ids]
    begun = time.process_time()
    ordered = in_call_order([asked, *reversed(given)])
    assert time.process_time() - begun < 3.0
    assert list(ordered) == [asked, *given]


def test_an_id_is_known_without_punctuation_with_something_appended_and_no_other():
    known = CallIds[str]()
    assert not known
    for one in ("call_1", "call-12", "call_1", "", "x" * 300):
        known.note(one, one)
    assert known.find("call1") == "call_1"
    assert known.find("call12") == known.find("call_12|fc_3") == "call-12"
    assert known.find("call_13") == "call_1"
    assert known.find("x" * 300) == "x" * 300
    assert (known.find(""), known.find("--")) == ("", "")
    assert [known.find(one) for one in (None, "cal", "other", "x" * 299)] == [None] * 4


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_a_call_without_arguments_has_none(arguments):
    message = canonical({"role": "assistant", "tool_calls": [call(arguments)]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("{a", "not JSON"),
        ('{"a": NaN}', "not JSON: NaN is no JSON number"),
        ('{"a": -1e999}', "not JSON: -1e999 is beyond the numbers"),
        ('{"a": "\\ud800"}', "not JSON: .* surrogates not allowed"),
        ("__import__('os').system('touch pwned')", "not JSON"),
        ("[1]", "JSON object"),
        ("3", "JSON object"),
        ('{"a":' * 10**5, "not JSON"),
        ('{"a":' * 201 + "1" + "}" * 201, "not JSON: is nested deeper than 200 levels"),
    ],
)
def test_arguments_that_are_no_json_object_are_refused_with_place_and_tool(arguments, told):
    sent = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call(arguments)]},
    ]
    with pytest.raises(ValueError, match=rf"messages\[1\]\.tool_calls: .*'add'.*{told}"):
        conversation(sent)


@pytest.mark.parametrize("calls", [None, []])
def test_no_tool_calls_is_the_same_as_the_field_left_out(calls):
    assert canonical({"role": "assistant", "content": "x", "tool_calls": calls}) == {
        "role": "assistant", "content": "x",
    }  # fmt: skip


def test_what_a_data_set_adds_to_a_message_reaches_the_template_and_is_no_other_s():
    """A kept rendering is not taken for one with other fields."""
    source = "{% for m in messages %}[{{ m.role }}]{{ m.thought }}|{{ m.content }}{% endfor %}"
    template = ChatTemplate(letter_tokenizer(), source)
    said = [
        template.render(conversation([{"role": "assistant", "content": "5", "thought": thought}]))
        for thought in ("easy", "hard")
    ]
    assert said == ["[assistant]easy|5", "[assistant]hard|5"]
