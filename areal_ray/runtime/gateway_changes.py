"""Gateways that come to a run and go from it.

One that comes is written into the list before the others pass calls on to it. One that goes starts
no more sessions, goes on with those that it has until each has been trained on or rejected, and is
then ended. Without sessions it ends the calls that it has.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_ray.errors import ActorGone, ActorLost
from areal_ray.runtime.fleet import Fleet, call
from areal_ray.runtime.gateway_list import GatewayList
from areal_ray.runtime.session_service import SessionService

_LOOK_S = 1.0


class GatewayChanges:
    """The `Introductions` of gateways.

    Args:
        folder: Of the run's journal.
        fleet: All of them.
        service: Of their sessions; None where they serve without.
        count: That the run began with, where the list is not written yet.
        tell: Takes a line for each that comes or goes.
    """

    def __init__(
        self,
        folder: Path,
        fleet: Fleet,
        service: SessionService | None,
        *,
        count: int,
        tell: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._fleet = fleet
        self._service = service
        self._list = GatewayList.read(folder, count)
        self._tell = tell

    async def welcome(self, name: str, handle: Any) -> None:
        """See `Introductions`."""
        url: str = (await call(name, handle.health.remote())).url
        short = _short(name)
        known = self._list
        gone = tuple(one for one in known.gone if one != short)
        if short not in (*known.founders, *known.added):
            known = replace(known, added=(*known.added, short))
        await self._write(replace(known, gone=gone))
        await call(name, handle.health.remote())  # it has the list now, too
        if self._service is not None:
            self._service.join(name, url)
        self._tell(f"{name} listens on {url}")

    async def dismiss(self, names: Sequence[str]) -> None:
        """See `Introductions`."""
        known = self._list
        new = (short for short in map(_short, names) if short not in known.leaving)
        await self._write(replace(known, leaving=(*known.leaving, *new)))

    async def see_off(self, name: str) -> None:
        """See `Introductions`."""
        if self._service is not None:
            await self._until_empty(name)
        await self._ask(name, "finish")
        short, known = _short(name), self._list
        self._list = replace(
            known,
            added=tuple(one for one in known.added if one != short),
            leaving=tuple(one for one in known.leaving if one != short),
            gone=(*known.gone, short) if short in known.founders else known.gone,
        )
        await self._write(self._list, but=name)
        if self._service is not None:
            self._service.part(name)
        self._tell(f"{name} has left")

    async def _until_empty(self, name: str) -> None:
        """Until none of its sessions is left, over restarts of it."""
        assert self._service is not None
        while True:
            held = (await self._ask(name, "health")).sessions
            if not held.num_sessions and not self._fleet.num_calls(name):
                return
            self._service.owes(name, held.num_unserved)
            await asyncio.sleep(_LOOK_S)

    async def _ask(self, name: str, method: str) -> Any:
        """What a gateway answers, over restarts of it."""
        while True:
            try:
                return await self._fleet.submit(name, method)
            except ActorGone:
                raise
            except ActorLost:
                await asyncio.sleep(_LOOK_S)

    async def _write(self, new: GatewayList, but: str = "") -> None:
        """Have all gateways know the list before anything builds on it."""
        self._list = new
        new.write(self._folder)
        names = [name for name in self._fleet.names() if name != but]
        await asyncio.gather(*(self._look(name) for name in names))

    async def _look(self, name: str) -> None:
        while name in self._fleet.handles:
            try:
                await self._fleet.submit(name, "health")
            except ActorGone:
                raise
            except ActorLost:
                await asyncio.sleep(_LOOK_S)
            else:
                return


def _short(name: str) -> str:
    """As sessions know it."""
    return name.rpartition("-")[2]
