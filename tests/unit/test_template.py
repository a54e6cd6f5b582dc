"""Rendering and encoding by a checkpoint's own chat template."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.errors import DataError
from areal_ray.gateway.template import ChatTemplate
from recipes.calculator.model import make_tokenizer
from tests.support.templates import TPL_A, TPL_B, TPL_S, TPL_X, letter_tokenizer
from tests.support.tiny_models import tiny_tokenizer


def test_prompt_ids_are_a_plain_list_of_ints_equal_to_the_encoded_text():
    template = ChatTemplate(tiny_tokenizer())
    messages = [{"role": "user", "content": "What is 12+30?"}]
    ids = template.prompt_ids(messages)
    assert type(ids) is list
    assert all(type(i) is int for i in ids)
    text = "<|im_start|>user\nWhat is 12+30?<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages) == text
    assert "".join(template.token_text(i) for i in ids) == text


TOKENIZERS = {
    "calculator": make_tokenizer,
    "tiny": tiny_tokenizer,
    "letters": lambda: letter_tokenizer(specials=("<a>",)),
}
PIECES = ("<|im_end|>", "<|im_start|>", "<tool>", "<a>", "<eos>", "12", " \n", "\u00e9 ", "ab cd")


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(st.text(max_size=12) | st.sampled_from(PIECES), max_size=6))
def test_ids_are_those_of_the_tokenizer_itself(name, texts):
    tokenizer, text = kept_tokenizer(name), "".join(texts)
    tokenizer.backend_tokenizer.enable_truncation(2)  # as a saved tokenizer may ask for
    template = ChatTemplate(tokenizer, TPL_A)
    assert tokenizer.encode(text, add_special_tokens=False) == template.encode(text)


@pytest.mark.parametrize("source", [TPL_A, TPL_B, TPL_S, None], ids=["A", "B", "S", "chatml"])
@given(
    said=st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text(max_size=8)), min_size=1
    ),
    prompted=st.booleans(),
)
def test_a_rendering_is_that_of_the_tokenizer_itself(source, said, prompted):
    tokenizer = kept_tokenizer("calculator")
    messages = [{"role": role, "content": text} for role, text in said]
    expected = tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=prompted
    )
    template = ChatTemplate(tokenizer, source)
    assert template.render(messages, add_generation_prompt=prompted) == expected


@functools.cache
def kept_tokenizer(name):
    return TOKENIZERS[name]()


def test_the_close_of_an_assistant_turn_is_found_in_the_template():
    assert ChatTemplate(tiny_tokenizer()).turn_close == "<|im_end|>\n"
    assert ChatTemplate(letter_tokenizer(), TPL_A).turn_close == "[/]\n"


def test_a_default_system_turn_is_the_templates_own_and_appears_once():
    template = ChatTemplate(letter_tokenizer(), TPL_S)
    assert template.render([{"role": "user", "content": "hi"}]) == (
        "[system]be brief[/]\n[user]hi[/]\n[assistant]"
    )
    with_system = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    assert "be brief" not in template.render(with_system)


def test_a_conversation_the_template_refuses_is_a_value_error_that_lists_the_roles():
    template = ChatTemplate(letter_tokenizer(), TPL_X)
    twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ValueError, match=r"user, user.*must alternate"):
        template.render(twice)


def test_a_tool_schema_renders_the_same_whatever_its_key_order_null_fields_or_strictness():
    source = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    template = ChatTemplate(letter_tokenizer(), source)
    one = {"type": "function", "function": {"name": "f", "description": None}}
    asked = [{"role": "user", "content": "x"}]
    for more in ({}, {"strict": True}, {"strict": False}, {"parameters": None}):
        two = {"function": {**more, "name": "f"}, "type": "function"}
        assert template.render(asked, [one]) == template.render(asked, [two])


def test_a_tokenizer_without_chat_template_is_a_data_error():
    with pytest.raises(DataError, match="no chat template"):
        ChatTemplate(letter_tokenizer())


def test_a_folder_without_tokenizer_is_a_data_error_naming_it(tmp_path):
    with pytest.raises(DataError, match=str(tmp_path)):
        ChatTemplate.from_folder(tmp_path)


def test_templates_that_want_ids_of_nine_characters_get_the_same_one_for_call_and_result():
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id|length != 9 %}{{ raise_exception('nine') }}{% endif %}({{ c.id }}){% endfor %}"
        "{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}"
    )
    function = {"name": "add", "arguments": {}}

    def render(call_id: str) -> str:
        call = {"id": call_id, "type": "function", "function": function}
        return ChatTemplate(letter_tokenizer(), source).render(
            [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "1", "tool_call_id": call_id},
            ]
        )

    shown = render("call" + "a" * 32)
    assert shown[1:10].isalnum()
    assert shown == f"({shown[1:10]})[{shown[1:10]}]"
    assert render("call" + "b" * 32) != shown
    assert render("AbC123xyz") == "(AbC123xyz)[AbC123xyz]"
