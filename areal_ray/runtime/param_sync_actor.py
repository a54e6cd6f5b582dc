"""ParamSyncActor: the only writer of the version. A publish is a two-phase commit.

    plan (once) -> stage: learner sends, replicas receive -> verify digests -> swap and prove
        -> commit

A failure before the swap leaves everyone at the old version. A replica that fails is set aside,
named in the report and brought back in a later publish once it answers again; the others go on in
a group of a fresh name. A replica that hangs, or that may have swapped by half, is restarted, so
that it comes back with the last committed weights. One that swapped and cannot prove that it
samples from the learner's weights sends nothing out; it is refreshed from the last committed ones,
and the version is committed only if most agree. Holds no tensor and needs no torch.

Waits: every call to an actor ends at `weights.timeout_s` (and a grace for the answer to travel).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn
from uuid import uuid4

from areal_ray.core.buckets import BucketPlan
from areal_ray.core.canary import Check, Probe, Sent, Swapped
from areal_ray.errors import ArealRayError, PublishError
from areal_ray.runtime.answers import Answers, ask, ask_all
from areal_ray.runtime.canary_vote import CanaryVote, check_of
from areal_ray.runtime.candidate import take_candidate
from areal_ray.runtime.late_join import catch_up
from areal_ray.runtime.membership import Membership, refusal
from areal_ray.runtime.publish_report import Committed, ParamSyncHealth, Phase, PublishReport
from areal_ray.runtime.roster import Roster
from areal_ray.runtime.weight_files import WeightFile
from areal_ray.runtime.weights_config import WeightsConfig

_GRACE_S = 3.0
"""A member reports its own deadline; only one that is silent beyond this is called hung."""

_BLANK_ATTEMPTS = 2
"""Groups that may break without a member to blame before the publish is given up."""

LEARNER = "learner"


class ParamSyncActor:
    """Moves versions from the learner to the replicas; commits what every survivor swapped in."""

    def __init__(self, config: WeightsConfig, version: int = 0) -> None:
        """`version` is that of the model each replica starts with; nothing was published yet."""
        self._config = config
        self._limit_s = config.timeout_s + _GRACE_S
        self._learner: Any = None
        self._roster = Roster({})
        self._membership: Membership | None = None
        self._address = ""
        self._plan: BucketPlan | None = None
        self._committed = Committed(version)
        self._probe: Probe | None = None
        self._vote = CanaryVote(self._limit_s, self._settled)
        self._publishing, self._snapshotting = asyncio.Lock(), asyncio.Lock()
        self._phase = Phase()

    async def set_members(self, learner: Any, replicas: Mapping[str, Any]) -> None:
        """Who publishes (rank 0's handle) and who receives (handles by name), from now on."""
        async with self._publishing:
            if learner is not self._learner:
                self._address, self._plan = "", None
            self._learner, self._membership = learner, None
            self._roster.close()
            self._roster = Roster(replicas)

    async def change_replicas(self, joining: Mapping[str, Any], leaving: Sequence[str]) -> None:
        """Between two publishes: those that come get the committed version, those that go are
        asked no more. Raises ArealRayError where one that comes does not take it."""
        async with self._publishing:
            for name, replica in joining.items():
                await catch_up(name, replica, await self.committed(), self._limit_s)
            self._roster.change(joining, leaving)

    async def version(self) -> int:
        """The committed version."""
        return self._committed.version

    async def health(self) -> ParamSyncHealth:
        """Answers at once, also during a publish."""
        return ParamSyncHealth(
            self._committed.version,
            tuple(self._roster.present()),
            dict(self._roster.aside),
            self._phase.told(),
        )

    async def publish(self, version: int) -> PublishReport:
        """Bring the learner's present weights to every replica as `version`, then commit it.

        Raises:
            PublishError: The learner failed, no replica could be updated, or the version is not
                the next one. The committed version is unchanged and staged weights are discarded.
        """
        await self._vote.recount(self._roster, version)
        async with self._publishing:
            if version != self._committed.version + 1:
                raise PublishError(
                    f"publish: version {version}; must be {self._committed.version + 1}, the one "
                    "after the committed version"
                )
            try:
                return await self._publish(version)
            finally:
                self._phase = Phase()

    async def candidate(self, version: int) -> Committed:
        """The learner's present weights, to be judged before they are published."""
        async with self._publishing:
            return await take_candidate(self._learner, self._config, version)

    async def committed(self) -> Committed:
        """The committed version and, once something was published, its bytes.

        Raises:
            DeadlineExceeded: The learner did not hand its snapshot out in time.
        """
        async with self._snapshotting:
            held = self._committed
            if held.plan is None or held.snapshot:
                return held
            payload = await self._snapshot(held.plan, held.version)
            complete = replace(held, snapshot=(payload,))
            if self._committed is held:  # no newer version was committed meanwhile
                self._committed = complete
            return complete

    async def _publish(self, version: int) -> PublishReport:
        started_s = time.perf_counter()
        if self._learner is None:
            raise PublishError("publish: no learner is known. Call set_members first")
        if self._plan is None:
            config = self._config
            self._phase.enter("plan")
            self._plan = await self._ask_learner("weights_plan", config.bucket_bytes, config.dtype)
        self._roster.readmit()
        if self._config.transport == "collective":
            staged, payload = await self._stage_collective(self._plan, version)
        else:
            staged, payload = await self._stage_payload(self._plan, version)
        stage_s = time.perf_counter() - started_s
        check = check_of(self._config, self._probe)
        swapped = await self._swap(staged, version, check)
        swap_s = time.perf_counter() - started_s - stage_s
        self._committed = Committed(version, self._plan, payload, check)
        return PublishReport(
            version=version,
            seconds=time.perf_counter() - started_s,
            stage_s=stage_s,
            swap_s=swap_s,
            bytes=self._plan.total_bytes,
            swapped=swapped,
            quarantined=dict(self._roster.aside),
            events=self._roster.take_news(),
        )

    async def _stage_collective(
        self, plan: BucketPlan, version: int
    ) -> tuple[list[str], tuple[Any, ...]]:
        """Who staged it, and the snapshot if one is taken; anew with the survivors on a failure."""
        blanks = 0
        while True:
            names = self._roster.needed(version)
            answers = await self._form(names)
            is_staged = not answers.failed
            if is_staged:
                answers = await self._transfer(plan, version, names)
            culprits = answers.culprits()
            await self._blame(culprits, version)
            good = [name for name in names if name in answers.good]
            # Where nobody failed because of a culprit, what the others hold is whole.
            if is_staged and not answers.has_victims() and (good or not names):
                break
            self._membership = None
            blanks += not culprits
            if blanks >= _BLANK_ATTEMPTS:
                await self._abandon(version, answers.listed())
        if self._config.snapshot == "lazy":
            return good, ()
        # Before the swap: nothing that can fail may stand between the swap and the commit.
        return good, (await self._snapshot_or_abandon(plan, version),)

    async def _transfer(self, plan: BucketPlan, version: int, names: list[str]) -> Answers:
        """Digests by member, of one attempt in the present group."""
        self._phase.enter("stage")
        sending = self._learner.weights_send.remote(plan, version)
        calls = self._roster.calls(names, "weights_stage", plan, version)
        answers = await ask_all({LEARNER: sending, **calls}, "weights_stage", self._limit_s)
        if LEARNER in answers.good:
            answers.good[LEARNER] = self._noted(answers.good[LEARNER])
        answers.compare(LEARNER)
        return answers

    def _noted(self, sent: Sent) -> list[str]:
        """The digests of what was sent; its probe is kept for the swap."""
        self._probe = sent.probe
        return sent.digests

    async def _form(self, names: list[str]) -> Answers:
        """Join all into a group of a fresh name, unless the present one has these members."""
        members = (LEARNER, *names)
        if self._membership is not None and self._membership.members == members:
            return Answers()
        self._phase.enter("join")
        self._membership = None
        name = f"weights-{uuid4().hex[:12]}"
        membership = Membership.of(name, members, self._config)
        if not self._address:
            address = await self._ask_learner("weights_join", membership, 0)
            if not address:
                raise PublishError("learner: weights_join gave no address; must be host:port")
            self._address = address
        membership = membership.at(self._address)
        handles = [self._learner, *(self._roster.handles[name] for name in names)]
        calls = {
            member: handle.weights_join.remote(membership, rank)
            for rank, (member, handle) in enumerate(zip(members, handles, strict=True))
        }
        answers = await ask_all(calls, "weights_join", self._limit_s)
        if not answers.failed:
            self._membership = membership
        return answers

    async def _stage_payload(
        self, plan: BucketPlan, version: int
    ) -> tuple[list[str], tuple[Any, ...]]:
        """Through the object store: each replica reads the one payload by itself."""
        names = self._roster.needed(version)
        self._phase.enter("stage")
        digests = self._noted(await self._ask_learner("weights_send", plan, version))
        payload = await self._snapshot_or_abandon(plan, version)
        calls = self._roster.calls(names, "weights_load", plan, version, [payload])
        answers = await ask_all(calls, "weights_load", self._limit_s)
        answers.good[LEARNER] = digests
        answers.compare(LEARNER)
        await self._blame(answers.failed, version)
        self._roster.needed(version)
        return [name for name in names if name not in answers.failed], (payload,)

    async def _swap(self, staged: list[str], version: int, check: Check) -> dict[str, Swapped]:
        self._phase.enter("swap")
        try:
            return await self._vote.swap(self._roster, staged, version, check)
        finally:
            if not self._roster.aside.keys().isdisjoint(staged):
                self._membership = None

    async def _settled(self) -> Committed:
        """What is committed once the publish under way has ended, with its snapshot."""
        async with self._publishing:
            pass
        return await self.committed()

    async def _snapshot(self, plan: BucketPlan, version: int) -> Any:
        """Reference to the sealed bytes, as returned by the learner: owned here. Or a file."""
        payload = self._learner.weights_snapshot.remote(plan, version)
        answer = await ask(LEARNER, payload, "weights_snapshot", self._limit_s)
        return answer if isinstance(answer, WeightFile) else payload

    async def _snapshot_or_abandon(self, plan: BucketPlan, version: int) -> Any:
        try:
            return await self._snapshot(plan, version)
        except ArealRayError as error:
            await self._abandon(version, str(error))

    async def _ask_learner(self, verb: str, *args: Any) -> Any:
        """One verb of the learner; its failure is the publish's."""
        answer = getattr(self._learner, verb).remote(*args)
        try:
            return await ask(LEARNER, answer, verb, self._limit_s)
        except ArealRayError as error:
            raise PublishError(refusal(self._committed.version + 1, str(error))) from error

    async def _blame(self, culprits: Mapping[str, ArealRayError], version: int) -> None:
        """Set culprits aside, restart the hung ones; the learner's failure ends the publish."""
        for name, error in culprits.items():
            self._membership = None
            if name != LEARNER:
                self._roster.blame(name, error)
        if LEARNER in culprits:
            await self._abandon(version, str(culprits[LEARNER]))

    async def _abandon(self, version: int, reason: str) -> NoReturn:
        """Have everyone discard what was staged, and give this publish up."""
        self._membership = None
        calls = self._roster.calls(self._roster.present(), "weights_discard")
        await ask_all(calls, "weights_discard", self._limit_s)
        raise PublishError(refusal(version, reason))
