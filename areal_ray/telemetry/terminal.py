"""Text on its way to a terminal, which obeys what it reads: controls in it are made visible first.

What a run tells quotes others at many places: names that clients chose, errors of agents, last
lines of processes, answers of servers. None of it can be trusted, and most of it cannot be refused
where it comes in, since it is what a user wants to read. So it is not told apart by where it comes
from: everything goes through here, and nothing else in the project prints. Files keep what was
said; log.txt does not, since people read it by `cat` and `tail`.
"""

import re
import sys
from typing import TextIO

# Of the controls a new line and a tab do no harm. C1 (0x80 to 0x9f) begins sequences as escape
# does; marks of direction show one thing and mean another; halves of characters cannot be encoded.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with each control character as its escape: ESC as `\\x1b`."""
    return _CONTROL.sub(_escape, text)


def is_one_line(text: str) -> bool:
    """Whether it holds no control character at all, as a name must."""
    return not _CONTROL.search(text) and "\n" not in text and "\t" not in text


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a text to `stream`, by default stdout, at once."""
    print(printable(text), file=stream or sys.stdout, flush=True)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
