"""More or fewer actors of one role while a run goes on.

One that is added sits in a placement group of its own and takes work once it answers and those who
call it know it. One that goes is sent nothing more, ends what it has, and gives its place back.

make_room waits for: room in the cluster, bounded by deadlines.placement_s. resize waits for: actors
to load, side by side, bounded by deadlines.start_s; calls of those that go, bounded by their own
time limits.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import ray
from ray.actor import ActorHandle

from areal_ray.errors import ArealRayError, DeadlineExceeded, PlacementError
from areal_ray.runtime.cluster import cluster_nodes
from areal_ray.runtime.fleet import Fleet, Seat, call, unheard
from areal_ray.runtime.last_words import forget
from areal_ray.runtime.placement import (
    Bundle,
    Layout,
    Reservation,
    check_supply,
    give_back,
    reserve,
)
from areal_ray.runtime.run_config import DeadlinesConfig


class Introductions(Protocol):
    """Who has to know of actors that come and go, beside their fleet."""

    async def welcome(self, name: str, handle: ActorHandle) -> None:
        """One that has loaded is to be given work from now on.

        Raises:
            ArealRayError: It cannot be; nobody gives it any.
        """

    async def dismiss(self, names: Sequence[str]) -> None:
        """These are to be given no more from now on; whoever gives them any knows it."""

    async def see_off(self, name: str) -> None:
        """Returns once one that was dismissed has ended what it had."""


class ElasticFleet:
    """A fleet that can grow and shrink.

    Args:
        fleet: Of restartable actors.
        seats: That the run reserved for it: name -> seat.
        start: Spawns one, given its name and seat.
        bundles: Of one actor, given its name: itself, and its parts if it has any.
        start_s: Longest wait for one to load.
        introductions: None where nobody has to know but the fleet.
        tell: Where those that go may take hours, `resize` does not wait for them; it takes a line
            where one cannot go. None = it waits.
    """

    def __init__(
        self,
        fleet: Fleet,
        seats: Mapping[str, Seat],
        start: Callable[[str, Seat], ActorHandle],
        *,
        bundles: Callable[[str], tuple[Bundle, ...]],
        start_s: float,
        introductions: Introductions | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.fleet = fleet
        self.bundles = bundles
        self._seats = dict(seats)
        self._free: list[Seat] = []
        self._start = start
        self._start_s = start_s
        self._introductions = introductions
        self._tell = tell
        self._num_named = len(self._seats)
        self._going: set[str] = set()
        self._farewells: set[asyncio.Future[None]] = set()
        self._welcoming = asyncio.Lock()

    def staying(self) -> list[str]:
        """Names of the members that are not on their way out."""
        return [name for name in self.fleet.names() if name not in self._going]

    def lacking(self, count: int) -> list[str]:
        """Names of the actors for which there is no place yet, if there are to be so many."""
        missing = count - len(self.staying()) - len(self._free)
        return [self._name(self._num_named + number) for number in range(missing)]

    def take(self, seats: Mapping[str, Seat]) -> None:
        """Places for further actors."""
        self._free += seats.values()

    def give_back_unused(self) -> None:
        """Return places that nobody sits in to the cluster, but those that it never gave away."""
        for seat in [seat for seat in self._free if seat.is_own]:
            self._free.remove(seat)
            give_back(seat)

    async def resize(self, count: int) -> None:
        """Bring the fleet to so many members, at least one; there has to be room for them.

        Raises:
            ArealRayError: A new actor did not start. Those beside it that did stay.
        """
        missing = count - len(self.staying())
        await self._add_all([self._name(self._num_named + number) for number in range(missing)])
        leaving = self.staying()[count:]
        if leaving and self._tell is None:
            await self._remove(leaving)
        elif leaving:
            self._send_off(leaving)

    async def take_back(self, names: Sequence[str]) -> None:
        """Start members that an earlier part of the run left behind, for what they still hold;
        there has to be room for them."""
        await self._add_all(names)
        self._send_off(names)

    def _send_off(self, names: Sequence[str]) -> None:
        """Have members leave in their own time."""
        leaving = unheard(self._remove_in_time(names))
        self._farewells.add(leaving)
        leaving.add_done_callback(self._farewells.discard)
        self._going.update(names)

    async def _remove_in_time(self, names: Sequence[str]) -> None:
        assert self._tell is not None
        try:
            await self._dismiss(names)
        except ArealRayError as error:
            self._tell(f"{', '.join(names)} cannot leave: {error}")
        else:
            await asyncio.gather(*(self._end_in_time(name) for name in names))

    async def _end_in_time(self, name: str) -> None:
        assert self._tell is not None
        try:
            await self._end_one(name)
        except ArealRayError as error:
            self._tell(f"{name} cannot leave: {error}")

    async def _add_all(self, names: Sequence[str]) -> None:
        """Load new members side by side, and wait until each takes work or has failed."""
        added = await asyncio.gather(*map(self._add, names), return_exceptions=True)
        for failure in added:
            if failure is not None:
                raise failure

    async def _add(self, name: str) -> None:
        seat = self._free.pop()
        self._num_named = max(self._num_named, 1 + int(name.rpartition("-")[2]))
        handle = self._start(name, seat)
        try:
            async with asyncio.timeout(self._start_s):
                await call(name, handle.health.remote())
            async with self._welcoming:  # each list of all that are there builds on the one before
                if self._introductions is not None:
                    await self._introductions.welcome(name, handle)
                self._seats[name] = seat
                self.fleet.add(name, handle)
        except BaseException as error:
            self._end(handle, seat)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"{name} did not load within deadlines.start_s = {self._start_s:g}"
                ) from error
            raise

    def _name(self, number: int) -> str:
        return f"{self.fleet.role}-{number}"  # never one that was there before

    async def _remove(self, names: Sequence[str]) -> None:
        await self._dismiss(names)
        await asyncio.gather(*(self._end_one(name) for name in names))

    async def _dismiss(self, names: Sequence[str]) -> None:
        self._going.update(names)
        for name in names:
            self.fleet.leave(name)
        if self._introductions is not None:
            await self._introductions.dismiss(names)

    async def _end_one(self, name: str) -> None:
        """Each when it is done: one that has long calls keeps no place for another."""
        if self._introductions is not None:
            await self._introductions.see_off(name)
        self._end(await self.fleet.retire(name), self._seats.pop(name))
        self._going.discard(name)

    def _end(self, handle: ActorHandle, seat: Seat) -> None:
        ray.kill(handle, no_restart=True)
        forget(handle)
        if seat.is_own:
            give_back(seat)
        else:
            self._free.append(seat)


class ElasticFleets:
    """All fleets of a run that can grow and shrink, by role.

    Args:
        fleets: By role.
        deadlines: Of the run.
        base: What the run has had since its beginning.
    """

    def __init__(
        self, fleets: Mapping[str, ElasticFleet], deadlines: DeadlinesConfig, base: Layout
    ) -> None:
        self._fleets = dict(fleets)
        self._base = base
        self._placement_s = deadlines.placement_s
        self._held: list[Reservation] = []
        self._is_released = False

    def __getitem__(self, role: str) -> ElasticFleet:
        return self._fleets[role]

    def roles(self) -> list[str]:
        """Those that can be scaled here."""
        return sorted(self._fleets)

    async def make_room(self, sizes: Mapping[str, int]) -> None:
        """Reserve places for all that the fleets lack for these sizes, or for none.

        Raises:
            PlacementError: The cluster has no room; says demand, supply and what is free.
        """
        lacking = {role: self._fleets[role].lacking(count) for role, count in sizes.items()}
        groups = {
            name: self._fleets[role].bundles(name)
            for role, names in lacking.items()
            for name in names
        }
        if not groups:
            return
        nodes = cluster_nodes()
        check_supply(Layout.of({**self._base.groups, **groups}), nodes)
        reservation = await asyncio.to_thread(
            reserve,
            Layout.of(groups),
            nodes,
            deadline_s=self._placement_s,
            check=self._check,
        )
        self._held.append(reservation)
        for role in lacking:
            self._fleets[role].take(reservation.seats(role))

    def release(self) -> None:
        """Give the added placement groups back."""
        self._is_released = True
        for reservation in self._held:
            reservation.release()

    def _check(self) -> None:
        if self._is_released:
            raise PlacementError("the run ends")
