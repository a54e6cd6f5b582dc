"""The replicas that a publish addresses: who takes part, who is set aside and why.

Nobody waits for a replica set aside: it is asked once whether it answers again, and the next
publish after its answer takes it back. One whose weights differ is refreshed before, in place, or
restarted where that does not help.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray

from areal_ray.errors import ActorLost, ArealRayError, DeadlineExceeded
from areal_ray.runtime.fleet import call, unheard
from areal_ray.runtime.membership import NoReplicaLeft, refusal


class Roster:
    """Replica handles by name, some of them set aside with a reason."""

    def __init__(self, replicas: Mapping[str, Any]) -> None:
        self.handles = dict(replicas)
        self.aside: dict[str, str] = {}
        self._probes: dict[str, asyncio.Future[str]] = {}
        self.refreshing: dict[str, asyncio.Future[None]] = {}
        """Those set aside for wrong weights, until they have the right ones or are restarted."""
        self._news: list[str] = []

    def present(self) -> list[str]:
        """Names of those that take part."""
        return [name for name in self.handles if name not in self.aside]

    def needed(self, version: int) -> list[str]:
        """Names of those to be updated to a version.

        Raises:
            NoReplicaLeft: There are replicas, and all of them are set aside.
        """
        names = self.present()
        if self.handles and not names:
            aside = "; ".join(self.aside.values())
            raise NoReplicaLeft(refusal(version, f"no replica is left; {aside}"))
        return names

    def calls(self, names: list[str], verb: str, *args: Any) -> dict[str, Any]:
        """One verb asked of several replicas: their answers to come, by name."""
        return {name: getattr(self.handles[name], verb).remote(*args) for name in names}

    def set_aside(self, name: str, reason: str) -> None:
        """Leave a replica out until it answers again; what it staged is void."""
        self._leave_out(name, reason)
        self._probe(name)

    def blame(self, name: str, error: ArealRayError) -> None:
        """Set a replica aside that failed; one that hangs is restarted."""
        if isinstance(error, DeadlineExceeded):
            self.restart(name, error)
        else:
            self.set_aside(name, str(error))

    def refresh(self, name: str, reason: str, work: Callable[[], Awaitable[None]]) -> None:
        """Set a replica aside that has wrong weights, and have `work` bring it the right ones."""
        self._leave_out(name, f"{reason}; to be refreshed")
        self.refreshing[name] = unheard(self._refresh(name, work))

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
                self._news.append(f"{name} takes part again")
            else:
                self._probe(name)

    def change(self, joining: Mapping[str, Any], leaving: Sequence[str]) -> None:
        """Replicas that hold the committed version take part from now on; others no more."""
        for name in leaving:
            for asked in (self._probes.pop(name, None), self.refreshing.pop(name, None)):
                if asked is not None:
                    asked.cancel()
            self.handles.pop(name, None)
            self.aside.pop(name, None)
        self.handles |= joining

    async def until_refreshed(self) -> None:
        """Wait for all that are being refreshed now."""
        if self.refreshing:
            await asyncio.wait(self.refreshing.values())

    def close(self) -> None:
        """Ask nobody any more."""
        for probe in self._probes.values():
            probe.cancel()
        for refreshing in self.refreshing.values():
            refreshing.cancel()
        self._probes, self.refreshing = {}, {}

    def take_news(self) -> tuple[str, ...]:
        """Who was set aside and who is back since the last call, a line each."""
        news, self._news = tuple(self._news), []
        return news

    def _leave_out(self, name: str, reason: str) -> None:
        self.aside[name] = reason
        self._news.append(f"set aside: {reason}")
        self.handles[name].weights_discard.remote()

    async def _refresh(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except ArealRayError as error:
            del self.refreshing[name]
            self.restart(name, error)
        else:
            del self.refreshing[name]
            self._news.append(f"{name} is refreshed")
            self._probes[name] = asyncio.get_running_loop().create_future()
            self._probes[name].set_result("it has just answered")

    def _probe(self, name: str) -> None:
        if name in self._probes:
            self._probes[name].cancel()
        answer = call(name, self.handles[name].incarnation.remote())
        self._probes[name] = asyncio.ensure_future(answer)
