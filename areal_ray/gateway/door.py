"""Who may call, and into which session's record.

The gateway's sessions stand behind a `Door`; `OpenDoor` serves without them: every call is recorded
by itself and forgotten with its answer.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from areal_ray.gateway.call import CallError, CallHints
from areal_ray.gateway.keys import hash_key, is_same
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.text_record import TextRecord

PROMPT_FILLS_CONTEXT = "the prompt fills the context window"
"""Why the last call of a session was refused, and with it what the session came to."""


def _untold(turn_id: int, reply_id: str) -> None:
    """Nobody wants to know of turns."""


@dataclass(slots=True)
class SessionRecord:
    """What a session's calls are answered from and recorded in."""

    session_id: str
    recorder: Recorder
    is_trained: bool = False
    """Its tokens have to be sampled as the run samples: a client's temperature, top_p and seed are
    passed over."""
    prefix_key: str = ""
    """Prompts of the session begin alike; empty = of this session alone."""
    texts: TextRecord | None = None
    """What another provider said, where one answers in place of the policy; then the recorder stays
    empty."""
    is_full: bool = False
    """Whether the last call was refused because its prompt leaves no room to answer."""
    ends_at: float | None = None
    """On the event loop's clock: when its time is up, and that of calls under way; None = never."""
    turn_over: Callable[[int, str], None] = _untold
    """Told the `turn_id` of each turn once the recorder has its end, before the last byte of the
    reply is sent, and the `CallReply.id` that the client knows it by; "" if it got none."""

    def is_late(self) -> bool:
        """Whether its time is up."""
        return self.ends_at is not None and self.ends_at <= asyncio.get_running_loop().time()


class Door(Protocol):
    """Lets calls in."""

    def identify(self, key: str) -> object:
        """Who sends this key, whether a call with it would be let in now or not.

        Raises:
            CallError: 401: it is none of this server's.
        """

    async def enter(self, key: str, path_session: str, hints: CallHints) -> SessionRecord:
        """The record that a call belongs to.

        Args:
            key: As the client sent it; empty if it sent none.
            path_session: Of a path `/s/SESSION/...`; empty of others.
            hints: What the client says of the call.

        Raises:
            CallError: 401, 404 (no such session), 409, 410 (it is over) or 429.
        """

    def leave(self, record: SessionRecord) -> None:
        """The call is over, however it ended; once for each `enter` that returned."""


def time_is_up(record: SessionRecord) -> CallError:
    """What who waits for a call is told when its session's time is over."""
    told = f"session {record.session_id}: its time is up, and its calls end with it. Start another"
    return CallError(410, "session_over", told)


def unknown_key(key: str) -> CallError:
    """What who calls with this key is told."""
    said = "is not one of this server" if key else "is missing"
    return CallError(
        401,
        "invalid_api_key",
        f"API key: {said}. Send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
    )


class OpenDoor:
    """Lets everybody in who has the key, each call with a record of its own.

    Args:
        new_recorder: Makes an empty record.
        key_hash: `keys.hash_key` of what clients have to send; empty = anything, also nothing.
    """

    def __init__(self, new_recorder: Callable[[], Recorder], key_hash: bytes = b"") -> None:
        self._new_recorder = new_recorder
        self._key_hash = key_hash

    def identify(self, key: str) -> None:
        """See `Door.identify`."""
        if self._key_hash and not is_same(hash_key(key), self._key_hash):
            raise unknown_key(key)

    async def enter(self, key: str, path_session: str, hints: CallHints) -> SessionRecord:
        """See `Door.enter`; a session in the path means nothing here."""
        self.identify(key)
        return SessionRecord(secrets.token_hex(12), self._new_recorder())

    def leave(self, record: SessionRecord) -> None:
        """See `Door.leave`; the record is forgotten with the call."""
