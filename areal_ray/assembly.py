"""From an actor graph to a run: the services, the counters and the loops' shared state.

Each start function spawns every actor first, so that they load side by side, then introduces them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areal_ray.actors import ActorGraph
from areal_ray.agents.slot_stream import SlotStream
from areal_ray.agents.task_stream import TasksConfig, TaskStream, fit_prompts, load_tasks
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.shaping import shape_levels
from areal_ray.core.gate import AdmissionGate
from areal_ray.core.journal import JOURNAL_FOLDER, LedgerJournal, SegmentKeeper, read_ledger
from areal_ray.core.ledger import Ledger
from areal_ray.core.queue import TrajectoryQueue
from areal_ray.core.task import Task
from areal_ray.core.verdict import Comparison, FailureGuard
from areal_ray.core.versions import AdmissionConfig
from areal_ray.gateway.keys import hash_key
from areal_ray.gateway.template import model_context_tokens, prompt_counter
from areal_ray.recipe import Recipe
from areal_ray.records import Records
from areal_ray.run import PairRun, RowCursor, Run, ServingRun, SftRun
from areal_ray.runtime.bounds import BoundsService
from areal_ray.runtime.cluster import environment_secrets, head_patience_s
from areal_ray.runtime.evaluation import EvaluationService
from areal_ray.runtime.fleet import Fleet, call
from areal_ray.runtime.gateway_config import SessionTerms
from areal_ray.runtime.gateway_list import GatewayList
from areal_ray.runtime.head_watch import HeadWatch
from areal_ray.runtime.placement import EVALUATION, EVALUATION_AGENT, PARAM_SYNC
from areal_ray.runtime.saving import CheckpointService
from areal_ray.runtime.services import (
    AgentService,
    LearnerService,
    RewardService,
    SyncService,
    Tracker,
)
from areal_ray.runtime.session_service import SessionService
from areal_ray.runtime.supervisor import Supervisor
from areal_ray.scaling import (
    Scaling,
    Services,
    scalable,
    scaled_before,
    take_back_gateways,
)
from areal_ray.telemetry.waits import WaitBoard


async def start_rl(
    graph: ActorGraph,
    records: Records,
    waits: WaitBoard,
    ledger: Ledger,
    *,
    admin_key_hash: bytes = b"",
) -> Run:
    """Every actor of a run with rollouts, loaded and introduced to each other; the gateways of
    kind online know the admin key by `admin_key_hash`."""
    recipe, begin = graph.recipe, graph.begin
    assert recipe.admission is not None
    _tell_cautions(recipe, records)
    sync_handle = graph.param_sync()
    learners = graph.learners(recipe.steps)
    rollouts = graph.rollouts("rollout")
    serving = _serving(graph, rollouts, admin_key_hash)
    agents = _agents(graph, rollouts) if serving is None else graph.gateways(serving)
    rewards = graph.rewards() if recipe.scoring is not None else None
    sync = SyncService(sync_handle, patience_s=recipe.deadlines.start_s, tell=records.event)
    evaluation = None if rewards is None else _evaluation(graph, rewards, sync, records.event)
    await _load(graph, sync_handle, learners, rollouts)
    tracker, admission = Tracker(), recipe.admission
    service = _agent_service(graph, agents, tracker)
    fleets = Services(rollouts=rollouts, agents=agents, rewards=rewards, sync=sync)
    elastic = scalable(graph, fleets.of(service), serving, records.event)
    await _take_up_sessions(graph, service, ledger)
    learner = _learner_service(recipe, learners)
    run = Run(
        steps=recipe.steps,
        step=begin.step,
        version=begin.version,
        deadlines=recipe.deadlines,
        groups_s=recipe.deadlines.groups_limit_s(is_online=recipe.parts.serves),
        telemetry=recipe.telemetry,
        admission=admission,
        tasks=_tasks(graph, records.event),
        gate=AdmissionGate(admission, version=begin.version),
        queue=_queue(recipe, admission),
        ledger=ledger,
        guard=FailureGuard(admission),
        comparison=comparison_of(recipe.objective),
        segments=SegmentKeeper(Path(graph.journal)),
        agents=service,
        rewards=_scoring(recipe, rewards, tracker),
        learners=learner,
        sync=sync,
        evaluation=evaluation,
        bounds=_bounds(recipe, learner, sync, evaluation, records),
        checkpoints=_checkpoints(recipe, learner, service),
        supervisor=_supervisor(rollouts, agents, rewards, evaluation),
        records=records,
        waits=waits,
        tracker=tracker,
        secrets=environment_secrets(),
        scaling=Scaling(recipe.folder, elastic, records),
    )
    if begin.state:
        run.load_state_dict(begin.state)
    return run


def _tell_cautions(recipe: Recipe, records: Records) -> None:
    for caution in (*recipe.cautions, scaled_before(recipe)):
        if caution:
            records.event(f"caution: {caution}")


async def _load(graph: ActorGraph, sync: Any, learners: Fleet, rollouts: Fleet) -> None:
    """Every actor is there, and who publishes knows the learner and the rollouts."""
    await graph.wait_until_loaded(learners)
    first = learners.handles[learners.names()[0]]
    await call(PARAM_SYNC, sync.set_members.remote(first, rollouts.handles))


def _supervisor(
    rollouts: Fleet, agents: Fleet, rewards: Fleet | None, evaluation: EvaluationService | None
) -> Supervisor:
    own = evaluation.fleets if evaluation is not None else []
    return Supervisor(rollouts, [agents, *([] if rewards is None else [rewards]), *own])


def _bounds(
    recipe: Recipe,
    learner: LearnerService,
    sync: SyncService,
    evaluation: EvaluationService | None,
    records: Records,
) -> BoundsService | None:
    if not recipe.bounds.judges:
        return None
    return BoundsService(
        recipe.bounds,
        recipe.folder,
        learner,
        sync,
        evaluation,
        last_step=recipe.steps,
        evaluated=records.evaluated,
    )


def _learner_service(recipe: Recipe, learners: Fleet) -> LearnerService:
    config = recipe.learner
    return LearnerService(
        learners,
        num_minibatches=config.ppo_n_minibatches,
        seed=recipe.seed,
        ranks_per_share=config.engine.ranks_per_share,
    )


def _checkpoints(
    recipe: Recipe, learner: LearnerService, service: AgentService | SessionService
) -> CheckpointService:
    """Checkpoints, of which the sessions of kind online hear."""
    if isinstance(service, SessionService):
        return CheckpointService(recipe.folder, recipe.checkpoint, learner, told=service.saved)
    return CheckpointService(recipe.folder, recipe.checkpoint, learner)


def _serving(
    graph: ActorGraph, rollouts: Fleet, admin_key_hash: bytes
) -> Callable[[str], dict[str, Any]] | None:
    """How the gateways are made, where agents outside make the episodes that are trained on."""
    recipe = graph.recipe
    if not recipe.parts.serves:
        return None
    assert recipe.admission is not None
    folder = Path(graph.journal)
    GatewayList.anew(folder, recipe.gateway.replicas).write(folder)
    return graph.gateway_arguments(
        rollouts,
        key_hash=admin_key_hash,
        terms=SessionTerms(
            recipe.admission.scored_samples_needed,
            # With held-out tasks the reward knows their answers, and not what clients asked.
            has_reward_function=recipe.reward is not None and recipe.evaluation is None,
        ),
    )


def _agents(graph: ActorGraph, rollouts: Fleet) -> Fleet:
    return graph.agents("agent", rollouts, graph.recipe.rollout.sampling)


def _agent_service(
    graph: ActorGraph, fleet: Fleet, tracker: Tracker
) -> AgentService | SessionService:
    recipe = graph.recipe
    assert recipe.admission is not None
    if recipe.parts.serves:
        return SessionService(fleet, tracker, max_attempts=recipe.admission.max_attempts)
    n_samples = recipe.admission.n_samples
    return AgentService(fleet, tracker, n_samples=n_samples, seed=recipe.seed)


async def _take_up_sessions(
    graph: ActorGraph, service: AgentService | SessionService, ledger: Ledger
) -> None:
    """Where sessions train, tell the gateways what became of those that the run knows."""
    if not isinstance(service, SessionService):
        return
    for name in service.fleet.names():
        service.urls[name] = (await service.fleet.submit(name, "health")).url
    await take_back_gateways(graph)
    service.go_on(read_ledger(Path(graph.journal)), graph.begin.step)
    ledger.follow(service.follow)


def _tasks(graph: ActorGraph, tell: Callable[[str], None]) -> TaskStream | SlotStream:
    tasks, seed = graph.recipe.tasks, graph.recipe.seed
    if tasks is None:
        return SlotStream()
    fitted = _fitted(graph, tasks, "tasks", tell)
    return TaskStream(fitted, seed=seed, shuffle=tasks.shuffle)


async def start_sft(graph: ActorGraph, records: Records, waits: WaitBoard) -> SftRun:
    """The learner actors of a run on given conversations."""
    sft = graph.recipe.sft
    assert sft is not None
    parts = await _learners_alone(graph, sft.planned_steps)
    run = SftRun(phases=sft.phases, records=records, waits=waits, **parts)
    if graph.begin.state:
        run.load_state_dict(graph.begin.state)
    return run


async def start_pairs(graph: ActorGraph, records: Records, waits: WaitBoard) -> PairRun:
    """The learner actors of a run of kind dpo or reward_model."""
    preference = graph.recipe.preference
    assert preference is not None
    parts = await _learners_alone(graph, preference.steps)
    run = PairRun(config=preference, records=records, waits=waits, **parts)
    if graph.begin.state:
        run.load_state_dict(graph.begin.state)
    return run


async def _learners_alone(graph: ActorGraph, steps: int) -> dict[str, Any]:
    """What a run that samples nothing consists of: fields of a `LearnerRun`."""
    recipe, begin = graph.recipe, graph.begin
    learners = graph.learners(steps)
    await graph.wait_until_loaded(learners)
    learner = LearnerService(learners, num_minibatches=1, seed=recipe.seed)
    return {
        "steps": steps,
        "step": begin.step,
        "version": begin.version,
        "deadlines": recipe.deadlines,
        "learners": learner,
        "checkpoints": CheckpointService(recipe.folder, recipe.checkpoint, learner),
        "rows": RowCursor(recipe.seed),
        "head": HeadWatch(head_patience_s()),
    }


async def start_inference(graph: ActorGraph, records: Records, key: str) -> ServingRun:
    """Rollout actors and the gateways in front of them.

    `key`: what clients have to send; empty = nothing.
    """
    recipe = graph.recipe
    rollouts = graph.rollouts("rollout")
    serving = graph.gateway_arguments(rollouts, key_hash=hash_key(key) if key else b"")
    gateways = graph.gateways(serving)
    await graph.wait_until_loaded(None)
    fleets = Services(rollouts=rollouts, agents=gateways)
    elastic = scalable(graph, fleets, serving, records.event)
    return ServingRun(
        gateways=gateways,
        urls=[(await gateways.submit(name, "health")).url for name in gateways.names()],
        supervisor=Supervisor(rollouts, [gateways]),
        records=records,
        scaling=Scaling(recipe.folder, elastic, records),
        secrets=environment_secrets(),
    )


async def start_eval(graph: ActorGraph, tell: Callable[[str], None]) -> EvaluationService:
    """Rollout, agent and reward actors that score one model."""
    recipe = graph.recipe
    assert recipe.evaluation is not None
    sampling = recipe.evaluation.sampling_for(recipe.rollout.sampling)
    rollouts = graph.rollouts("rollout")
    agents = graph.agents("agent", rollouts, sampling)
    rewards = graph.rewards()
    await graph.wait_until_loaded(None)
    return EvaluationService(
        recipe.evaluation,
        _held_out(graph, tell),
        replica=None,
        agents=agents,
        rewards=rewards,
        sync=None,
        first_version=graph.begin.version,
        seed=recipe.seed,
    )


def comparison_of(objective: ObjectiveConfig) -> Comparison:
    """How the objective compares siblings, for the filter of groups that teach nothing."""
    return Comparison(
        objective.min_reward_spread,
        objective.mask_truncated,
        partial(shape_levels, config=objective.reward_shaping),
    )


def _scoring(recipe: Recipe, rewards: Fleet | None, tracker: Tracker) -> RewardService | None:
    """What scores the episodes that are trained on, in kinds where anything does."""
    return RewardService(rewards, tracker) if rewards is not None and recipe.parts.scores else None


def _evaluation(
    graph: ActorGraph, rewards: Fleet, sync: SyncService, tell: Callable[[str], None]
) -> EvaluationService | None:
    recipe = graph.recipe
    if recipe.evaluation is None:
        return None
    sampling = recipe.evaluation.sampling_for(recipe.rollout.sampling)
    replicas = graph.rollouts(EVALUATION, pinned=True)
    return EvaluationService(
        recipe.evaluation,
        _held_out(graph, tell),
        replica=replicas,
        agents=graph.agents(EVALUATION_AGENT, replicas, sampling),
        rewards=rewards,
        sync=sync,
        first_version=graph.begin.version,
        seed=recipe.seed,
    )


def _fitted(
    graph: ActorGraph, config: TasksConfig, where: str, tell: Callable[[str], None]
) -> Sequence[Task]:
    """The tasks of a section, those with too long a prompt as it says."""
    model_path = graph.begin.model_path
    window = graph.recipe.rollout.engine.max_context_tokens or model_context_tokens(model_path)
    tasks = load_tasks(config, graph.roots, where=where)
    count = prompt_counter(model_path)
    kept = fit_prompts(tasks, config, count, window_tokens=window, where=where)
    if kept.num_dropped or kept.num_cut:
        tell(
            f"{where}: of {len(tasks)} prompts {kept.num_dropped} are left out and {kept.num_cut} "
            f"cut, since they are too long ({where}.overlong = {config.overlong})"
        )
    return kept.tasks


def _held_out(graph: ActorGraph, tell: Callable[[str], None]) -> Sequence[Task]:
    evaluation = graph.recipe.evaluation
    assert evaluation is not None
    return _fitted(graph, evaluation.tasks, "evaluation.tasks", tell)


def ledger_of(recipe: Recipe) -> tuple[Ledger, LedgerJournal]:
    """The run's ledger and the journal behind it."""
    journal = LedgerJournal(recipe.folder / JOURNAL_FOLDER)
    return Ledger(journal.append), journal


def _queue(recipe: Recipe, admission: AdmissionConfig) -> TrajectoryQueue[Any]:
    # Everything in flight may end at once, beside what a step has just left over.
    capacity = admission.unconsumed_groups
    least = recipe.bounds.min_rewarded_sessions
    return TrajectoryQueue(admission, capacity=capacity, least_rewarded=least)
