"""Which rollout replicas a run has now, where an actor finds it that Ray starts anew.

A constructor's arguments are those of the run's first moment. Replicas that came since would be
unknown to an agent actor that restarts, and those that went would be called for ever. So the list
is kept in Ray's own key-value store, which the driver writes before it tells anybody.
"""

import json
from collections.abc import Mapping
from typing import Any

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from areal_ray.errors import ActorLost
from areal_ray.runtime.fleet import reach

_NAMESPACE = "areal_ray.replicas"


def write_replicas(key: str, spawned: Mapping[str, str]) -> None:
    """These are the replicas from now on: name -> the name it was spawned under."""
    _internal_kv_put(key, json.dumps(dict(spawned)), namespace=_NAMESPACE)


def read_replicas(key: str) -> dict[str, str]:
    """What was written last.

    Raises:
        ActorLost: Nothing was, or the run has ended since.
    """
    listed = _internal_kv_get(key, namespace=_NAMESPACE)
    if listed is None:
        raise ActorLost(f"{key}: no rollout replicas are listed; the run has ended")
    known: dict[str, str] = json.loads(listed)
    return known


def forget_replicas(key: str) -> None:
    """The run ends."""
    _internal_kv_del(key, namespace=_NAMESPACE)


def reached(replicas: Mapping[str, Any] | str) -> dict[str, Any]:
    """Handles by name, of handles, of names that actors were spawned under, or of the key of a
    list of such names."""
    known = read_replicas(replicas) if isinstance(replicas, str) else replicas
    return {name: reach(replica) for name, replica in known.items()}
