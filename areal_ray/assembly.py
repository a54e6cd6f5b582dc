"""ActorGraph: the actors of one run, made from a recipe, started together and ended in reverse.

The one place where a recipe meets the runtime; every actor gets its own section and nothing else.
start waits for each actor to load; bounded by deadlines.start_s, with the name of the last one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_ray.agents.task_stream import TaskStream, fit_prompts, load_tasks
from areal_ray.core.gate import AdmissionGate
from areal_ray.core.journal import LedgerJournal, SegmentKeeper
from areal_ray.core.ledger import Ledger
from areal_ray.core.queue import TrajectoryQueue
from areal_ray.core.task import Task
from areal_ray.core.verdict import FailureGuard
from areal_ray.engines.protocols import SamplingConfig
from areal_ray.errors import DeadlineExceeded
from areal_ray.gateway.template import ChatTemplate
from areal_ray.recipe import Recipe
from areal_ray.records import Records
from areal_ray.run import Run, SftRun
from areal_ray.runtime.agent_actor import AgentActor
from areal_ray.runtime.cluster import Connection
from areal_ray.runtime.evaluation import EvaluationService
from areal_ray.runtime.fleet import Fleet, call, spawn
from areal_ray.runtime.learner_actor import LearnerActor, LearnerSetup
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from areal_ray.runtime.placement import (
    EVALUATION,
    EVALUATION_AGENT,
    PARAM_SYNC,
    Reservation,
    plan_layout,
    reserve,
)
from areal_ray.runtime.reward_actor import RewardActor
from areal_ray.runtime.rollout_actor import RolloutActor
from areal_ray.runtime.saving import CheckpointService
from areal_ray.runtime.services import (
    AgentService,
    LearnerService,
    RewardService,
    SyncService,
    Tracker,
)
from areal_ray.runtime.supervisor import Supervisor
from areal_ray.telemetry.waits import WaitBoard

JOURNAL_FOLDER = "journal"
_MANY_CALLS = 10_000


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


class ActorGraph:
    """Actors of one run."""

    def __init__(self, recipe: Recipe, connection: Connection, begin: StartPoint) -> None:
        self._recipe = recipe
        self._begin = begin
        self._roots = [str(root) for root in recipe.import_roots]
        self._journal = str((recipe.folder / JOURNAL_FOLDER).resolve())
        is_rl, is_sft = recipe.kind == "rl", recipe.kind == "sft"
        layout = plan_layout(
            rollout=None if is_sft else recipe.rollout,
            learner=None if recipe.kind == "eval" else recipe.learner,
            agent=None if is_sft else recipe.agent,
            reward=None if is_sft else recipe.reward,
            has_evaluation=is_rl and recipe.evaluation is not None,
        )
        self._reservation: Reservation = reserve(
            layout, connection.nodes, deadline_s=recipe.deadlines.placement_s
        )
        self._fleets: list[Fleet] = []

    # Fleets: spawned at once, loading side by side

    def _fleet(self, role: str, cls: type, make: Callable[[int, str], dict[str, Any]]) -> Fleet:
        """One actor for each seat of a role; `make` gives the constructor's arguments."""
        restarts = 0 if cls in (LearnerActor, ParamSyncActor) else -1
        handles = {}
        for index, (name, seat) in enumerate(self._reservation.seats(role).items()):
            handles[name] = spawn(
                cls,
                name=f"{self._recipe.run_name}/{name}",
                seat=seat,
                restarts=restarts,
                max_concurrency=_MANY_CALLS,
                arguments=make(index, name),
            )
        fleet = Fleet(role, handles)
        self._fleets.append(fleet)
        return fleet

    def _rollouts(self, role: str, sync: Any, *, pinned: bool = False) -> Fleet:
        return self._fleet(
            role,
            RolloutActor,
            lambda index, name: {
                "name": name,
                "model_path": self._begin.model_path,
                "config": self._recipe.rollout,
                "version": self._begin.version,
                "sync": sync,
                "pinned": pinned,
            },
        )

    def _agents(self, role: str, rollouts: Fleet, sampling: SamplingConfig) -> Fleet:
        return self._fleet(
            role,
            AgentActor,
            lambda index, name: {
                "name": name,
                "model_path": self._begin.model_path,
                "config": self._recipe.agent,
                "sampling": sampling,
                "replicas": rollouts.handles,
                "context_tokens": self._recipe.rollout.engine.max_context_tokens,
                "search": self._roots,
                "run_folder": str(self._recipe.folder.resolve()),
            },
        )

    def _rewards(self) -> Fleet:
        return self._fleet(
            "reward",
            RewardActor,
            lambda index, name: {
                "name": name,
                "config": self._recipe.reward,
                "search": self._roots,
                "journal": self._journal,
            },
        )

    def _learners(self, total_steps: int) -> Fleet:
        recipe = self._recipe
        setup = LearnerSetup(
            model_path=self._begin.model_path,
            config=recipe.learner,
            objective=recipe.objective,
            temperature=recipe.rollout.sampling.temperature,
            total_steps=total_steps,
            num_ranks=recipe.learner.ranks,
            resume_from=self._begin.checkpoint,
            journal=self._journal,
            sft=recipe.sft,
            import_roots=tuple(self._roots),
            seed=recipe.seed,
        )
        return self._fleet(
            "learner",
            LearnerActor,
            lambda index, name: {"name": name, "rank": index, "setup": setup},
        )

    # Runs

    async def start_rl(self, records: Records, waits: WaitBoard, ledger: Ledger) -> Run:
        """Every actor of a run of kind rl, loaded and introduced to each other."""
        recipe, begin = self._recipe, self._begin
        assert recipe.admission is not None
        assert recipe.tasks is not None
        sync_fleet = self._fleet(
            PARAM_SYNC,
            ParamSyncActor,
            lambda index, name: {"config": recipe.weights, "version": begin.version},
        )
        sync_handle = sync_fleet.handles[PARAM_SYNC]
        learners = self._learners(recipe.steps)
        rollouts = self._rollouts("rollout", sync_handle)
        agents = self._agents("agent", rollouts, recipe.rollout.sampling)
        rewards = self._rewards()
        sync = SyncService(sync_handle, patience_s=recipe.deadlines.start_s, tell=records.event)
        evaluation = self._evaluation(rewards, sync)
        await self._wait_until_loaded(learners)
        names = learners.names()
        await call(
            PARAM_SYNC,
            sync_handle.set_members.remote(learners.handles[names[0]], rollouts.handles),
        )
        tracker = Tracker()
        admission = recipe.admission
        learner = LearnerService(
            learners, num_minibatches=recipe.learner.ppo_n_minibatches, seed=recipe.seed
        )
        run = Run(
            steps=recipe.steps,
            step=begin.step,
            version=begin.version,
            deadlines=recipe.deadlines,
            telemetry=recipe.telemetry,
            admission=admission,
            tasks=TaskStream(self._tasks(), seed=recipe.seed, shuffle=recipe.tasks.shuffle),
            gate=AdmissionGate(admission, version=begin.version),
            queue=TrajectoryQueue(admission, capacity=_queue_capacity(recipe)),
            ledger=ledger,
            guard=FailureGuard(admission),
            segments=SegmentKeeper(Path(self._journal)),
            agents=AgentService(agents, tracker, n_samples=admission.n_samples, seed=recipe.seed),
            rewards=RewardService(rewards, tracker),
            learners=learner,
            sync=sync,
            evaluation=evaluation,
            checkpoints=CheckpointService(recipe.folder, recipe.checkpoint, learner),
            supervisor=Supervisor(rollouts, [agents, rewards]),
            records=records,
            waits=waits,
            tracker=tracker,
        )
        if begin.state:
            run.load_state_dict(begin.state)
        return run

    async def start_sft(self, records: Records, waits: WaitBoard) -> SftRun:
        """The learner actors of a run of kind sft."""
        recipe, begin = self._recipe, self._begin
        assert recipe.sft is not None
        learners = self._learners(recipe.sft.planned_steps)
        await self._wait_until_loaded(learners)
        learner = LearnerService(learners, num_minibatches=1, seed=recipe.seed)
        run = SftRun(
            steps=recipe.sft.planned_steps,
            step=begin.step,
            version=begin.version,
            deadlines=recipe.deadlines,
            phases=recipe.sft.phases,
            learners=learner,
            checkpoints=CheckpointService(recipe.folder, recipe.checkpoint, learner),
            records=records,
            waits=waits,
        )
        if begin.state:
            run.load_state_dict(begin.state)
        return run

    async def start_eval(self) -> EvaluationService:
        """Rollout, agent and reward actors that score one model."""
        recipe = self._recipe
        assert recipe.evaluation is not None
        sampling = recipe.evaluation.sampling_for(recipe.rollout.sampling)
        rollouts = self._rollouts("rollout", None)
        agents = self._agents("agent", rollouts, sampling)
        rewards = self._rewards()
        await self._wait_until_loaded(None)
        return EvaluationService(
            recipe.evaluation,
            self._held_out(),
            replica=None,
            agents=agents,
            rewards=rewards,
            sync=None,
            first_version=self._begin.version,
            seed=recipe.seed,
        )

    def _evaluation(self, rewards: Fleet, sync: SyncService) -> EvaluationService | None:
        recipe = self._recipe
        if recipe.evaluation is None:
            return None
        sampling = recipe.evaluation.sampling_for(recipe.rollout.sampling)
        replicas = self._rollouts(EVALUATION, sync.handle, pinned=True)
        return EvaluationService(
            recipe.evaluation,
            self._held_out(),
            replica=replicas.handles[EVALUATION],
            agents=self._agents(EVALUATION_AGENT, replicas, sampling),
            rewards=rewards,
            sync=sync,
            first_version=self._begin.version,
            seed=recipe.seed,
        )

    def _tasks(self) -> Sequence[Task]:
        config = self._recipe.tasks
        assert config is not None
        tasks = load_tasks(config, self._roots, where="tasks")
        if config.max_prompt_tokens is None:
            return tasks
        template = ChatTemplate.from_folder(self._begin.model_path)
        return fit_prompts(tasks, config, template.count_prompt_tokens).tasks

    def _held_out(self) -> Sequence[Task]:
        evaluation = self._recipe.evaluation
        assert evaluation is not None
        return load_tasks(evaluation.tasks, self._roots, where="evaluation.tasks")[
            : evaluation.limit
        ]

    async def _wait_until_loaded(self, learners: Fleet | None) -> None:
        """Every actor answers, the learner's ranks have met."""
        waits: dict[str, Awaitable[Any]] = {
            name: call(name, handle.health.remote())
            for fleet in self._fleets
            for name, handle in fleet.handles.items()
            if fleet is not learners
        }
        if learners is not None:
            waits["learner"] = self._introduce(learners)
        tasks = {name: asyncio.ensure_future(wait) for name, wait in waits.items()}
        limit_s = self._recipe.deadlines.start_s
        done, late = await asyncio.wait(
            tasks.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in late:
            task.cancel()
        for task in done:
            task.result()  # raises what the actor raised
        if late:
            names = [name for name, task in tasks.items() if task in late]
            raise DeadlineExceeded(
                f"start: {', '.join(names)} did not load within deadlines.start_s = {limit_s:g}. "
                "Raise it if the model is large"
            )

    async def _introduce(self, learners: Fleet) -> None:
        names = learners.names()
        address = await learners.submit(names[0], "open") if len(names) > 1 else ""
        await learners.broadcast("start", address)

    def close(self) -> None:
        """End every actor, the last started first, and give back what was reserved."""
        for fleet in reversed(self._fleets):
            fleet.kill()
        self._reservation.release()


def ledger_of(recipe: Recipe) -> tuple[Ledger, LedgerJournal]:
    """The run's ledger and the journal behind it."""
    journal = LedgerJournal(recipe.folder / JOURNAL_FOLDER)
    return Ledger(journal.append), journal


def _queue_capacity(recipe: Recipe) -> int:
    assert recipe.admission is not None
    # Everything in flight may end at once, beside what a step has just left over.
    return 2 * recipe.admission.concurrent_groups + recipe.admission.groups_per_step
