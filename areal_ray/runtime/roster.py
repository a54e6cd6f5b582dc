"""The replicas that a publish addresses: who takes part, who is set aside and why.

Nobody waits for a replica set aside: it is asked once whether it answers again, and the next
publish after its answer takes it back.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import ray

from areal_ray.errors import ActorLost, ArealRayError
from areal_ray.runtime.fleet import call


class Roster:
    """Replica handles by name, some of them set aside with a reason."""

    def __init__(self, replicas: Mapping[str, Any]) -> None:
        self.handles = dict(replicas)
        self.aside: dict[str, str] = {}
        self._probes: dict[str, asyncio.Future[str]] = {}

    def present(self) -> list[str]:
        """Names of those that take part."""
        return [name for name in self.handles if name not in self.aside]

    def calls(self, names: list[str], verb: str, *args: Any) -> dict[str, Any]:
        """One verb asked of several replicas: their answers to come, by name."""
        return {name: getattr(self.handles[name], verb).remote(*args) for name in names}

    def set_aside(self, name: str, reason: str) -> None:
        """Leave a replica out until it answers again; what it staged is void."""
        self.aside[name] = reason
        self.handles[name].weights_discard.remote()
        self._probe(name)

    def restart(self, name: str, error: ArealRayError) -> None:
        """Set a replica aside whose state is unknown and, unless it died, have Ray restart it."""
        if isinstance(error, ActorLost):
            self.set_aside(name, str(error))
            return
        ray.kill(self.handles[name], no_restart=False)
        self.set_aside(name, f"{error}; restarted")

    def readmit(self) -> None:
        """Take back those that have answered since they were set aside."""
        for name, probe in list(self._probes.items()):
            if not probe.done():
                continue
            if probe.exception() is None:
                del self._probes[name], self.aside[name]
            else:
                self._probe(name)

    def close(self) -> None:
        """Ask nobody any more."""
        for probe in self._probes.values():
            probe.cancel()
        self._probes = {}

    def _probe(self, name: str) -> None:
        if name in self._probes:
            self._probes[name].cancel()
        answer = call(name, self.handles[name].incarnation.remote())
        self._probes[name] = asyncio.ensure_future(answer)
