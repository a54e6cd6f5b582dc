"""Why a replica ended, told by itself, and how often in a row it came to nothing while it started.

Kept in Ray's own key-value store under the actor's id: there it outlives the process, and both the
driver and the process that takes its place read it, on whatever node they are.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import ray
from ray.actor import ActorHandle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from areal_ray.errors import ArealRayError, DeadlineExceeded, EngineDied
from areal_ray.runtime.ray_store import StoreSilent, read_stored, remove_stored

_log = logging.getLogger(__name__)
_WORDS = "areal_ray.last_words"
_STARTS = "areal_ray.starts"
_MOST_STARTS = 3


@contextmanager
def starting(name: str) -> Iterator[None]:
    """Around what an actor's constructor starts.

    A restarted actor whose start comes to nothing is restarted again, a few times in a row; then
    the error is raised, with which Ray gives the actor up for good. At the run's own start it is
    raised at once.

    Raises:
        EngineDied: It has ended too often in a row while it started.
    """
    context = ray.get_runtime_context()
    key = context.get_actor_id()
    lost = int(_internal_kv_get(key, namespace=_STARTS) or 0)
    if lost >= _MOST_STARTS:
        last = _internal_kv_get(key, namespace=_WORDS) or (
            b"it said nothing, as a process does that the kernel kills for want of memory"
        )
        raise EngineDied(f"it ended {lost} times in a row while it started; {last.decode()}")
    _internal_kv_put(key, str(lost + 1), namespace=_STARTS)
    try:
        yield
    except (EngineDied, DeadlineExceeded) as error:
        if not context.was_current_actor_reconstructed:
            raise
        if lost + 1 >= _MOST_STARTS:
            told = f"it ended {lost + 1} times in a row while it started; last, {error}"
            raise EngineDied(told) from error
        end(name, error)
    _internal_kv_del(key, namespace=_STARTS)


def end(name: str, cause: ArealRayError) -> NoReturn:
    """End this actor's process now, so that Ray starts another, and leave the cause behind."""
    _log.critical("%s: %s", name, cause)
    key = ray.get_runtime_context().get_actor_id()
    _internal_kv_put(key, str(cause), namespace=_WORDS)
    os._exit(1)


async def taken(actor: ActorHandle) -> str:
    """What an actor's ended process left behind, told once; empty where it left nothing, or where
    Ray's store does not answer within seconds: its head may have been ended with the actor."""
    key, where = actor._actor_id.hex().encode(), _WORDS.encode()
    try:
        words = await read_stored(key, where)
        if words:
            await remove_stored(key, where)
    except StoreSilent as error:
        _log.warning("Ray's store does not say what %s left behind: %s", key.decode(), error)
        return ""
    return (words or b"").decode()


def forget(actor: ActorHandle) -> None:
    """Drop what is kept of an actor that is ended for good."""
    for kept in (_WORDS, _STARTS):
        _internal_kv_del(actor._actor_id.hex(), namespace=kept)
