"""How long a prompt is, without reading all of one of megabytes, which would hold up all others."""

from collections.abc import Callable, Sized

Encode = Callable[[str], Sized]
"""Text to token ids."""

_CHARACTERS_A_TOKEN = 16
"""More than text has on average."""
_BORDER_TOKENS = 64
"""Where a text is cut, it may have other tokens than as a whole."""


class PromptTooLong(ValueError):
    """A prompt of which its beginning tells that no context holds it.

    Args:
        num_tokens: About as many as it has.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"messages: have about {num_tokens} tokens, too many")
        self.num_tokens = num_tokens


def guessed_tokens(encode: Encode, text: str, enough: int) -> int:
    """Tokens of a text: exact if it has fewer than `enough`, else a guess by as much of it as has
    that many."""
    length = _CHARACTERS_A_TOKEN * enough
    while len(text) > length:
        count = len(encode(text[:length]))
        if count >= enough:
            return count * len(text) // length
        length *= 2
    return len(encode(text))


def check_length(encode: Encode, text: str, most_tokens: int) -> None:
    """Refuse a text that is sure to have more tokens than that; who encodes it finds out the rest.

    Raises:
        PromptTooLong: It has.
    """
    enough = most_tokens + _BORDER_TOKENS
    if len(text) > _CHARACTERS_A_TOKEN * enough:
        count = guessed_tokens(encode, text, enough)
        if count >= enough:
            raise PromptTooLong(count)
