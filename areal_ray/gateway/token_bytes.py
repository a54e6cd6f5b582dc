"""The bytes that one token stands for: a character may be spread over several tokens.

Decoding such a token alone gives a replacement character; its bytes are in how the vocabulary
writes it, which depends on the tokenizer's decoder.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Bytes by token id.

    Args:
        tokenizer: A Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._added = {
            number: token.content for number, token in tokenizer.added_tokens_decoder.items()
        }
        steps = [] if self._backend is None else list(_steps(self._backend.decoder))
        kinds = {step["type"] for step in steps}
        self._letters = _byte_letters() if "ByteLevel" in kinds else {}
        self._has_one_byte_tokens = "ByteFallback" in kinds
        self._blanks = [blank for step in steps for blank in _blanks(step)]
        self._kept = functools.cache(self._bytes)  # of a vocabulary at most

    def __call__(self, token_id: int) -> bytes:
        """Those of one token, special ones included; none of an id that the tokenizer lacks."""
        return self._kept(token_id)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        is_known = bool(self._letters or self._has_one_byte_tokens or self._blanks)
        if self._backend is None or not is_known:
            return str(self._tokenizer.decode([token_id])).encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:  # a model's vocabulary may be padded
            return b""
        if self._letters and self._letters.keys() >= set(piece):
            return bytes(self._letters[letter] for letter in piece)
        if self._has_one_byte_tokens and (alone := _ONE_BYTE.fullmatch(piece)):
            return bytes([int(alone[1], 16)])
        for written, meant in self._blanks:
            piece = piece.replace(written, meant)
        return str(piece).encode()


def _steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a decoder, as a tokenizer.json has them."""
    if decoder is None:
        return
    waiting = [json.loads(decoder.__getstate__())]
    while waiting:
        step = waiting.pop(0)
        waiting = [*step.get("decoders", ()), *waiting]
        yield step


def _blanks(step: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a step writes in place of which text of the vocabulary."""
    if step["type"] == "Metaspace":
        yield step["replacement"], " "
    elif step["type"] == "Replace" and "String" in step["pattern"]:
        yield step["pattern"]["String"], step["content"]


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with (GPT-2's)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}
