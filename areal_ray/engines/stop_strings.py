"""Whether the text of what was sampled holds a stop string; the tokenizer is loaded on demand.

The embedded engine works on token ids alone, and most runs stop by tokens. For the others it reads
text back as the recorder does: without special tokens, and across token borders.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MARGIN = 4
"""Characters that a cut in mid-character, or a tokenizer's first space, may change at the start."""


class StopStrings:
    """Reads the last sampled tokens back as text. `load` from any thread, the rest from one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._decode: Callable[[list[int]], str] | None = None
        self._loading = threading.Lock()

    def load(self) -> str:
        """Get the tokenizer ready; empty if that went well, else why not."""
        with self._loading:
            if self._decode is None:
                try:
                    self._decode = _decoder(self._folder)
                except (OSError, ValueError) as error:
                    return (
                        f"its stop strings need the tokenizer of {self._folder}, which could not "
                        f"be loaded: {str(error).strip().splitlines()[0]}. Add it, or stop by "
                        "stop_token_ids."
                    )
        return ""

    def is_reached(self, token_ids: NDArray[np.int32], stop: Sequence[str]) -> bool:
        """Whether the end of the text of sampled tokens [N] holds one of the strings.

        Asked after each token, only as many of the last ones are read as can hold the longest.
        """
        assert self._decode is not None, "load comes first"
        wanted = max(map(len, stop)) + _MARGIN
        count = wanted
        while True:
            text = self._decode(token_ids[-count:].tolist())
            # Special tokens have no text, and a character may take several tokens.
            if len(text) >= wanted or count >= len(token_ids):
                return any(string in text for string in stop)
            count *= 2


def _decoder(folder: Path) -> Callable[[list[int]], str]:
    if (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer  # without Transformers, whose import takes seconds

        core = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda ids: str(core.decode(ids, skip_special_tokens=True))
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(folder)
    if len(other) <= len(other.added_tokens_decoder):  # what it makes of a folder without one
        raise ValueError("there is no vocabulary")
    return lambda ids: str(
        other.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
