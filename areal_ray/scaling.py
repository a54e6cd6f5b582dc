"""Numbers of actors that change while a run goes on, as `areal-ray scale` asks for it."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from areal_ray.control import Requests
from areal_ray.errors import ArealRayError
from areal_ray.runtime.elastic import ElasticFleet


class Scaling:
    """Takes requests from the run's folder, and carries them out one after the other.

    Args:
        folder: Of the run.
        fleets: What can be scaled, by role.
        tell: Takes a line for each change.
    """

    def __init__(
        self, folder: Path, fleets: Mapping[str, ElasticFleet], tell: Callable[[str], None]
    ) -> None:
        self._requests = Requests(folder)
        self._fleets = dict(fleets)
        self._tell = tell
        self._turn = asyncio.Lock()
        self._working: set[asyncio.Task[None]] = set()

    def look(self) -> None:
        """See what was asked for since the last look, and begin with it."""
        for name, sizes in self._requests.new():
            task = asyncio.get_running_loop().create_task(self._scale(name, sizes))
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    def sizes(self) -> dict[str, str]:
        """How many actors of each role there are now, for the display."""
        return {role: elastic.fleet.described() for role, elastic in self._fleets.items()}

    def close(self) -> None:
        """Leave off; what was begun stays as it is."""
        for task in self._working:
            task.cancel()

    async def _scale(self, name: str, sizes: Mapping[str, int]) -> None:
        done = []
        async with self._turn:
            for role, count in sizes.items():
                if role not in self._fleets:
                    self._requests.answer(name, error=f"scale: this run has no {role} actors")
                    return
                elastic = self._fleets[role]
                before = len(elastic.fleet.handles)
                try:
                    await elastic.resize(count)
                except ArealRayError as error:
                    now = len(elastic.fleet.handles)
                    told = f"scale {role}={count}: there are {now}: {error}"
                    self._tell(told)
                    self._requests.answer(name, error=told)
                    return
                done.append(f"{role}: {before} -> {count}")
                self._tell(f"scaled {done[-1]}")
        self._requests.answer(name, done=", ".join(done))
