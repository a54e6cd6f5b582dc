"""Ray's own key-value store, which its head keeps, asked beside the event loop.

Ray's blocking calls hold a loop for a minute where the head is gone, and then end the process.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayError
from ray.experimental.internal_kv import internal_kv_get_gcs_client

T = TypeVar("T")

_ANSWERS_S = 3.0


class StoreSilent(Exception):
    """It does not answer: its head is gone, away, or has too much to do."""


async def read_stored(key: bytes, namespace: bytes | None = None) -> bytes | None:
    """What is kept under a key; None = nothing.

    Raises:
        StoreSilent: No answer within seconds.
    """
    store = internal_kv_get_gcs_client()
    found: bytes | None = await _answer(store.async_internal_kv_get(key, namespace=namespace))
    return found


async def remove_stored(key: bytes, namespace: bytes | None = None) -> None:
    """Keep nothing under a key any more.

    Raises:
        StoreSilent: No answer within seconds.
    """
    store = internal_kv_get_gcs_client()
    await _answer(store.async_internal_kv_del(key, False, namespace=namespace))


async def _answer(asked: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(_ANSWERS_S):
            return await asked
    except (TimeoutError, RayError) as error:
        raise StoreSilent(f"{type(error).__name__}: {error}") from error
