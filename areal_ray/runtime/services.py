"""The four services as the driver sees them: fleets of actors behind a few awaited methods."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray import ObjectRef
from ray.actor import ActorHandle

from areal_ray.algorithms.packing import GroupSize, plan_step
from areal_ray.core.ledger import Lease
from areal_ray.core.queue import Ticket
from areal_ray.core.seeds import derive_seed
from areal_ray.core.summaries import GroupSummary, ScoreSummary
from areal_ray.engines.preference import PairEvaluation
from areal_ray.engines.protocols import StepStats
from areal_ray.engines.sft import SftEvaluation
from areal_ray.errors import ActorLost, EngineError
from areal_ray.runtime.fleet import Fleet, call, unheard
from areal_ray.runtime.membership import NoReplicaLeft
from areal_ray.runtime.publish_report import Committed, PublishReport

_RETRY_S = 1.0
_SCORE_TRIES = 3
_LINGER_S = 0.01
_MOST_GROUPS = 16
"""In one call."""
_QUICK_S = 0.02
_DEATH_S = 5.0
"""Ray tells within it that an actor died."""
_FORGET = 0.9
"""Share of a slow episode's time that is still believed after one more group."""


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where a group in flight is."""

    place: str
    """Actor name."""
    doing: str
    since_s: float

    def __str__(self) -> str:
        return f"{self.place}, {time.monotonic() - self.since_s:.0f} s, in {self.doing}"


class Tracker:
    """Knows where each group in flight is, so that a wait can name who owes it what."""

    def __init__(self) -> None:
        self._at: dict[str, Whereabouts] = {}

    def enter(self, group_id: str, place: str, doing: str) -> None:
        """The group is at `place` from now on."""
        self._at[group_id] = Whereabouts(place, doing, time.monotonic())

    def leave(self, group_id: str) -> None:
        """The group is nowhere any more."""
        self._at.pop(group_id, None)

    def oldest(self) -> tuple[str, Whereabouts] | None:
        """The group that has been at its place for the longest."""
        return min(self._at.items(), key=lambda item: item[1].since_s, default=None)


class AgentService:
    """Agent actors: run the episodes of a group."""

    def __init__(self, fleet: Fleet, tracker: Tracker, *, n_samples: int, seed: int) -> None:
        self.fleet = fleet
        self._tracker = tracker
        self._n_samples = n_samples
        self._seed = seed

    async def run_group(self, lease: Lease) -> tuple[GroupSummary, ObjectRef]:
        """All sibling episodes of one task; the payload stays where it was made.

        Raises:
            ActorLost: The agent actor, or a rollout it could not do without, died.
        """
        seed = derive_seed(self._seed, lease.epoch, lease.task.id, lease.attempt)
        try:
            self._tracker.enter(lease.group_id, "agent", "restart")
            member = await self.fleet.least_busy()
            self._tracker.enter(lease.group_id, member, "episodes")
            return await self.fleet.submit_payload(
                member, "run_group", lease.task, lease.group_id, self._n_samples, seed
            )
        finally:
            self._tracker.leave(lease.group_id)

    def dump(self, payloads: Sequence[ObjectRef], step: int) -> None:
        """Have the first agent actor write these groups' episodes down; nobody waits for it."""
        first = self.fleet.names()[0]  # one writer a file
        self.fleet.handles[first].dump_episodes.remote(list(payloads), step)


class _Batch:
    """Groups that go to a reward actor in one call."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.payloads: list[ObjectRef] = []
        self.call: asyncio.Future[tuple[Sequence[ScoreSummary], Sequence[ObjectRef]]]

    def add(self, lease: Lease, payload: ObjectRef) -> int:
        """The group's place in the call."""
        self.leases.append(lease)
        self.payloads.append(payload)
        return len(self.leases) - 1


class RewardService:
    """Reward actors: score a group's episodes and write the group to the journal.

    A call costs more than a quick reward does, so where the reward has been quick of late, groups
    that end within `_LINGER_S` of each other share one. A slow one would hold up the others.
    """

    def __init__(self, fleet: Fleet, tracker: Tracker) -> None:
        self.fleet = fleet
        self._tracker = tracker
        self._slowest_s = math.inf  # of one episode, lately; inf = none was scored yet
        self._open: _Batch | None = None

    async def score_group(self, lease: Lease, payload: ObjectRef) -> tuple[ScoreSummary, ObjectRef]:
        """The same group with rewards.

        Raises:
            ActorLost: The reward actor died, or the payload died with its node.
        """
        try:
            with suppress(ActorLost):  # the same answer each time, so it may be asked again
                return await (
                    self._score_with_others(lease, payload)
                    if self._slowest_s < _QUICK_S
                    else self._score_alone(lease, payload)
                )
            for _ in range(_SCORE_TRIES - 2):
                with suppress(ActorLost):
                    return await self._score_alone(lease, payload)
            return await self._score_alone(lease, payload)
        finally:
            self._tracker.leave(lease.group_id)

    async def _score_alone(
        self, lease: Lease, payload: ObjectRef
    ) -> tuple[ScoreSummary, ObjectRef]:
        batch = _Batch()
        batch.add(lease, payload)
        (summary,), (scored,) = await self._send(batch)
        return summary, scored

    async def _score_with_others(
        self, lease: Lease, payload: ObjectRef
    ) -> tuple[ScoreSummary, ObjectRef]:
        batch = self._open
        if batch is None:
            batch = self._open = _Batch()
            batch.call = unheard(self._send_soon(batch))
        place = batch.add(lease, payload)
        if len(batch.leases) == _MOST_GROUPS:
            self._open = None
        self._tracker.enter(lease.group_id, "reward", "the next call")
        summaries, payloads = await asyncio.shield(batch.call)
        return summaries[place], payloads[place]

    async def _send_soon(self, batch: _Batch) -> tuple[Sequence[ScoreSummary], Sequence[ObjectRef]]:
        await asyncio.sleep(_LINGER_S)
        if self._open is batch:
            self._open = None
        return await self._send(batch)

    async def _send(self, batch: _Batch) -> tuple[Sequence[ScoreSummary], Sequence[ObjectRef]]:
        for lease in batch.leases:
            self._tracker.enter(lease.group_id, "reward", "restart")
        member = await self.fleet.least_busy()
        for lease in batch.leases:
            self._tracker.enter(lease.group_id, member, "reward")
        tasks = [lease.task for lease in batch.leases]
        summaries, payloads = await self.fleet.submit_payloads(
            member, "score_many", len(tasks), tasks, *batch.payloads
        )
        for summary in summaries:
            believed = self._slowest_s * _FORGET if self._slowest_s < math.inf else 0.0
            self._slowest_s = max(summary.slowest_s, believed)
        return summaries, payloads


class LearnerService:
    """Learner actors: the ranks of one train engine, always called together."""

    def __init__(
        self, fleet: Fleet, *, num_minibatches: int, seed: int, ranks_per_share: int = 1
    ) -> None:
        self.fleet = fleet
        self._num_minibatches = num_minibatches
        self._ranks_per_share = ranks_per_share
        self._seed = seed

    async def train_step(
        self, tickets: Sequence[Ticket[ObjectRef]], *, version: int, oldest_version: int
    ) -> StepStats:
        """One step on these groups; each rank fetches only its own share."""
        sizes = [GroupSize(ticket.num_tokens) for ticket in tickets]
        plan = plan_step(
            sizes,
            num_minibatches=self._num_minibatches,
            num_ranks=len(self.fleet.handles) // self._ranks_per_share,
            seed=derive_seed(self._seed, "step", version),
        )
        calls = []
        for rank, name in enumerate(self.fleet.names()):
            # References inside a list stay references: the rank itself fetches the bytes.
            share = [
                [(tickets[i].ref, tickets[i].place) for i in indices]
                for indices in plan.of_rank(rank // self._ranks_per_share)
            ]
            calls.append(self.fleet.submit(name, "train_step", share, version, oldest_version))
        stats: list[StepStats] = await _all_or_first_error(calls)
        return stats[0]

    async def sft_step(self, phase: int, first: int) -> StepStats:
        """One supervised step on the rows of a phase from `first` on; each rank draws its own."""
        return (await self._all("sft_step", phase, first))[0]

    async def sft_evaluate(self, phase: int) -> SftEvaluation:
        """Teacher-forced scores on the held-out examples of a phase."""
        return (await self._all("sft_evaluate", phase))[0]

    async def pair_step(self, first: int) -> StepStats:
        """One step on the pairs from `first` on; each rank draws its own slice of the batch."""
        return (await self._all("pair_step", first))[0]

    async def pair_evaluate(self) -> PairEvaluation:
        """How well held-out pairs are told apart."""
        return (await self._all("pair_evaluate"))[0]

    async def save(self, folder: str) -> None:
        """Model, optimizer and random state into an existing folder."""
        await self._all("save", folder)

    async def restore(self, folder: str) -> None:
        """Go back to what `save` left in a folder."""
        await self._all("restore", folder)

    async def export(self, folder: str) -> None:
        """A Hugging Face checkpoint into an existing folder."""
        await self._all("export", folder)

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await _all_or_first_error(
            [self.fleet.submit(name, method, *args) for name in self.fleet.names()]
        )


async def _all_or_first_error(calls: Sequence[Any]) -> list[Any]:
    """Await ranks that work in step; the first that fails ends the wait for the others.

    Without it the others would sit in a collective until its time-out, hiding the cause. A rank
    that dies breaks the others' exchange before Ray hears of it: its death is what is told.
    """
    tasks = [unheard(one) for one in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except EngineError:
        await asyncio.wait(tasks, timeout=_DEATH_S)
        for task in tasks:
            if task.done() and isinstance(task.exception(), ActorLost):
                task.result()
        raise
    finally:
        for task in tasks:
            task.cancel()


class SyncService:
    """The weight-update service."""

    def __init__(
        self, handle: ActorHandle, *, patience_s: float, tell: Callable[[str], None]
    ) -> None:
        """`patience_s`: how long a publish waits for a replica to come back if none is left."""
        self.handle = handle
        self._patience_s = patience_s
        self._tell = tell

    async def publish(self, version: int) -> PublishReport:
        """Bring every rollout to `version`. With no replica left, wait for Ray to restart one.

        Raises:
            PublishError: The version was not committed.
            ActorLost: The learner or this service died.
        """
        deadline = time.monotonic() + self._patience_s
        is_told = False
        while True:
            try:
                return await call("param-sync", self.handle.publish.remote(version))
            except NoReplicaLeft as error:
                if time.monotonic() > deadline:
                    raise
                if not is_told:
                    self._tell(f"publish waits for a rollout to come back ({error})")
                    is_told = True
                await asyncio.sleep(_RETRY_S)

    async def change_replicas(
        self, joining: Mapping[str, ActorHandle], leaving: Sequence[str]
    ) -> None:
        """Replicas that get the committed version and take part in publishes from now on, and
        those that do so no more."""
        await call("param-sync", self.handle.change_replicas.remote(joining, leaving))

    async def candidate(self, version: int) -> Committed:
        """The learner's present weights, before they become this version or are given up."""
        return await call("param-sync", self.handle.candidate.remote(version))

    async def committed(self) -> Committed:
        """The version in force and, where there is one, its snapshot."""
        return await call("param-sync", self.handle.committed.remote())
