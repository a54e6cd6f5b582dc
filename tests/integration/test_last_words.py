"""Actors that end leave the cause behind, and one that cannot start is given up with it."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from areal_ray.errors import ActorGone, ActorLost, EngineDied
from areal_ray.runtime.fleet import call
from areal_ray.runtime.last_words import end, starting, taken


class Fragile:
    """Starts as its file says, counting its starts there."""

    def __init__(self, starts: Path) -> None:
        with starts.open("a") as file:
            file.write("x")
        count = starts.stat().st_size
        with starting("fragile"):
            if (starts.parent / "kill").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            if (starts.parent / f"fail-{count}").exists():
                raise EngineDied(f"start {count} came to nothing\n  in two lines")

    async def health(self) -> str:
        return "well"

    async def end(self) -> None:
        end("fragile", EngineDied("its engine died"))


@pytest.fixture
def starts(ray_session: None, tmp_path: Path) -> Path:
    return tmp_path / "starts"


def spawned(starts: Path) -> Any:
    return ray.remote(Fragile).options(num_cpus=0, max_restarts=-1).remote(starts)


def ask(actor: Any, method: str) -> Any:
    return asyncio.run(call("fragile", getattr(actor, method).remote()))


def answer(actor: Any) -> str:
    """Of its health, once it is back."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return str(ask(actor, "health"))
        except ActorLost as lost:
            if isinstance(lost, ActorGone) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_an_actor_that_ends_leaves_its_cause_once_and_comes_back(starts: Path) -> None:
    actor = spawned(starts)
    assert answer(actor) == "well"
    assert asyncio.run(taken(actor)) == ""
    with pytest.raises(ActorLost):
        ask(actor, "end")
    assert asyncio.run(taken(actor)) == "its engine died"
    assert asyncio.run(taken(actor)) == ""
    (starts.parent / "fail-2").touch()  # one start that fails is made good by the next
    assert answer(actor) == "well"
    ray.kill(actor)


def test_a_first_start_that_fails_is_told_at_once(starts: Path) -> None:
    (starts.parent / "fail-1").touch()
    with pytest.raises(ActorGone, match=r"fragile died: start 1 came to nothing\n  in two lines$"):
        answer(spawned(starts))
    assert starts.stat().st_size == 1


def test_an_actor_that_cannot_start_again_is_given_up_with_the_cause(starts: Path) -> None:
    actor = spawned(starts)
    answer(actor)
    for count in range(2, 9):
        (starts.parent / f"fail-{count}").touch()
    with pytest.raises(ActorLost):
        ask(actor, "end")
    with pytest.raises(ActorGone, match=r"ended 3 times in a row .* start 4 came to nothing"):
        answer(actor)
    assert starts.stat().st_size == 4


def test_an_actor_that_is_killed_whenever_it_starts_is_given_up(starts: Path) -> None:
    (starts.parent / "kill").touch()
    with pytest.raises(ActorGone, match="ended 3 times in a row while it started; it said nothing"):
        answer(spawned(starts))
    assert starts.stat().st_size == 4
