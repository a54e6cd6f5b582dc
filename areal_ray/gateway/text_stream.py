"""Sampled ids -> text as they come: no half characters, nothing of a stop string."""

from collections.abc import Callable, Sequence


class TextStream:
    """Decodes one turn as it is sampled.

    Args:
        decode: Text of ids; `ReplyFormat.decode`.
        stop: Texts that end the turn; what is told ends before the first that is whole.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode, self._stop, self._ids, self._told = decode, stop, [], 0

    def feed(self, ids: Sequence[int]) -> str:
        """Text that these ids [N] make certain."""
        self._ids += ids
        text = self._decode(self._ids)
        if self._stop or text.endswith("\ufffd"):
            return ""
        told, self._told = self._told, len(text)
        return text[told:]

    def finish(self) -> str:
        """The rest."""
        text = before_stop(self._decode(self._ids), self._stop)[0]
        told, self._told = self._told, len(text)
        return text[told:]


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before the stop string that is whole first, and that string; "" if there is none."""
    found = [(place, one) for one in stop if (place := text.find(one)) >= 0]
    place, one = min(found, default=(len(text), ""))
    return text[:place], one
