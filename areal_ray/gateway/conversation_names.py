"""What a client itself calls the conversation that a call belongs to."""

import hashlib
from collections.abc import Iterator

from areal_ray.gateway.call import CallHints

_HEADERS = (
    "x-conversation-id",
    "conversation-id",
    "conversation_id",
    "x-session-id",
    "session-id",
    "session_id",
    "thread-id",
    "x-claude-code-session-id",
    "x-areal-session-key",
)


def conversation_names(hints: CallHints) -> Iterator[str]:
    """Hashes of the names that a call gives, each once."""
    given = {hints.user, *(hints.headers.get(name, "") for name in _HEADERS)}
    for name in sorted(given - {""}):
        yield hashed_name(name)


def hashed_name(name: str) -> str:
    """What is kept of a client's name for a conversation: it may be a person's."""
    return hashlib.blake2b(name.encode(), digest_size=8, person=b"areal-ray name").hexdigest()
