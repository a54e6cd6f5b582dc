"""Prompts of megabytes are refused by a glance at them, and none that would be right."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.gateway.call import CallError
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.prompt_length import PromptTooLong, check_length, guessed_tokens
from tests.support.gateway import make_gateway
from tests.support.scripted_sampler import Said
from tests.support.templates import TPL_X, letter_tokenizer
from tests.unit.test_answer import begun, read


class Encoder:
    """One token for so many characters, and how many it was given."""

    def __init__(self, characters_a_token: int) -> None:
        self.width = characters_a_token
        self.num_read = 0

    def __call__(self, text: str) -> range:
        self.num_read += len(text)
        return range(-(-len(text) // self.width))


@pytest.mark.parametrize("width", [1, 4, 81])
def test_no_more_of_a_text_is_read_than_tells_that_it_is_too_long(width):
    encode = Encoder(width)
    with pytest.raises(PromptTooLong) as refused:
        check_length(encode, "x" * 30_000_000, 8192)
    assert refused.value.num_tokens == pytest.approx(30_000_000 / width, rel=0.01)
    assert encode.num_read < 3_000_000


@given(st.integers(0, 40_000), st.integers(1, 100), st.integers(1, 500))
def test_a_text_that_may_be_right_is_never_refused_and_its_tokens_are_exact(length, width, most):
    encode, text = Encoder(width), "x" * length
    exact = len(encode(text))
    if exact <= most:
        check_length(encode, text, most)
    if exact < most:
        assert guessed_tokens(encode, text, most) == exact


def test_a_call_of_megabytes_is_refused_like_any_that_is_too_long_and_counted_in_a_moment():
    gateway = make_gateway([Said("5")], limits=CallLimits(64, 1024))
    said = [{"role": "user", "content": "hello world " * 2_000_000}]
    began = time.monotonic()
    with pytest.raises(CallError, match=r"too long: 1[56]\d{6} tokens > 1023 maximum") as refused:
        asyncio.run(begun(gateway, messages=said))
    assert refused.value.code == "context_length_exceeded"
    assert gateway.recorder.num_turns == 0  # not even looked at
    count = asyncio.run(gateway.service.answers.count_prompt_tokens(read(messages=said)))
    assert count == pytest.approx(16_000_000, rel=0.01)
    assert time.monotonic() - began < 30  # several minutes where all of it is encoded


@pytest.mark.parametrize("place", [2, 1000, 2998])
def test_the_message_at_fault_is_found_among_thousands(place):
    gateway = make_gateway([Said("5")], tokenizer=letter_tokenizer(), chat_template=TPL_X)
    said = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(3000)]
    said[place] = said[place - 1]
    with pytest.raises(CallError, match="roles must alternate") as refused:
        asyncio.run(begun(gateway, messages=said))
    assert refused.value.param == f"messages[{place}]"
