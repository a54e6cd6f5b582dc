"""More or fewer actors of one role while a run goes on.

One that is added gets a placement group of its own and takes work once it answers. One that goes is
sent nothing more, ends what it has, and leaves its place to the next that is added.

resize waits for: room in the cluster, bounded by deadlines.placement_s; an actor to load, bounded
by deadlines.start_s; calls of those that go, bounded by their own time limits.
"""

import asyncio
from collections.abc import Callable, Mapping

import ray
from ray.actor import ActorHandle

from areal_ray.errors import DeadlineExceeded, PlacementError
from areal_ray.runtime.cluster import cluster_nodes
from areal_ray.runtime.fleet import Fleet, Seat, call
from areal_ray.runtime.last_words import forget
from areal_ray.runtime.placement import Bundle, Layout, Reservation, reserve
from areal_ray.runtime.run_config import DeadlinesConfig


class ElasticFleet:
    """A fleet that can grow and shrink.

    Args:
        fleet: Of restartable actors, which know nothing of each other.
        seats: That the run reserved for it: name -> seat.
        start: Spawns one, given its name and seat.
        deadlines: Of the run.
    """

    def __init__(
        self,
        fleet: Fleet,
        seats: Mapping[str, Seat],
        start: Callable[[str, Seat], ActorHandle],
        deadlines: DeadlinesConfig,
    ) -> None:
        self.fleet = fleet
        self._seats = dict(seats)
        self._free: list[Seat] = []
        self._start = start
        self._deadlines = deadlines
        self._added: list[Reservation] = []
        self._num_named = len(self._seats)
        self._is_released = False

    async def resize(self, count: int) -> None:
        """Bring the fleet to so many members, at least one.

        Raises:
            PlacementError: The cluster has no room; says demand, supply and what is free.
            ArealRayError: A new actor did not start. Those added before it stay.
        """
        while len(self.fleet.handles) < count:
            await self._add()
        leaving = self.fleet.names()[count:]
        await asyncio.gather(*(self._remove(name) for name in leaving))

    def release(self) -> None:
        """Give the added placement groups back."""
        self._is_released = True
        for reservation in self._added:
            reservation.release()

    async def _add(self) -> None:
        name = f"{self.fleet.role}-{self._num_named}"  # never one that was there before
        seat = self._free.pop() if self._free else await self._reserve(name)
        self._num_named += 1
        handle = self._start(name, seat)
        try:
            async with asyncio.timeout(self._deadlines.start_s):
                await call(name, handle.health.remote())
        except BaseException as error:
            ray.kill(handle, no_restart=True)
            self._free.append(seat)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"{name} did not load within deadlines.start_s = {self._deadlines.start_s:g}"
                ) from error
            raise
        self._seats[name] = seat
        self.fleet.add(name, handle)

    async def _reserve(self, name: str) -> Seat:
        like = next(iter(self._seats.values()))
        bundle = Bundle(name, self.fleet.role, like.num_cpus, like.num_gpus)
        reservation = await asyncio.to_thread(
            reserve,
            Layout({name: (bundle,)}),
            cluster_nodes(),
            deadline_s=self._deadlines.placement_s,
            check=self._check,
        )
        self._added.append(reservation)
        return reservation.seats(self.fleet.role)[name]

    def _check(self) -> None:
        if self._is_released:
            raise PlacementError("the run ends")

    async def _remove(self, name: str) -> None:
        handle = await self.fleet.retire(name)
        ray.kill(handle, no_restart=True)
        forget(handle)
        self._free.append(self._seats.pop(name))
