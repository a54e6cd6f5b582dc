"""Supervisor: looks at every actor and Ray's head about once a second; tells deaths and returns.

Ray itself restarts rollout, agent and reward actors; a restarted one has a new incarnation, which
is how it is noticed here. A learner or the ParamSyncActor is not restarted: losing one ends the
run with its name, and `areal-ray resume` goes on from the last checkpoint.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_ray.errors import ActorGone, ActorLost, ArealRayError
from areal_ray.runtime.cluster import head_patience_s
from areal_ray.runtime.fleet import Fleet, call
from areal_ray.runtime.gateway_health import GatewayHealth
from areal_ray.runtime.head_watch import HeadWatch
from areal_ray.runtime.last_words import taken
from areal_ray.runtime.rollout_actor import RolloutHealth

_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class FleetReading:
    """What the rollout fleet has done so far, and what it does now."""

    at_s: float
    replicas: int
    running: int
    waiting: int
    sampled_tokens: int
    busy_s: float
    idle_for_swap_s: float
    version_spread: int
    """Newest less oldest version that replicas sample from."""

    def since(self, before: "FleetReading") -> dict[str, float]:
        """Metrics of the time between two readings."""
        wall_s = max(1e-9, self.at_s - before.at_s)
        replicas = max(1, self.replicas)
        # A restarted replica counts from 0 again; a negative difference means just that.
        busy_s = max(0.0, self.busy_s - before.busy_s) / replicas
        swap_s = max(0.0, self.idle_for_swap_s - before.idle_for_swap_s) / replicas
        return {
            "rollout/replicas": self.replicas,
            "rollout/version_spread_versions": self.version_spread,
            "rollout/running_requests": self.running,
            "rollout/waiting_requests": self.waiting,
            "rollout/busy_fraction": min(1.0, busy_s / wall_s),
        } | {
            "time/rollout_busy_s": busy_s,
            "time/rollout_swap_s": swap_s,
            "time/rollout_idle_s": max(0.0, wall_s - busy_s - swap_s),
        }


@dataclass(frozen=True, slots=True)
class Look:
    """What one look found."""

    events: tuple[str, ...]
    """A line for each actor that died, came back or fell silent."""
    returns: dict[str, str]
    """Of these, those of actors that were restarted: name -> line."""
    reading: FleetReading | None
    gone: str = ""
    """Who died for good and why, or that Ray's head did: the run cannot go on."""
    services: Mapping[str, str] = field(default_factory=dict)
    """How each actor does, by name; those that do not answer say so."""
    num_calls: int = 0
    """Model calls that gateways have had since they started."""
    num_open: int = 0
    """Of these, still being answered."""


@dataclass(frozen=True, slots=True)
class _Missed:
    """An actor that did not answer."""

    told: str
    words: str = ""
    """What it left behind."""


class Supervisor:
    """Watches the fleets that Ray restarts, and Ray's head."""

    def __init__(self, rollouts: Fleet, others: Sequence[Fleet]) -> None:
        self._head = HeadWatch(head_patience_s())
        self._rollouts = rollouts
        self._others = list(others)
        self._incarnations: dict[str, str] = {}
        self._silent: set[str] = set()

    async def look(self) -> Look:
        """Ask every actor how it is."""
        asked = (self._ask(name, handle) for name, handle in self._handles().items())
        news, *answers = await asyncio.gather(self._head.look(), *asked)
        services = {name: _told(answer) for name, answer in answers}
        events: list[str] = [news.event] if news.event else []
        returns: dict[str, str] = {}
        engines: list[RolloutHealth] = []
        num_calls = num_open = 0
        gone = news.gone
        kept = self._handles()
        for name, answer in answers:
            if name not in kept:
                continue  # it was let go meanwhile
            if isinstance(answer, ActorGone):
                gone = gone or str(answer)
                continue
            if isinstance(answer, _Missed):
                if name not in self._silent or answer.words:
                    events.append(answer.told)
                self._silent.add(name)
                continue
            returned = await self._compare(name, answer)
            if returned:
                events.append(returned)
                returns[name] = returned
            if isinstance(answer, RolloutHealth) and name in self._rollouts.handles:
                engines.append(answer)
            elif isinstance(answer, GatewayHealth):
                num_calls += answer.num_calls
                num_open += answer.num_open
        reading = _reading(engines) if engines else None
        return Look(tuple(events), returns, reading, gone, services, num_calls, num_open)

    async def _compare(self, name: str, health: Any) -> str:
        """A line if the actor was restarted since the last look."""
        before = self._incarnations.get(name)
        self._incarnations[name] = health.incarnation
        was_silent = name in self._silent
        self._silent.discard(name)
        if before is None or before == health.incarnation:
            return ""
        where = ""
        if isinstance(health, RolloutHealth):
            where = f" at version {health.engine.version}"
        lost = "" if was_silent else " died,"
        words = await taken(self._handles()[name])
        why = f". It had ended itself: {words}" if words else ""
        return f"{name}{lost} was restarted and is back{where}{why}"

    def _handles(self) -> dict[str, Any]:
        """Of all that are watched, by name."""
        fleets = (self._rollouts, *self._others)
        return {name: handle for fleet in fleets for name, handle in fleet.handles.items()}

    async def _ask(self, name: str, handle: Any) -> tuple[str, Any]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return name, await call(name, handle.health.remote())
        except TimeoutError:
            return name, _Missed(f"{name} has not answered for {_ANSWER_S:g} s")
        except ActorGone as gone:
            return name, gone
        except ActorLost as lost:
            words = await taken(handle)
            told = f"{name} ended itself, Ray restarts it: {words}"
            return name, _Missed(told if words else f"{lost}; Ray restarts it", words)
        except ArealRayError as error:
            return name, _Missed(f"{error}")


def _told(health: Any) -> str:
    """One actor's health in a few words."""
    if isinstance(health, _Missed | ArealRayError):
        return "does not answer"
    if isinstance(health, RolloutHealth):
        engine = health.engine
        return f"version {engine.version}, {engine.num_running} turns, {engine.num_waiting} waiting"
    return getattr(health, "told", "answers")


def _reading(healths: Sequence[RolloutHealth]) -> FleetReading:
    engines = [health.engine for health in healths]
    versions = [engine.version for engine in engines]
    return FleetReading(
        at_s=time.monotonic(),
        replicas=len(engines),
        running=sum(engine.num_running for engine in engines),
        waiting=sum(engine.num_waiting for engine in engines),
        sampled_tokens=sum(engine.sampled_tokens for engine in engines),
        busy_s=sum(engine.busy_s for engine in engines),
        idle_for_swap_s=sum(engine.idle_for_swap_s for engine in engines),
        version_spread=max(versions) - min(versions),
    )
