"""Actors that are added to a fleet, on a real Ray."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.actor import ActorHandle

from areal_ray.errors import ArealRayError
from areal_ray.runtime.cluster import cluster_nodes
from areal_ray.runtime.elastic import ElasticFleet
from areal_ray.runtime.fleet import Fleet, Seat, spawn
from areal_ray.runtime.placement import Layout, reserve, single_bundle

ROLE = "together"


class Together:
    """Has loaded once so many have begun to; one of them may fail at it."""

    def __init__(self, folder: Path, name: str, count: int, failing: str) -> None:
        (folder / name).touch()
        self._folder, self._count, self._is_failing = folder, count, name == failing

    async def health(self) -> str:
        while len(list(self._folder.iterdir())) < self._count:
            await asyncio.sleep(0.02)
        if self._is_failing:
            raise ValueError("no such checkpoint")
        return "loaded"


class Welcomes:
    """Introductions that would lose a member if two were welcomed at a time."""

    def __init__(self) -> None:
        self.known: list[str] = []

    async def welcome(self, name: str, handle: ActorHandle) -> None:
        before = list(self.known)
        await asyncio.sleep(0.05)
        self.known = [*before, name]

    async def dismiss(self, names: object) -> None:
        raise AssertionError("nobody leaves")

    async def see_off(self, name: str) -> None:
        raise AssertionError("nobody leaves")


@pytest.fixture
def seats(ray_session: None) -> Iterator[dict[str, Seat]]:
    names = [f"{ROLE}-{number}" for number in range(1, 4)]
    layout = Layout.of({name: (single_bundle(name, ROLE, 0.1),) for name in names})
    reservation = reserve(layout, cluster_nodes(), deadline_s=60)
    yield reservation.seats(ROLE)
    reservation.release()


def grown(tmp_path: Path, seats: dict[str, Seat], failing: str = "") -> tuple[Fleet, Welcomes, str]:
    """A fleet of one brought to four, who was welcomed, and what went wrong."""

    def start(name: str, seat: Seat) -> ActorHandle:
        arguments = {"folder": tmp_path, "name": name, "count": 3, "failing": failing}
        return spawn(Together, arguments, name=f"{tmp_path.name}/{name}", seat=seat)

    async def go() -> tuple[Fleet, Welcomes, str]:
        first = f"{ROLE}-0"
        fleet, welcomes = Fleet(ROLE, {first: None}), Welcomes()  # one that nobody calls here
        elastic = ElasticFleet(
            fleet,
            {first: next(iter(seats.values()))},
            start,
            bundles=lambda name: (),
            start_s=60,
            introductions=welcomes,
        )
        elastic.take(seats)
        told = ""
        try:
            await elastic.resize(4)
        except ArealRayError as error:
            told = str(error)
        return fleet, welcomes, told

    fleet, welcomes, told = asyncio.run(go())
    for name, handle in fleet.handles.items():
        if not name.endswith("-0"):
            ray.kill(handle)
    return fleet, welcomes, told


def test_actors_that_are_added_load_side_by_side_and_are_welcomed_one_by_one(tmp_path, seats):
    fleet, welcomes, told = grown(tmp_path, seats)  # one after the other none would ever load
    assert told == ""
    assert sorted(fleet.names()) == [f"{ROLE}-{number}" for number in range(4)]
    assert sorted(welcomes.known) == [f"{ROLE}-{number}" for number in range(1, 4)]


def test_one_that_does_not_load_keeps_none_of_those_beside_it(tmp_path, seats):
    fleet, welcomes, told = grown(tmp_path, seats, failing=f"{ROLE}-2")
    assert "no such checkpoint" in told
    assert sorted(fleet.names()) == [f"{ROLE}-0", f"{ROLE}-1", f"{ROLE}-3"]
    assert sorted(welcomes.known) == [f"{ROLE}-1", f"{ROLE}-3"]
