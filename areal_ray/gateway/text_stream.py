"""Sampled ids -> text as they come: no half characters, nothing of a stop string."""

from collections.abc import Callable, Sequence


class TextStream:
    """Decodes one turn as it is sampled.

    Args:
        decode: Text of ids; `ReplyFormat.decode`.
        stop: Texts that end the turn; what is told ends before the first that is whole.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        raise NotImplementedError

    stop_text: str
    """The stop string that was sampled; empty if none was."""

    def feed(self, ids: Sequence[int]) -> str:
        """Text that these ids [N] make certain."""
        raise NotImplementedError

    def finish(self) -> str:
        """The rest."""
        raise NotImplementedError


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before the stop string that is whole first, and that string; "" if there is none."""
    raise NotImplementedError
