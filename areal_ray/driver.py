"""READ ME FIRST: the loops of a run. Only tickets and summaries pass through here, no tensors.

    produce   tasks -> gate -> one collect() per admitted task
              waits for headroom; unblocked by a commit, a drop or a failure
    collect   one task -> AgentActor (episodes) -> RewardActor (scores) -> ledger -> queue
              waits for the two actors; bounded by their own time limits
    learn     queue -> LearnerActors (one step) -> ParamSyncActor (publish) -> gate opens
              waits for groups_per_step groups young enough; unblocked by collect()
    hold      what a step made -> judged before a rollout gets it, replaced by the last good weights
              where it breaks a bound of the recipe; waits for one evaluation
    evaluate  a committed version -> held-out tasks on a replica of its own, beside training
              waits for versions pinned by learn()
    watch     actors that died or came back -> why, in a line; one that is gone for good ends it all
              how many there are to be (`areal-ray scale`) -> more of them, or fewer

Every admitted group ends once (core/ledger.py): trained, dropped or failed. When an actor dies,
collect() sees it as ActorLost: the group fails, its task goes back to the stream, its admission
back to the gate; Ray restarts the actor, and a rollout catches up from the last committed weights
before it samples. Nothing else has to be told. A loop that raises ends the run with that error.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from areal_ray.core.ledger import Lease
from areal_ray.core.queue import Ticket
from areal_ray.core.verdict import TOO_STALE, judge
from areal_ray.core.versions import oldest_allowed
from areal_ray.engines.protocols import StepStats
from areal_ray.engines.sft import SftEvaluation, SftPhase
from areal_ray.errors import ActorLost, DataError, DeadlineExceeded
from areal_ray.records import Records
from areal_ray.run import PairRun, Run, ServingRun, SftRun
from areal_ray.runtime.head_watch import HeadWatch
from areal_ray.telemetry.log import redact

T = TypeVar("T")
Services = Mapping[str, Mapping[str, str]]
"""How each actor does, by service and name."""


async def train(run: Run) -> None:
    """Run the actor graph until its last step, or until stop is asked for."""
    if run.bounds is not None:
        with run.waits.waiting("learner", "a look at what it begins with"):
            await run.until_stopped(run.bounds.begin(run.version))
    if run.evaluation is not None and run.step == 0 and run.evaluation.is_due(0, run.steps):
        await run.evaluation.pin(0)
    async with asyncio.TaskGroup() as loops:
        producer = loops.create_task(produce(run), name="produce")
        watcher = loops.create_task(watch(run), name="watch")
        evaluator = loops.create_task(evaluate(run), name="evaluate")
        await learn(run)
        producer.cancel()  # groups still in flight are counted, not trained
        if run.evaluation is not None and not run.stopping.is_set():
            with run.waits.waiting("driver", "the last evaluation"):
                await run.evaluation.finish()
                await run.until_stopped(asyncio.shield(evaluator))
        evaluator.cancel()
        watcher.cancel()
    if run.scaling is not None:
        run.scaling.close()
    if not run.stopping.is_set():
        await look(run)  # an actor that came back for the last steps alone is told of too


async def produce(run: Run) -> None:
    """tasks -> gate -> one collect() per task."""
    async with asyncio.TaskGroup() as collecting:
        while True:
            with run.waits.waiting("tasks", "headroom", metric="time/admission_wait_s"):
                await run.gate.admit()
            lease = run.reserve_next()
            collecting.create_task(collect(run, lease), name=f"collect {lease.group_id}")


async def collect(run: Run, lease: Lease) -> None:
    """One task -> one scored group in the queue, or its admission handed back."""
    run.ledger.lease(lease.group_id)
    try:
        made, payload = await run.agents.run_group(lease)
        scored, payload = await run.score(lease, made, payload)
    except ActorLost as lost:
        lost_s = time.monotonic()
        reason = await give_back(run, lease, f"actor lost: {lost}")
        if lease.attempt > 0:  # one death is nobody's fault; who loses its actor again counts
            run.guard.lost(lease.admitted_s, lost_s, reason)
        return
    run.records.collected(made, scored)
    verdict = judge(made, scored, run.admission, run.comparison)
    if verdict.is_failure:
        await fail(run, lease, verdict.reason)
    elif verdict.is_drop:
        run.ledger.drop(lease.group_id, verdict.reason)
        run.records.dropped(verdict.reason)
        await run.queue.forget(lease.group_id)
        await run.gate.fail()
        run.guard.refilled(verdict.reason)
    else:
        await run.queue.put(run.commit(lease, made, scored, payload))
        await run.gate.finish()
        run.guard.succeeded()


async def fail(run: Run, lease: Lease, reason: str) -> None:
    """Give a group back that failed by itself.

    Raises:
        TooManyFailures: Failing has become the rule.
    """
    run.guard.failed(await give_back(run, lease, reason))


async def give_back(run: Run, lease: Lease, reason: str) -> str:
    """End a group without a usable result; its task is tried again unless it used its attempts up,
    and its admission is free for another. Returns the reason without secrets, as it is told."""
    reason = redact(reason, run.secrets)
    run.ledger.fail(lease.group_id, reason)
    run.records.failed(lease, reason)
    if lease.attempt + 1 < run.admission.max_attempts:
        run.tasks.retry(lease.task.id, lease.epoch, lease.attempt)
    await run.queue.forget(lease.group_id)
    await run.gate.fail()
    return reason


async def learn(run: Run) -> None:
    """queue -> learner -> publish, one step after the other."""
    while run.step < run.steps:
        tickets = await take(run)
        if tickets is None:
            return
        run.guard.step_began()
        trained_at, oldest = run.version, oldest_allowed(run.version, run.admission)
        with run.waits.waiting("rollouts", "the learner", metric="time/learner_train_s"):
            stats = await run.bounded(
                run.learners.train_step(tickets, version=trained_at, oldest_version=oldest),
                f"step {run.step + 1} of the learner",
            )
        run.trained(tickets, run.step + 1)
        stats = await hold(run, stats)
        with run.waits.waiting("learner", "the publish", metric="time/learner_publish_s"):
            report = await run.publish(trained_at + 1)
        run.committed(trained_at + 1)
        await run.gate.open_to(run.version)
        run.records.trained(run.step, trained_at, tickets, stats, report, run.gauges())
        run.dump_episodes(tickets)
        if report is None:
            return
        if run.evaluation is not None and run.evaluation.is_due(run.step, run.steps):
            await run.evaluation.pin(run.step)
        with run.waits.waiting("learner", "a checkpoint", metric="time/learner_checkpoint_s"):
            await run.checkpoints.save_if_due(run)


async def hold(run: Run, stats: StepStats) -> StepStats:
    """Hold what a step made to the bounds; where it breaks one, the last good weights come back
    and are what is published. The step's stats with what was measured.

    Raises:
        PromotionRefused: The recipe has the run end here.
    """
    if run.bounds is None:
        return stats
    step = run.step + 1
    with run.waits.waiting("learner", "the verdict on it", metric="time/learner_judge_s"):
        reason = await run.until_stopped(run.bounds.judge(step, stats.metrics))
        if reason is None:
            reason = "stop was asked for before it was judged"
        if reason:
            good = await run.bounded(run.bounds.roll_back(), "the roll-back")
            run.rolled_back(step, good, reason)
            if not run.stopping.is_set():
                run.bounds.check_refusals(step, reason)
    return replace(stats, metrics={**stats.metrics, **run.bounds.measured})


async def take(run: Run) -> list[Ticket[Any]] | None:
    """The groups of one step, or None when stop was asked for. Groups too old for it are dropped
    and their admissions handed back, so that others take their place."""
    deadline = None if run.groups_s is None else time.monotonic() + run.groups_s
    while deadline is None or time.monotonic() < deadline:
        with run.waits.waiting("learner", run.describe_wait, metric="time/learner_wait_s"):
            taken = await run.until_stopped(run.queue.take(run.version), deadline)
        if run.stopping.is_set():
            return None
        if taken is None:
            break
        for ticket in taken.dropped:
            run.drop(ticket, TOO_STALE)
        await run.gate.release(len(taken.dropped))
        if taken.tickets:
            return taken.tickets
    raise DeadlineExceeded(
        f"step {run.step + 1}: the learner waited {run.groups_s:g} s for "
        f"{run.describe_wait()}. Raise deadlines.groups_s if that is normal"
    )


async def evaluate(run: Run) -> None:
    """Pinned versions -> held-out scores, without holding up the other loops."""
    if run.evaluation is None:
        return
    async for pinned in run.evaluation.pinned():
        try:
            run.records.evaluated(await run.evaluation.score(pinned))
        except ActorLost as lost:  # training goes on; the missing point is told
            run.records.event(f"evaluation of version {pinned.committed.version} is lost: {lost}")


async def watch(run: Run | ServingRun) -> None:
    """Tell what each role waits for, and which actors died or came back."""
    while True:
        gone = await look(run)
        if gone:
            raise ActorLost(gone)
        if run.scaling is not None:
            run.scaling.look()
        await asyncio.sleep(run.watch_every_s)


async def look(run: Run | ServingRun) -> str:
    """One round of `watch`; which actor died for good and why, empty while all can come back."""
    seen = await run.supervisor.look()
    for event in seen.events:
        run.records.event(redact(event, run.secrets))
    run.records.returned(seen.returns)
    run.records.fleet(seen.reading)
    sizes = {} if run.scaling is None else run.scaling.sizes()
    run.records.status(run.counts(seen), run.services(seen), sizes)
    return redact(seen.gone, run.secrets)


async def serve(run: ServingRun) -> None:
    """kind: inference. Gateways answer without the driver, which looks after them until it is
    cancelled."""
    try:
        await watch(run)
    finally:
        await run.close()


async def fit(run: SftRun) -> None:
    """kind: sft, and distill on given conversations. Phases of supervised steps on the learner
    actors; no rollouts, no versions."""
    await telling(run.records, run.head, take_phases(run), run.progress, run.watch_every_s)


async def take_phases(run: SftRun) -> None:
    """Phase after phase, those left out that ended before the run was resumed."""
    for index, phase in enumerate(run.phases):
        if run.has_ended(index):
            continue
        begins_at, seen = run.steps_before(index), None
        if phase.is_look_due(run.step - begins_at):  # resumed there: by it the run went on or not
            seen = await look_at(run, index)
        while not phase.is_finished(run.step - begins_at, seen):
            if run.stopping.is_set():
                return
            taken = run.step - begins_at
            step = run.learners.sft_step(index, run.rows.taken)
            stats = await run.awaited(step, f"step {run.step + 1} of the learner")
            run.step += 1
            run.rows.taken += phase.batch_size
            run.records.fitted(run.step, stats)
            if phase.is_look_due(taken + 1):
                seen = await look_at(run, index)
                run.records.event(f"step {run.step}: {phase.described(seen)}")
            await save(run)
        run.end_phase()
        check_reached(index, phase, seen)


async def look_at(run: SftRun, phase: int) -> SftEvaluation:
    """How well held-out conversations of a phase are reproduced."""
    return await run.awaited(run.learners.sft_evaluate(phase), "a look at held-out conversations")


async def prefer(run: PairRun) -> None:
    """kind: dpo and reward_model. Steps on pairs of answers on the learner actors."""
    await telling(run.records, run.head, take_pairs(run), run.progress, run.watch_every_s)


async def take_pairs(run: PairRun) -> None:
    """Step after step, with looks at held-out pairs between."""
    if run.step == 0:
        await compare(run)
    while run.step < run.steps and not run.stopping.is_set():
        step = run.learners.pair_step(run.rows.taken)
        stats = await run.awaited(step, f"step {run.step + 1} of the learner")
        run.step += 1
        run.rows.taken += run.config.batch_size
        run.records.fitted(run.step, stats)
        await compare(run)
        await save(run)


async def compare(run: PairRun) -> None:
    """Look at held-out pairs, if it is time to."""
    if run.config.is_look_due(run.step):
        seen = await run.awaited(run.learners.pair_evaluate(), "a look at held-out pairs")
        run.records.compared(run.step, seen)


async def save(run: SftRun | PairRun) -> None:
    """Write a checkpoint, if it is time to."""
    with run.waits.waiting("driver", "a checkpoint"):
        await run.checkpoints.save_if_due(run)


async def telling(
    records: Records,
    head: HeadWatch,
    work: Awaitable[T],
    services: Callable[[], Services],
    every_s: float = 1.0,
) -> T:
    """Await the work of a run without a `watch`; what it waits for is told meanwhile.

    Raises:
        ActorLost: Ray's head is gone, in a group with what else failed.
    """

    async def tell() -> None:
        while True:
            records.status({}, services())
            news = await head.look()
            if news.event:
                records.event(news.event)
            if news.gone:
                raise ActorLost(news.gone)
            await asyncio.sleep(every_s)

    async with asyncio.TaskGroup() as beside:
        teller = beside.create_task(tell(), name="tell")
        try:
            return await work
        finally:
            teller.cancel()


def check_reached(index: int, phase: SftPhase, seen: SftEvaluation | None) -> None:
    """Refuse to go on from a phase that did not teach what the next one builds on.

    Raises:
        DataError: The phase used up max_steps without meeting `until`.
    """
    if phase.until is None or seen is None:
        return
    reached = seen.match_of(phase.until.span)
    if reached < phase.until.exact_match:
        raise DataError(
            f"sft.phases.{index}: exact match on held-out examples is {reached:.2f} after "
            f"max_steps = {phase.max_steps}; until.exact_match = {phase.until.exact_match:g} is "
            "what the next phase needs. Raise max_steps, or change the data or learning rate"
        )
