"""Sampled ids -> text as they come: no half characters, nothing of a stop string."""

from collections.abc import Callable, Sequence

from areal_ray.gateway.tool_formats import len_held

_HALF = "\ufffd"
_MOST_HALVES = 3
"""Bytes of a character that lacks its last one."""
_LARGEST_WINDOW = 64


class TextStream:
    """Decodes one turn as it is sampled.

    Args:
        decode: Text of ids; `ReplyFormat.decode`.
        stop: Texts that end the turn; what is told ends before the first that is whole.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._window: list[int] = []
        """Ids that text is still read from: some already told, since a token's text may depend on
        those before it, then those that are new."""
        self._num_told = 0
        """Characters of the window's text that were told."""
        self._num_new = 0
        """Ids at the window's end since its text last ended in a whole character."""
        self._held = ""
        self.stop_text = ""
        """The stop string that was sampled; empty if none was."""

    def feed(self, ids: Sequence[int]) -> str:
        """Text that these ids [N] make certain."""
        if self.stop_text:
            return ""
        self._window += ids
        self._num_new += len(ids)
        text = self._decode(self._window)
        rest = text.rstrip(_HALF)
        certain = max(len(rest), len(text) - _MOST_HALVES)
        told = text[self._num_told : certain]
        self._num_told = max(self._num_told, certain)
        if certain == len(text) or self._num_new > _LARGEST_WINDOW:
            self._shift(len(text) - certain)
        return self._before_stop(told)

    def finish(self) -> str:
        """The rest."""
        if self.stop_text:
            return ""
        told = self._before_stop(self._decode(self._window)[self._num_told :])
        rest, self._held = self._held, ""
        return told if self.stop_text else told + rest

    def _shift(self, num_held: int) -> None:
        """Forget the ids before the newest, unless those say nothing by themselves."""
        newest = self._window[-self._num_new :]
        text = self._decode(newest)
        if text:
            self._window, self._num_told, self._num_new = newest, len(text) - num_held, 0

    def _before_stop(self, text: str) -> str:
        if not self._stop:
            return text
        told, self.stop_text = before_stop(self._held + text, self._stop)
        if self.stop_text:
            self._held = ""
            return told
        length = len(told) - max((len_held(told, one) for one in self._stop), default=0)
        self._held = told[length:]
        return told[:length]


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before the stop string that is whole first, and that string; "" if there is none."""
    found = [(place + len(one), -len(one), one) for one in stop if (place := text.find(one)) >= 0]
    if not found:
        return text, ""
    end, _, one = min(found)
    return text[: end - len(one)], one
