"""ActorGraph: the actors of one run, spawned from a recipe and ended in reverse.

The one place where a recipe meets the actors; each gets its own section and nothing else.
wait_until_loaded waits for each actor; bounded by deadlines.start_s, naming who is late.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from areal_ray.core.journal import JOURNAL_FOLDER
from areal_ray.core.seeds import derive_seed
from areal_ray.engines.constraint_support import why_unconstrained
from areal_ray.engines.lora_config import LoraSetup
from areal_ray.engines.preference import PairTask
from areal_ray.engines.protocols import SamplingConfig
from areal_ray.engines.sft import OfflineDistillationConfig
from areal_ray.errors import DeadlineExceeded
from areal_ray.recipe import Recipe
from areal_ray.runtime.agent_actor import AgentActor
from areal_ray.runtime.cluster import Connection
from areal_ray.runtime.elastic import ElasticFleet, ElasticFleets, Introductions
from areal_ray.runtime.fleet import Fleet, Seat, call, spawn, unheard
from areal_ray.runtime.gateway_config import EngineFacts, SessionTerms
from areal_ray.runtime.learner_actor import LearnerActor, LearnerSetup
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from areal_ray.runtime.placement import (
    GATEWAY,
    PARAM_SYNC,
    Bundle,
    Layout,
    Reservation,
    plan_layout,
    reserve,
)
from areal_ray.runtime.replica_list import forget_replicas, write_replicas
from areal_ray.runtime.reward_actor import RewardActor
from areal_ray.runtime.rollout_actor import RolloutActor
from areal_ray.runtime.weight_files import VERSIONS_FOLDER, prepare_folder

_MANY_CALLS = 10_000
_TOLD_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Where a run begins."""

    model_path: str
    """Folder or hub name of the weights of `version`."""
    step: int = 0
    version: int = 0
    checkpoint: str = ""
    """Folder to restore optimizer and random state from; empty = begin afresh."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the run saved beside it."""
    is_resumed: bool = False
    """The run that is in the folder goes on, from its checkpoint or from its beginning."""

    @property
    def last_row(self) -> int:
        """Step of the last row that stays: those of a step that is taken again are forgotten. At
        step 0 the beginning's own is, too, since it is evaluated again; -1 = none stays."""
        return self.step if self.checkpoint else -1


def layout_of(recipe: Recipe) -> Layout:
    """The bundles of a run of this recipe."""
    parts = recipe.parts
    return plan_layout(
        rollout=recipe.rollout if parts.samples else None,
        learner=recipe.learner if parts.trains else None,
        agent=recipe.agent if parts.samples else None,
        reward=recipe.scoring if parts.samples else None,
        gateway=recipe.gateway if parts.serves else None,
        has_evaluation=parts.loop == "train" and recipe.evaluation is not None,
    )


class ActorGraph:
    """Actors of one run."""

    def __init__(
        self,
        recipe: Recipe,
        connection: Connection,
        begin: StartPoint,
        check: Callable[[], None] = lambda: None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Reserve what the actors need; `check` may raise while it waits for that.

        `tell` takes a line now and then while actors load.
        """
        self.recipe = recipe
        self._tell = tell
        self.begin = begin
        self.roots = [str(root) for root in recipe.import_roots]
        self.journal = str((recipe.folder / JOURNAL_FOLDER).resolve())
        self._reservation: Reservation = reserve(
            layout_of(recipe),
            connection.nodes,
            deadline_s=recipe.deadlines.placement_s,
            check=check,
        )
        self._fleets: list[Fleet] = []
        self._lists: list[str] = []
        self.elastic: ElasticFleets | None = None
        """What can be scaled, once it is known; its placement groups end with the graph."""
        self._token = uuid4().hex[:6]

    # Fleets: spawned at once, loading side by side

    def _fleet(self, role: str, cls: type, make: Callable[[int, str], dict[str, Any]]) -> Fleet:
        """One actor for each seat of a role; `make` gives the constructor's arguments."""
        seats = enumerate(self._reservation.seats(role).items())
        handles = {
            name: self._spawn(cls, name, seat, make(index, name)) for index, (name, seat) in seats
        }
        fleet = Fleet(role, handles)
        self._fleets.append(fleet)
        return fleet

    def _spawn(self, cls: type, name: str, seat: Seat, arguments: dict[str, Any]) -> Any:
        return spawn(
            cls,
            name=self.spawned_name(name),
            seat=seat,
            restarts=0 if cls in (LearnerActor, ParamSyncActor) else -1,
            max_concurrency=_MANY_CALLS,
            arguments=arguments,
        )

    def elastic_fleet(
        self,
        fleet: Fleet,
        cls: type,
        arguments: Callable[[str], dict[str, Any]],
        *,
        bundles: Callable[[str], tuple[Bundle, ...]],
        introductions: Introductions | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> ElasticFleet:
        """The fleet as one that can grow by further actors of its class."""
        return ElasticFleet(
            fleet,
            self._reservation.seats(fleet.role),
            lambda name, seat: self._spawn(cls, name, seat, arguments(name)),
            bundles=bundles,
            start_s=self.recipe.deadlines.start_s,
            introductions=introductions,
            tell=tell,
        )

    def spawned_name(self, name: str) -> str:
        """What Ray knows an actor by. Two runs of one name may share a cluster, in folders of
        their own."""
        return f"{self.recipe.run_name}/{name}/{self._token}"

    def replica_list(self, role: str) -> str:
        """Key of the list of a role's replicas."""
        return self.spawned_name(f"{role}-replicas")

    def param_sync(self) -> Any:
        """The weight-update service's one actor."""
        recipe = self.recipe
        config = recipe.weights.placed(
            learner_gpus=recipe.learner.num_gpus, rollout_gpus=recipe.rollout.num_gpus
        )
        fleet = self._fleet(
            PARAM_SYNC,
            ParamSyncActor,
            lambda index, name: {
                "config": config,
                "version": self.begin.version,
            },
        )
        return fleet.handles[PARAM_SYNC]

    def rollouts(self, role: str, *, pinned: bool = False) -> Fleet:
        """Rollout replicas; `pinned` ones do not catch up by themselves."""
        fleet = self._fleet(
            role, RolloutActor, lambda index, name: self.rollout_arguments(name, pinned=pinned)
        )
        key = self.replica_list(role)
        write_replicas(key, {name: self.spawned_name(name) for name in fleet.names()})
        self._lists.append(key)
        return fleet

    def rollout_arguments(self, name: str, *, pinned: bool = False) -> dict[str, Any]:
        """Of a rollout actor's constructor."""
        return {
            "name": name,
            "model_path": self.begin.model_path,
            "config": self.recipe.rollout,
            "version": self.begin.version,
            "lora": _lora_setup(self.recipe, self.begin),
            "sync": self.spawned_name(PARAM_SYNC) if self.recipe.parts.trains else "",
            "pinned": pinned,
        }

    def agents(self, role: str, rollouts: Fleet, sampling: SamplingConfig) -> Fleet:
        """Agent actors that sample from `rollouts`."""
        make = self.agent_arguments(rollouts, sampling)
        return self._fleet(role, AgentActor, lambda index, name: make(name))

    def gateways(self, arguments: Callable[[str], dict[str, Any]]) -> Fleet:
        """Gateways, made by `gateway_arguments`."""
        from areal_ray.runtime.gateway_actor import GatewayActor  # needs the extra `gateway`

        return self._fleet(GATEWAY, GatewayActor, lambda index, name: arguments(name))

    def gateway_arguments(
        self, rollouts: Fleet, *, key_hash: bytes = b"", terms: SessionTerms | None = None
    ) -> Callable[[str], dict[str, Any]]:
        """Of the constructor of a gateway in front of `rollouts`, by its name: for whoever has the
        key of this hash; with `terms` for sessions that train."""
        recipe, engine = self.recipe, self.recipe.rollout.engine
        return lambda name: {
            "name": name,
            "model_path": self.begin.model_path,
            "config": recipe.gateway,
            "sampling": recipe.rollout.sampling,
            "replicas": self.replica_list(rollouts.role),
            "folder": self.journal,
            "key_hash": key_hash,
            "terms": terms,
            "model_name": recipe.served_name,
            "engine": EngineFacts(engine.max_context_tokens, why_unconstrained(engine)),
        }

    def rewards(self) -> Fleet:
        """Reward actors."""
        return self._fleet("reward", RewardActor, lambda index, name: self.reward_arguments(name))

    def agent_arguments(
        self, rollouts: Fleet, sampling: SamplingConfig
    ) -> Callable[[str], dict[str, Any]]:
        """Of an agent actor's constructor, by its name."""
        return lambda name: {
            "name": name,
            "model_path": self.begin.model_path,
            "config": self.recipe.agent,
            "sampling": sampling,
            "replicas": self.replica_list(rollouts.role),
            "context_tokens": self.recipe.rollout.engine.max_context_tokens,
            "search": self.roots,
            "run_folder": str(self.recipe.folder.resolve()),
        }

    def reward_arguments(self, name: str) -> dict[str, Any]:
        """Of a reward actor's constructor."""
        return {
            "name": name,
            "config": self.recipe.scoring,
            "search": self.roots,
            "journal": self.journal,
        }

    def learners(self, total_steps: int) -> Fleet:
        """The learner's ranks; they meet in wait_until_loaded()."""
        recipe = self.recipe
        setup = LearnerSetup(
            model_path=self.begin.model_path,
            config=recipe.learner,
            objective=recipe.objective.with_limit(recipe.rollout.sampling.max_new_tokens),
            companions=recipe.companions,
            temperature=recipe.rollout.sampling.temperature,
            total_steps=total_steps,
            num_ranks=recipe.learner.ranks,
            resume_from=self.begin.checkpoint,
            journal=self.journal,
            versions=_versions_folder(self.recipe),
            sft=recipe.sft,
            pairs=_pair_task(recipe),
            distillation=_distillation(recipe),
            lora=_lora_setup(self.recipe, self.begin),
            import_roots=tuple(self.roots),
            probe_tokens=_probe_tokens(recipe),
            seed=recipe.seed,
        )
        return self._fleet(
            "learner",
            LearnerActor,
            lambda index, name: {"name": name, "rank": index, "setup": setup},
        )

    async def wait_until_loaded(self, learners: Fleet | None) -> None:
        """Every actor answers, the learner's ranks have met."""
        waits: dict[str, Awaitable[Any]] = {
            name: call(name, handle.health.remote())
            for fleet in self._fleets
            for name, handle in fleet.handles.items()
            if fleet is not learners
        }
        if learners is not None:
            waits["learner"] = self._introduce(learners)
        await _all_loaded(waits, self.recipe.deadlines.start_s, self._tell)

    async def _introduce(self, learners: Fleet) -> None:
        names = learners.names()
        address = await learners.submit(names[0], "open") if len(names) > 1 else ""
        await learners.broadcast("start", address, [learners.handles[name] for name in names])

    def close(self) -> None:
        """End every actor, the last started first, and give back what was reserved."""
        for fleet in reversed(self._fleets):
            fleet.kill()
        if self.elastic is not None:
            self.elastic.release()
        self._reservation.release()
        for key in self._lists:
            forget_replicas(key)


async def _all_loaded(
    waits: Mapping[str, Awaitable[Any]], limit_s: float, tell: Callable[[str], None]
) -> None:
    tasks = {name: unheard(wait) for name, wait in waits.items()}
    began_s = time.monotonic()
    try:
        while late := [name for name, task in tasks.items() if not task.done()]:
            passed_s = time.monotonic() - began_s
            if passed_s >= limit_s:
                raise DeadlineExceeded(
                    f"start: {', '.join(late)} did not load within deadlines.start_s = "
                    f"{limit_s:g}. Raise it if the model is large"
                )
            if passed_s >= _TOLD_EVERY_S:
                tell(f"{passed_s:.0f} s since the start: still loading: {', '.join(late)}")
            await asyncio.wait(
                [tasks[name] for name in late],
                timeout=min(_TOLD_EVERY_S, limit_s - passed_s),
                return_when=asyncio.FIRST_EXCEPTION,
            )
            for task in tasks.values():
                if task.done():
                    task.result()  # raises what the actor raised
    finally:
        for task in tasks.values():
            task.cancel()


def _lora_setup(recipe: Recipe, begin: StartPoint) -> LoraSetup | None:
    config, seed = recipe.model.lora, derive_seed(recipe.seed, "lora")
    if config is None:
        return None
    return LoraSetup(config=config, seed=seed, folder=begin.checkpoint)


def _versions_folder(recipe: Recipe) -> str:
    """Where versions are published through, made here: a learner that does not find it there has
    another disk under that path."""
    if recipe.weights.transport != "disk":
        return ""
    folder = (recipe.folder / VERSIONS_FOLDER).resolve()
    prepare_folder(folder)
    return str(folder)


def _probe_tokens(recipe: Recipe) -> int:
    """Length of the canary's prompt, which has to fit the engines' window, too."""
    wanted, window = recipe.weights.canary.probe_tokens, recipe.rollout.engine.max_context_tokens
    return min(wanted, window) if window else wanted


def _pair_task(recipe: Recipe) -> PairTask | None:
    if recipe.preference is None:
        return None
    return PairTask(recipe.preference, is_scored=recipe.kind == "reward_model")


def _distillation(recipe: Recipe) -> OfflineDistillationConfig | None:
    """How the learner follows the teacher on given conversations."""
    if recipe.kind != "distill" or recipe.sft is None:
        return None
    return recipe.sft.distillation or OfflineDistillationConfig()
