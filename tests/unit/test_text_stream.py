"""Text of a turn while it is sampled: whole characters, and nothing of a stop string."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.gateway.text_stream import TextStream, before_stop


@cache
def byte_tokenizer() -> Any:
    """One token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core


@cache
def word_tokenizer() -> Any:
    """Words that carry the blank before them, which the first of a text loses."""
    from tokenizers import Tokenizer, decoders, models

    words = ["\u2581a", "\u2581b", "c", "\u2581", "<s>", "\u2581\u00e4"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    core.add_special_tokens(["<s>"])
    core.decoder = decoders.Metaspace()
    return core


def bytes_text(ids: Sequence[int]) -> str:
    return str(byte_tokenizer().decode(list(ids)))


def words_text(ids: Sequence[int]) -> str:
    return str(word_tokenizer().decode(list(ids)))


def streamed(stream: TextStream, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    told = [stream.feed(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    return [*told, stream.finish()]


@given(st.text(alphabet="ab\u00e4\u20ac\U0001f600\ufffd", max_size=40), st.data())
def test_characters_come_whole_however_their_tokens_are_cut(text, data):
    ids = byte_tokenizer().encode(text).ids
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    told = streamed(TextStream(bytes_text), ids, cuts)
    assert "".join(told) == text


@given(st.lists(st.integers(0, 255), max_size=200), st.data())
def test_bytes_that_are_no_text_are_told_as_the_whole_turn_tells_them(ids, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    assert "".join(streamed(TextStream(bytes_text), ids, cuts)) == bytes_text(ids)


@given(st.lists(st.integers(0, 5), max_size=30), st.data())
def test_blanks_that_words_carry_are_told_as_the_whole_turn_tells_them(ids, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    assert "".join(streamed(TextStream(words_text), ids, cuts)) == words_text(ids)


def test_a_character_is_held_until_its_last_byte():
    ids = byte_tokenizer().encode("\U0001f600").ids
    stream = TextStream(bytes_text)
    assert [stream.feed([i]) for i in ids] == ["", "", "", "\U0001f600"]


def test_half_a_character_at_the_end_is_told_as_such():
    ids = byte_tokenizer().encode("a\u20ac").ids[:-1]
    stream = TextStream(bytes_text)
    assert (stream.feed(ids), stream.finish()) == ("a", "\ufffd")


def test_a_flood_of_broken_bytes_is_decoded_in_windows():
    lengths = []

    def text(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return bytes_text(ids)

    broken = byte_tokenizer().encode("\u20ac").ids[:1]
    stream = TextStream(text)
    told = "".join(stream.feed(broken) for _ in range(1000)) + stream.finish()
    assert told == "\ufffd" * 1000
    assert max(lengths) < 200


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4)),
       st.data())  # fmt: skip
def test_what_is_told_ends_before_the_stop_string_however_it_is_cut(text, stop, data):
    ids = byte_tokenizer().encode(text).ids
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    stream = TextStream(bytes_text, stop)
    told = streamed(stream, ids, cuts)
    assert ("".join(told), stream.stop_text) == before_stop(text, stop)


def test_nothing_of_a_stop_string_is_told_before_it_is_whole():
    stream = TextStream(bytes_text, ("Observation:",))
    told = [stream.feed([i]) for i in byte_tokenizer().encode("a Obs").ids]
    assert told == ["a", " ", "", "", ""]
    assert stream.finish() == "Obs"


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        ((), ("abcd", "")),
        (("x",), ("abcd", "")),
        (("c",), ("ab", "c")),
        (("abcd", "b"), ("a", "b")),
        (("b", "ab"), ("", "ab")),
    ],
)
def test_of_several_stop_strings_the_first_that_is_whole_ends_the_text(stop, told):
    assert before_stop("abcd", stop) == told
