"""Numbers of actors that change while a run goes on, as `areal-ray scale` asks for it."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_ray.actors import ActorGraph, layout_of
from areal_ray.control import Requests
from areal_ray.core.storage import replace_text
from areal_ray.errors import ArealRayError
from areal_ray.recipe import Recipe
from areal_ray.records import Records
from areal_ray.runtime.agent_actor import AgentActor
from areal_ray.runtime.elastic import ElasticFleet, ElasticFleets
from areal_ray.runtime.fleet import Fleet
from areal_ray.runtime.gateway_changes import GatewayChanges
from areal_ray.runtime.gateway_list import left_behind
from areal_ray.runtime.placement import (
    GATEWAY,
    ROLLOUT,
    Bundle,
    replica_bundles,
    single_bundle,
)
from areal_ray.runtime.reward_actor import RewardActor
from areal_ray.runtime.rollout_actor import RolloutActor
from areal_ray.runtime.rollout_changes import RolloutChanges
from areal_ray.runtime.services import SyncService
from areal_ray.runtime.session_service import SessionService


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The fleets of a run, and who has to know where they change."""

    rollouts: Fleet
    agents: Fleet
    """Who samples from the rollouts: agent actors or gateways."""
    rewards: Fleet | None = None
    sync: SyncService | None = None
    """None where there is one version alone."""
    sessions: SessionService | None = None

    def of(self, service: object) -> "Services":
        """The same with the service of sessions, if it is one."""
        return replace(self, sessions=service if isinstance(service, SessionService) else None)


SCALED_FILE = "scaled.json"
"""Numbers of actors that a run was asked for last, by role."""


class Scaling:
    """Takes requests from the run's folder, and carries them out one after the other.

    Args:
        folder: Of the run.
        fleets: What can be scaled, by role.
        records: Of the run.
    """

    def __init__(self, folder: Path, fleets: ElasticFleets, records: Records) -> None:
        self._folder = folder
        self._requests = Requests(folder)
        self._fleets = fleets
        self._records = records
        self._turn = asyncio.Lock()
        self._working: set[asyncio.Task[None]] = set()
        self._done: dict[str, str] = {}

    def look(self) -> None:
        """See what was asked for since the last look, and begin with it; answer what has been done.

        Call it after `sizes` have been written where `areal-ray status` reads them: who hears that
        a run was scaled finds it there.
        """
        self._answer_done()
        for name, sizes in self._requests.new():
            task = asyncio.get_running_loop().create_task(self._scale(name, sizes))
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    def sizes(self) -> dict[str, str]:
        """How many actors of each role there are now, for the display."""
        return {role: self._fleets[role].fleet.described() for role in self._fleets.roles()}

    def close(self) -> None:
        """Leave off; what was begun stays as it is."""
        for task in self._working:
            task.cancel()
        self._answer_done()

    def _answer_done(self) -> None:
        for name in list(self._done):
            self._requests.answer(name, done=self._done.pop(name))

    async def _scale(self, name: str, sizes: Mapping[str, int]) -> None:
        async with self._turn:
            try:
                done = await self._carried_out(sizes)
            except ArealRayError as error:
                self._refuse(name, str(error))
            except Exception as error:  # a defect: who asked hears of it, and the run goes on
                self._refuse(name, f"scale: {type(error).__name__}: {error}")
                raise
            else:
                self._done[name] = done

    async def _carried_out(self, sizes: Mapping[str, int]) -> str:
        """What was done."""
        try:
            self._check(sizes)
            await self._fleets.make_room(sizes)
        except ArealRayError as error:
            raise type(error)(f"scale: nothing was changed: {error}") from error
        try:
            done = [await self._resize(role, count) for role, count in sizes.items()]
        finally:
            for role in sizes:
                self._fleets[role].give_back_unused()
        self._note(sizes)
        return ", ".join(done)

    async def _resize(self, role: str, count: int) -> str:
        elastic = self._fleets[role]
        before = len(elastic.staying())
        try:
            await elastic.resize(count)
        except ArealRayError as error:
            now = len(elastic.staying())
            raise type(error)(f"scale {role}={count}: there are {now}: {error}") from error
        told = f"{role}: {before} -> {count}"
        self._records.tally.scaled.append(told)
        self._records.event(f"scaled {told}")
        return told

    def _check(self, sizes: Mapping[str, int]) -> None:
        known = self._fleets.roles()
        for role in sizes:
            if role not in known:
                raise ArealRayError(
                    f"this run has no {role} actors that can be scaled; it has {', '.join(known)}"
                )

    def _refuse(self, name: str, told: str) -> None:
        self._records.event(told)
        self._requests.answer(name, error=told)

    def _note(self, sizes: Mapping[str, int]) -> None:
        noted = {**scaled_sizes(self._folder), **sizes}
        replace_text(self._folder / SCALED_FILE, json.dumps(noted))


def scaled_sizes(folder: Path) -> dict[str, int]:
    """What the run in a folder was scaled to; nothing where it never was."""
    path = folder / SCALED_FILE
    if not path.is_file():
        return {}
    known: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    return known


def scalable(
    graph: ActorGraph,
    services: Services,
    gateway_arguments: Callable[[str], dict[str, Any]] | None,
    tell: Callable[[str], None],
) -> ElasticFleets:
    """The fleets of a run that may grow and shrink.

    Args:
        graph: Of its actors.
        services: Its fleets.
        gateway_arguments: Of gateways, where there are any.
        tell: Takes a line for each gateway that comes or goes.
    """
    recipe, agents, rewards = graph.recipe, services.agents, services.rewards
    fleets = {ROLLOUT: _rollouts(graph, services)}
    if gateway_arguments is not None:
        fleets[GATEWAY] = _gateways(graph, services, gateway_arguments, tell)
    else:
        make = graph.agent_arguments(services.rollouts, recipe.rollout.sampling)
        single = _single(agents.role, recipe.agent.num_cpus)
        fleets[agents.role] = graph.elastic_fleet(agents, AgentActor, make, bundles=single)
    if rewards is not None and recipe.scoring is not None:
        fleets[rewards.role] = graph.elastic_fleet(
            rewards,
            RewardActor,
            graph.reward_arguments,
            bundles=_single(rewards.role, recipe.scoring.num_cpus),
        )
    graph.elastic = ElasticFleets(fleets, recipe.deadlines, layout_of(recipe))
    return graph.elastic


def _rollouts(graph: ActorGraph, services: Services) -> ElasticFleet:
    rollouts, config = services.rollouts, graph.recipe.rollout
    key = graph.replica_list(rollouts.role)
    return graph.elastic_fleet(
        rollouts,
        RolloutActor,
        graph.rollout_arguments,
        bundles=lambda name: replica_bundles(name, rollouts.role, config),
        introductions=RolloutChanges(key, services.agents, services.sync, graph.spawned_name),
    )


def _gateways(
    graph: ActorGraph,
    services: Services,
    arguments: Callable[[str], dict[str, Any]],
    tell: Callable[[str], None],
) -> ElasticFleet:
    from areal_ray.runtime.gateway_actor import GatewayActor  # needs the extra `gateway`

    config, fleet = graph.recipe.gateway, services.agents
    changes = GatewayChanges(
        Path(graph.journal), fleet, services.sessions, count=config.replicas, tell=tell
    )
    return graph.elastic_fleet(
        fleet,
        GatewayActor,
        arguments,
        bundles=_single(GATEWAY, config.num_cpus),
        introductions=changes,
        tell=None if services.sessions is None else tell,
    )


async def take_back_gateways(graph: ActorGraph) -> list[str]:
    """Start the gateways that an earlier part of an online run had beside the recipe's, for the
    sessions that they may hold; they leave once they hold none. Their names."""
    count = graph.recipe.gateway.replicas
    names = [f"{GATEWAY}-{short}" for short in left_behind(Path(graph.journal), count)]
    if names:
        assert graph.elastic is not None
        await graph.elastic.make_room({GATEWAY: count + len(names)})
        await graph.elastic[GATEWAY].take_back(names)
    return names


def scaled_before(recipe: Recipe) -> str:
    """A line on the numbers that a run had been scaled to before it was resumed; empty where it
    never was."""
    numbers = {
        "agent": recipe.agent.replicas,
        GATEWAY: recipe.gateway.replicas,
        "reward": 0 if recipe.scoring is None else recipe.scoring.replicas,
        ROLLOUT: recipe.rollout.replicas,
    }
    sizes = scaled_sizes(recipe.folder)
    changed = {role: count for role, count in sizes.items() if count != numbers[role]}
    if not changed:
        return ""
    told = ", ".join(f"{count} {role}" for role, count in changed.items())
    begins = ", ".join(f"{numbers[role]} {role}" for role in changed)
    again = " ".join(f"{role}={count}" for role, count in changed.items())
    return (
        f"the run had been scaled to {told}; it goes on with the recipe's {begins}. "
        f"areal-ray scale {recipe.run_name} {again} brings them back"
    )


def _single(role: str, num_cpus: float) -> Callable[[str], tuple[Bundle, ...]]:
    return lambda name: (single_bundle(name, role, num_cpus),)
