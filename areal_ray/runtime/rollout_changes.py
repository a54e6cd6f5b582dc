"""Rollout replicas that come to a run and go from it: who has to know, and in which order.

One that comes has the committed version before anybody may sample from it, and takes part in the
next publish. One that goes is sent no more turns; its own end there, or go on elsewhere; then it is
left out of publishes, and only then ended. Whoever samples is told, and told again if it dies
meanwhile: as it restarts it reads the list.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_ray.errors import ActorGone, ActorLost
from areal_ray.runtime.fleet import Fleet
from areal_ray.runtime.replica_list import read_replicas, write_replicas
from areal_ray.runtime.services import SyncService

_RETRY_S = 0.5


class RolloutChanges:
    """The `Introductions` of rollout replicas.

    Args:
        key: Of the list of replicas.
        callers: Who samples: agent actors or gateways.
        sync: None where there is one version alone.
        spawned_name: What a replica was spawned under.
    """

    def __init__(
        self,
        key: str,
        callers: Fleet,
        sync: SyncService | None,
        spawned_name: Callable[[str], str],
    ) -> None:
        self._key = key
        self._callers = callers
        self._sync = sync
        self._spawned_name = spawned_name

    async def welcome(self, name: str, handle: Any) -> None:
        """See `Introductions`."""
        if self._sync is not None:
            await self._sync.change_replicas({name: handle}, ())
        known = read_replicas(self._key)
        await self._tell({**known, name: self._spawned_name(name)})

    async def dismiss(self, names: Sequence[str]) -> None:
        """See `Introductions`; returns once nothing is under way on them."""
        known = read_replicas(self._key)
        await self._tell({name: one for name, one in known.items() if name not in names})
        if self._sync is not None:
            await self._sync.change_replicas({}, names)

    async def see_off(self, name: str) -> None:
        """See `Introductions`: it has nothing any more."""

    async def _tell(self, replicas: Mapping[str, str]) -> None:
        write_replicas(self._key, replicas)
        await asyncio.gather(*(self._tell_one(one, replicas) for one in self._callers.names()))

    async def _tell_one(self, caller: str, replicas: Mapping[str, str]) -> None:
        while caller in self._callers.handles:
            try:
                await self._callers.submit(caller, "use_replicas", replicas)
            except ActorGone:
                raise
            except ActorLost:
                await asyncio.sleep(_RETRY_S)
            else:
                return
