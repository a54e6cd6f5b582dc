"""Keys of the gateway: random, shown once, kept as hashes, compared in constant time.

`ar-REPLICA-RANDOM`: the name of the replica that holds a session is part of its key, so that any
replica knows where a call belongs. A fixed key of a deployed agent has no such name; its hash says.
"""

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from enum import StrEnum

from areal_ray.errors import ArealRayError

MOST_KEY_CHARACTERS = 512
_FEWEST_KEY_CHARACTERS = 16
_NAMED = re.compile(r"(?:ar|s|g)-([a-z0-9]{1,16})-.+")
_HASH_BYTES = 32


class Scope(StrEnum):
    """What a key is for."""

    ADMIN = "admin"
    """Starts sessions, sets any reward, exports."""
    SESSION = "session"
    """Calls the model and sets rewards in one session."""
    AGENT = "agent"
    """A fixed key of a deployed agent: the same in its session of the moment."""


def check_name(name: str) -> str:
    """The name of a replica.

    Raises:
        ArealRayError: It cannot be part of a key.
    """
    if not re.fullmatch("[a-z0-9]{1,16}", name):
        raise ArealRayError(f"gateway name: {name!r}; must be 1 to 16 lower-case letters or digits")
    return name


def new_admin_key() -> str:
    """A key for whoever starts sessions and sets rewards."""
    return "ar_" + secrets.token_urlsafe(24)


def new_id(kind: str, name: str) -> str:
    """Of a session (`s`) or a group (`g`) of replica `name`; unique for ever, no secret."""
    return f"{kind}-{name}-{secrets.token_hex(10)}"


def session_key(admin_key: str, nonce: bytes, name: str) -> str:
    """The key of a new session.

    It follows from the admin key that the session was started with, so that a client that asks
    again is given the same one, though nobody keeps it.

    Args:
        admin_key: As the client sent it.
        nonce: [16] random, of this session; kept, but shown to nobody.
        name: Of the replica.
    """
    mixed = hmac.digest(admin_key.encode(), nonce, "sha256")
    return f"ar-{name}-" + base64.urlsafe_b64encode(mixed[:24]).decode()


def hash_key(key: str) -> bytes:
    """[32] what is kept of a key."""
    return hashlib.blake2b(key.encode(), digest_size=_HASH_BYTES, person=b"areal-ray key").digest()


def is_same(left: bytes, right: bytes) -> bool:
    """Whether two hashes are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(left, right)


def weakness(key: str) -> str:
    """Why a key that somebody chose is none; empty if it is one."""
    if not _FEWEST_KEY_CHARACTERS <= len(key) <= MOST_KEY_CHARACTERS:
        return (
            f"has {len(key)} characters; must have {_FEWEST_KEY_CHARACTERS} to "
            f"{MOST_KEY_CHARACTERS}"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        return "has characters that no header carries; must be printable ASCII without blanks"
    return ""


def replica_of(text: str) -> str:
    """The replica that a key or an id names; empty if it names none."""
    found = _NAMED.fullmatch(text)
    return found[1] if found else ""


def home_of(key: str, names: Iterable[str]) -> str:
    """The replica that keeps the sessions of a fixed key: the same one wherever it is asked."""
    hashed = hash_key(key)
    return max(names, key=lambda name: hmac.digest(hashed, name.encode(), "sha256"))
