"""Grammars that a turn's text is held to: compiled once, followed token by token by llguidance.

A grammar is text in llguidance's Lark, which takes in JSON schemas (`%json {...}`), regexes and
single tokens (`<[id]>`). The gateway compiles it to tell a client what is wrong with it, the
embedded engine to sample by it. Both hold it to the same bounds, so that no schema takes more than
some seconds of a thread that nobody else waits for.

Compiling lets other Python threads run meanwhile.
"""

import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

INSTALL = "pip install 'areal-ray[structured]'"
_LARGEST_CHARACTERS = 2**18
_LARGEST_SYMBOLS = 20_000
"""Of the grammar that a schema becomes: its rows grow with the square of its optional keys."""
_LARGEST_STATES = 50_000
_KEPT = 256
_WORD_BITS = 32


def is_installed() -> bool:
    """Whether llguidance is here. Imports nothing."""
    return importlib.util.find_spec("llguidance") is not None


class Matcher:
    """How far one turn has come in its grammar. For one thread at a time.

    Args:
        inner: llguidance's.
        mask: [W] int32, the tokens that may come first.
    """

    __slots__ = ("_inner", "mask")

    def __init__(self, inner: Any, mask: NDArray[np.int32]) -> None:
        self._inner = inner
        self.mask = mask
        """[W] int32: bit i % 32 of word i // 32 says whether token i may come next."""

    def take(self, token_id: int) -> None:
        """Go on by a sampled token, and find what may follow it."""
        self._inner.consume_token(token_id)
        _fill(self._inner, self.mask)

    def copy(self) -> "Matcher":
        """Another turn at the same place."""
        return Matcher(self._inner.deep_copy(), self.mask.copy())

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        return bool(self._inner.is_accepting())

    @property
    def problem(self) -> str:
        """Why it can follow the turn no more; empty while it can."""
        return _first_line(self._inner.get_error())


class Grammars:
    """Compiles grammars for one tokenizer and keeps those that were asked for last.

    Any thread may call; a compilation takes milliseconds, some seconds at worst.

    Args:
        tokenizer: Gives the text of a tokenizer.json; called once, when it is first needed.
        vocab_size: Of the model, whose last ids may be no tokens; 0 = the tokenizer's.
        end_ids: Ids that end a turn, where the grammar lets it end.
    """

    def __init__(
        self, tokenizer: Callable[[], str], vocab_size: int, end_ids: Sequence[int]
    ) -> None:
        self._read_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._tokenizer: Any = None
        self._compiling = threading.Lock()
        self._kept: OrderedDict[str, Matcher | str] = OrderedDict()
        self._keeping = threading.Lock()

    def begin(self, grammar: str) -> Matcher | str | None:
        """A turn at the grammar's beginning, or why there can be none; None = compile it first."""
        with self._keeping:
            found = self._kept.get(grammar)
            if found is None:
                return None
            self._kept.move_to_end(grammar)
        return found if isinstance(found, str) else found.copy()

    def compile(self, grammar: str) -> Matcher | str:
        """As `begin`, compiled unless it is kept."""
        with self._compiling:
            found = self.begin(grammar)
            if found is not None:
                return found
            made = self._compiled(grammar)
        with self._keeping:
            self._kept[grammar] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made if isinstance(made, str) else made.copy()

    def _compiled(self, grammar: str) -> Matcher | str:
        if len(grammar) > _LARGEST_CHARACTERS:
            return (
                f"has {len(grammar)} characters as a grammar, must be at most "
                f"{_LARGEST_CHARACTERS}. Make it smaller."
            )
        if not is_installed():
            return f"needs llguidance, which is not installed here. {INSTALL}."
        from llguidance import LLMatcher, LLParserLimits

        if self._tokenizer is None:
            try:
                self._tokenizer = self._load()
            except (OSError, ValueError) as error:
                return f"needs a tokenizer.json, which cannot be used: {_first_line(str(error))}."
        limits = LLParserLimits(max_grammar_size=_LARGEST_SYMBOLS, max_lexer_states=_LARGEST_STATES)
        try:
            inner = LLMatcher(
                self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits
            )
        except ValueError as error:
            return _first_line(str(error))
        if inner.is_error():
            return _first_line(inner.get_error())
        mask = np.zeros(-(-self._tokenizer.vocab_size // _WORD_BITS), np.int32)
        _fill(inner, mask)
        if inner.is_error() or not mask.any():
            return _first_line(inner.get_error()) or "allows no text at all"
        return Matcher(inner, mask)

    def _load(self) -> Any:
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        text = self._read_tokenizer()
        size = Tokenizer.from_str(text).get_vocab_size(with_added_tokens=True)
        return LLTokenizer(text, n_vocab=max(size, self._vocab_size), eos_token=self._end_ids)


def _fill(inner: Any, mask: NDArray[np.int32]) -> None:
    inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _first_line(told: str) -> str:
    """llguidance's own words, without the place in a text that nobody wrote."""
    lines = told.strip().split("\n")
    line = lines[0].rpartition("failed to compile JSON schema: ")[2]
    if line.startswith("NoExtension"):
        return "allows no text at all"
    if line.endswith(":"):  # what it is comes below a drawing of where it is
        line = f"{line} {next((one for one in lines if one.startswith('error: ')), '')}"
    return line[:300]
