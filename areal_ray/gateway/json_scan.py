"""How much of a JSON object that is still being written can be told already."""

import re

_MOST_DEPTH = 100
"""Clients' parsers give up at some depth; what is deeper is told at the end."""
_LONGEST_ESCAPE = 12
_BLANK = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
# Half a pair of surrogates is no character: it is told with its other half, or not at all.
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)
_CLOSERS = {"{": "}", "[": "]"}


class ObjectScan:
    """Reads an object as it comes. What it gives, end to end, is always the beginning of a JSON
    object, and never the whole of one: the last brace is for whoever knows that all is well.
    """

    def __init__(self) -> None:
        self._rest = ""
        """Not yet certain."""
        self._open: list[str] = []
        self._expects = "value"
        """value, first_value (or the end), key, first_key (or the end), colon, more (or the end),
        or string: inside one."""
        self._after_string = ""
        self._is_over = False
        """Nothing more is certain: it is whole, broken or too deep."""

    def feed(self, text: str) -> str:
        """What `text` makes certain."""
        self._rest += text
        at = 0
        while not self._is_over:
            if self._expects != "string":
                blank = _BLANK.match(self._rest, at)
                at = blank.end() if blank else at
            end = self._step(at) if at < len(self._rest) else at
            if end == at:
                break
            at = end
        certain, self._rest = self._rest[:at], self._rest[at:]
        return certain

    def _step(self, at: int) -> int:
        """Where the token at `at` ends, which is read; `at` where it is not certain (yet)."""
        if self._expects == "string":
            return self._in_string(at)
        mark = self._rest[at]
        if mark == '"' and self._expects in ("value", "first_value", "key", "first_key"):
            self._after_string = "colon" if self._expects.endswith("key") else "more"
            self._expects = "string"
        elif mark == ":" and self._expects == "colon":
            self._expects = "value"
        elif mark == "," and self._expects == "more":
            self._expects = "key" if self._open[-1] == "{" else "value"
        elif mark in _CLOSERS and self._expects in ("value", "first_value"):
            if len(self._open) == _MOST_DEPTH:
                return self._over(at)
            self._open.append(mark)
            self._expects = "first_key" if mark == "{" else "first_value"
        elif self._closes(mark):
            if len(self._open) == 1:
                return self._over(at)
            self._open.pop()
            self._expects = "more"
        elif self._expects in ("value", "first_value"):
            return self._scalar(at)
        else:
            return self._over(at)
        return at + 1

    def _closes(self, mark: str) -> bool:
        is_possible = self._expects in ("more", "first_key", "first_value")
        return is_possible and bool(self._open) and mark == _CLOSERS[self._open[-1]]

    def _in_string(self, at: int) -> int:
        plain = _PLAIN.match(self._rest, at)
        if plain is not None and plain.end() > at:
            return plain.end()
        if self._rest[at] == '"':
            self._expects = self._after_string
            return at + 1
        escape = _ESCAPE.match(self._rest, at)
        if escape is not None:
            return escape.end()
        has_come = len(self._rest) - at >= _LONGEST_ESCAPE or self._rest[at] != "\\"
        return self._over(at) if has_come else at

    def _scalar(self, at: int) -> int:
        word = _WORD.match(self._rest, at)
        if word is not None and word.end() == len(self._rest):
            return at  # more of it may come
        if word is None or _SCALAR.fullmatch(word[0]) is None:
            return self._over(at)
        self._expects = "more"
        return word.end()

    def _over(self, at: int) -> int:
        self._is_over = True
        return at
