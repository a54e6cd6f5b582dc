"""The bytes of each token, whatever its tokenizer writes them with."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from areal_ray.gateway.token_bytes import TokenBytes
from tests.support.templates import letter_tokenizer
from tests.support.tiny_models import tiny_tokenizer

TINY = tiny_tokenizer()
BYTES = TokenBytes(TINY)


@given(st.text(max_size=20))
def test_those_of_byte_level_tokens_are_the_text_end_to_end(text):
    ids = TINY.encode(text, add_special_tokens=False)
    assert b"".join(map(BYTES, ids)) == text.encode()


def test_half_a_character_is_its_own_bytes_and_a_special_token_its_text():
    assert [BYTES(token) for token in TINY.encode("\u20ac")] == [b"\xe2", b"\x82", b"\xac"]
    assert BYTES(TINY.eos_token_id) == b"<|im_end|>"
    assert BYTES(100_000) == b""  # models pad their vocabularies


def with_blanks(decoder: Any, pieces: list[str]) -> TokenBytes:
    """A vocabulary as SentencePiece writes it."""
    core = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, []))
    core.decoder = decoder
    return TokenBytes(PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>"))


@pytest.mark.parametrize("metaspace", [False, True])
def test_blanks_and_bytes_of_sentencepiece_are_what_they_stand_for(metaspace):
    blanks = decoders.Metaspace() if metaspace else decoders.Replace("\u2581", " ")
    steps = [blanks, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    read = with_blanks(
        decoders.Sequence(steps), ["\u2581hi", "there", "<0xE2>", "<0x0A>", "caf\u00e9"]
    )
    assert [read(token) for token in range(6)] == [
        b" hi", b"there", b"\xe2", b"\n", "caf\u00e9".encode(), b"</s>"
    ]  # fmt: skip


def test_another_tokenizers_tokens_are_what_it_decodes_them_to():
    letters = letter_tokenizer()
    read = TokenBytes(letters)
    assert [read(token) for token in letters.encode("a b")] == [b"a", b" ", b"b"]
    assert read(letters.eos_token_id) == b"<eos>"
