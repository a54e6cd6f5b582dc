"""Spawning actors, and calling them so that every failure names the actor and the cause."""

import asyncio
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_ray.core.task import UNSENDABLE, Task, sending_problem
from areal_ray.errors import ActorGone, ActorLost, ArealRayError, DataError, EngineError
from areal_ray.runtime.last_words import forget

T = TypeVar("T")

_PROBE_S = 0.5
_RAISED = re.compile(r"^areal_ray\.errors\.\w+: ", re.MULTILINE)
_TOLD_CHARS = 6000
"""An engine's death is told with its process's last lines."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one actor sits and what it may use there."""

    group: PlacementGroup
    bundle: int
    num_cpus: float
    num_gpus: float = 0.0
    is_own: bool = False
    """The placement group holds this actor alone, and may be given back when it ends."""


def spawn(
    cls: type,
    arguments: Mapping[str, Any],
    *,
    name: str,
    seat: Seat,
    restarts: int = 0,
    max_concurrency: int | None = None,
) -> ActorHandle:
    """Start one actor of the plain class `cls`.

    Args:
        cls: Any class; the methods that others await are coroutines.
        arguments: Of its constructor, by name.
        name: Shown by Ray's own tools; unique in a run.
        seat: Where it sits.
        restarts: -1 = for ever. Only for classes whose state comes from the constructor alone,
            since that is all a restart runs again.
        max_concurrency: Calls at once; null = Ray's default for the class (1, or 1000 if async).
    """
    options: dict[str, Any] = {
        "name": name,
        "num_cpus": seat.num_cpus,
        "num_gpus": seat.num_gpus,
        "max_restarts": restarts,
        "enable_task_events": False,  # sent to the head for each call; we report by ourselves
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=seat.group, placement_group_bundle_index=seat.bundle
        ),
    }
    if max_concurrency is not None:
        options["max_concurrency"] = max_concurrency
    return ray.remote(cls).options(**options).remote(**arguments)


def reach(actor: ActorHandle | str) -> ActorHandle:
    """An actor's handle, given itself or the name it was spawned under.

    Constructors of restartable actors are given names: a handle among the arguments would keep them
    in the object store, and a restart would fail once it lets go of them.
    """
    return ray.get_actor(actor) if isinstance(actor, str) else actor


def unheard(work: Awaitable[T]) -> "asyncio.Future[T]":
    """Start work that nobody may be left to hear the failure of, as when the run ends meanwhile.

    Otherwise asyncio would print a traceback for each call to an actor that was ended first.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def call(name: str, result: Awaitable[Any]) -> Any:
    """Await an actor's answer.

    Raises:
        ActorGone: The actor died for good.
        ActorLost: It died or cannot be reached; Ray may restart it.
        ArealRayError: What the actor raised, if it is one of ours, with the actor's name.
        EngineError: Anything else the actor raised.
    """
    try:
        return await result
    except RayTaskError as error:
        raise explained(name, error) from error
    except ActorDiedError as error:
        raise ActorGone(f"{name} died: {reason_of_death(error)}") from error
    except (RayActorError, ActorUnavailableError, WorkerCrashedError) as error:
        raise ActorLost(f"{name} died: {reason_of_death(error)}") from error
    except RayError as error:
        raise ActorLost(f"{name}: {first_line(error)}") from error


def explained(name: str, error: RayTaskError) -> ArealRayError:
    """The actor's own exception, named after the actor it came from."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, RayTaskError):  # raised by an actor that this actor called
        return explained(name, cause)
    if isinstance(cause, ArealRayError):
        return type(cause)(f"{name}: {cause}")
    if isinstance(cause, RayError):
        return ActorLost(f"{name}: {first_line(cause)}")
    return EngineError(f"{name}: {type(cause).__name__}: {cause}")


def reason_of_death(error: BaseException) -> str:
    """One line out of Ray's account of a death."""
    if isinstance(error, ActorUnavailableError):  # Ray may restart it, and cannot say more yet
        return "the connection to it broke"
    text = str(error)
    if "creation task" in text:  # the constructor raised: what, stands at the end
        *_, told = _RAISED.split(text.strip())
        return told[:_TOLD_CHARS] if told != text.strip() else told.splitlines()[-1][:300]
    if "OutOfMemory" in text or "memory monitor" in text:
        return "out of memory"
    for marker in ("exit type:", "Worker exit type:", "Worker exit detail:", "error_message"):
        if marker in text:
            detail = text.split(marker, 1)[1].strip().splitlines()[0]
            return f"{marker.rstrip(':').lower()} {detail}"[:200]
    if isinstance(error, ActorDiedError):
        return first_line(error)
    return first_line(error)


def first_line(error: BaseException) -> str:
    """The first line with text in it, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def unsendable_task(tasks: Iterable[Task]) -> str | None:
    """The first task that Ray cannot carry, and what of it; None if it can carry all."""
    return sending_problem(tasks, cloudpickle.dumps)


def _sent(remote: Any, args: Sequence[Any]) -> Any:
    """What the call of a remote method returns.

    Raises:
        DataError: A task among the arguments cannot travel; names it.
    """
    try:
        return remote.remote(*args)
    except UNSENDABLE as error:
        listed = [arg if isinstance(arg, list | tuple) else [arg] for arg in args]
        tasks = [each for some in listed for each in some if isinstance(each, Task)]
        told = unsendable_task(tasks)
        if told is None:
            raise
        raise DataError(told) from error


class Fleet:
    """All actors of one role; calls go to the least busy one."""

    def __init__(self, role: str, handles: Mapping[str, ActorHandle]) -> None:
        self.role = role
        self.handles = dict(handles)
        self._calls = dict.fromkeys(self.handles, 0)
        self._returns: dict[str, asyncio.Future[None]] = {}
        self._methods: dict[tuple[str, str, int], Any] = {}
        self._leaving: set[str] = set()

    def names(self) -> list[str]:
        """Names of the members."""
        return list(self.handles)

    def described(self) -> str:
        """How many members there are, and how many of them are on their way out."""
        leaving = f" ({len(self._leaving)} leaving)" if self._leaving else ""
        return f"{len(self.handles)}{leaving}"

    def add(self, name: str, handle: ActorHandle) -> None:
        """A member more."""
        self.handles[name] = handle
        self._calls[name] = 0

    def leave(self, name: str) -> None:
        """Give a member nothing more that anybody chose it for; it stays until it is retired."""
        self._leaving.add(name)

    def num_calls(self, name: str) -> int:
        """Calls of ours under way on a member."""
        return self._calls[name]

    async def retire(self, name: str) -> ActorHandle:
        """Send a member nothing more, wait for the calls it has, and leave it out; its handle.

        At least one other member has to stay.
        """
        self._leaving.add(name)
        try:
            while self._calls[name]:
                await asyncio.sleep(_PROBE_S)
        finally:
            self._leaving.discard(name)
        probe = self._returns.pop(name, None)
        if probe is not None:
            probe.cancel()
        del self._calls[name]
        self._methods = {key: made for key, made in self._methods.items() if key[0] != name}
        return self.handles.pop(name)

    async def least_busy(self) -> str:
        """Name of the member with the fewest calls of ours under way, of those that answer.

        While a lost one restarts, every call to it would fail at once and take its group along;
        where all are lost this waits for one to come back, for as long as the caller does.
        """
        while True:
            absent = self._leaving.union(self._returns)
            answering = [name for name in self.handles if name not in absent]
            if answering:
                return min(answering, key=self._calls.__getitem__)
            await asyncio.wait(self._returns.values(), return_when=asyncio.FIRST_COMPLETED)

    def _miss(self, member: str) -> None:
        """A member was lost: send it nothing until it answers again."""
        if member not in self._returns:
            self._returns[member] = unheard(self._await_return(member))

    async def _await_return(self, member: str) -> None:
        while True:
            try:
                await call(member, self.handles[member].health.remote())
            except ActorLost:
                await asyncio.sleep(_PROBE_S)
            else:
                del self._returns[member]
                return

    async def submit(self, member: str, method: str, *args: Any) -> Any:
        """Call one member and await its answer."""
        self._calls[member] += 1
        try:
            remote = getattr(self.handles[member], method)
            return await call(member, _sent(remote, args))
        except ActorLost:
            self._miss(member)
            raise
        finally:
            self._calls[member] -= 1

    async def submit_payload(self, member: str, method: str, *args: Any) -> tuple[Any, Any]:
        """Call a method that returns (summary, payload); the payload stays a reference."""
        summary, (payload,) = await self.submit_payloads(member, method, 1, *args)
        return summary, payload

    async def submit_payloads(
        self, member: str, method: str, count: int, *args: Any
    ) -> tuple[Any, Sequence[Any]]:
        """Call a method that returns a summary and so many payloads, which stay references."""
        self._calls[member] += 1
        try:
            summary, *payloads = _sent(self._returning(member, method, 1 + count), args)
            return await call(member, summary), payloads
        except ActorLost:
            self._miss(member)
            raise
        finally:
            self._calls[member] -= 1

    def _returning(self, member: str, method: str, count: int) -> Any:
        """The remote method with so many results; Ray would build it anew for each call."""
        key = (member, method, count)
        if key not in self._methods:
            self._methods[key] = getattr(self.handles[member], method).options(num_returns=count)
        return self._methods[key]

    async def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call every member and await all answers; the first failure is raised."""
        return list(
            await asyncio.gather(*(self.submit(name, method, *args) for name in self.handles))
        )

    def kill(self) -> None:
        """End every member now, for good."""
        for probe in self._returns.values():
            probe.cancel()
        for handle in self.handles.values():
            ray.kill(handle, no_restart=True)
            forget(handle)
