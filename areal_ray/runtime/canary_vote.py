"""The last phase of a publish: replicas swap, prove what they swapped in, and so vote on it.

Waits: for each replica's answer up to `limit_s`; for those of a vote that was lost before, until
they are refreshed or restarted, which the same limit bounds.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from areal_ray.core.canary import Check, Probe, Swapped, is_carried
from areal_ray.errors import PublishError
from areal_ray.runtime.answers import ask_all
from areal_ray.runtime.late_join import bring_committed
from areal_ray.runtime.membership import NoReplicaLeft, refusal
from areal_ray.runtime.publish_report import Committed
from areal_ray.runtime.roster import Roster
from areal_ray.runtime.weights_config import WeightsConfig


def check_of(config: WeightsConfig, probe: Probe | None) -> Check:
    """What replicas have to prove that swap in the weights of which the learner took a probe."""
    canary = config.canary
    if not canary.probe_tokens:
        probe = None
    elif probe is not None and config.dtype:  # what arrives is rounded to it
        probe = replace(probe, dtypes=(*probe.dtypes, config.dtype))
    return Check(probe, canary.tensors, canary.logprob_tolerance)


class CanaryVote:
    """Has replicas swap, and says whether what they found carries the version."""

    def __init__(self, limit_s: float, settled: Callable[[], Awaitable[Committed]]) -> None:
        """`settled` gives what is committed once the publish under way has ended."""
        self._limit_s = limit_s
        self._settled = settled
        self._lost: int | None = None
        """The last version that was voted down."""

    async def swap(
        self, roster: Roster, staged: list[str], version: int, check: Check
    ) -> dict[str, Swapped]:
        """Account of each replica that swapped, also of those whose proof failed.

        Raises:
            NoReplicaLeft: None swapped, or most differ; a later try may do better.
            PublishError: Most of them differ, for the second time.
        """
        calls = roster.calls(staged, "weights_swap", version, check)
        answers = await ask_all(calls, "weights_swap", self._limit_s)
        for name, error in answers.failed.items():
            # It may have loaded some tensors and not others: it must not sample again like that.
            roster.restart(name, error)
        swapped: dict[str, Swapped] = {n: answers.good[n] for n in staged if n in answers.good}
        if roster.handles and not swapped:
            raise NoReplicaLeft(refusal(version, f"none swapped; {answers.listed()}"))
        differing = {n: each.proof for n, each in swapped.items() if each.proof.difference}
        for name, proof in differing.items():
            reason = f"{name} at version {version}: {proof.difference}"
            roster.refresh(name, reason, partial(self._refresh, name, roster.handles[name]))
        if differing and not is_carried(len(swapped) - len(differing), len(roster.refreshing)):
            listed = "; ".join(f"{name}: {proof.difference}" for name, proof in differing.items())
            self._refuse(
                version,
                f"{len(differing)} of {len(swapped)} replicas do not sample from the learner's "
                f"weights ({listed})",
            )
        return swapped

    async def recount(self, roster: Roster, version: int) -> None:
        """Before another try at a version that was voted down: let its voters be refreshed."""
        if self._lost == version:
            await roster.until_refreshed()

    def _refuse(self, version: int, reason: str) -> None:
        if self._lost == version:
            raise PublishError(f"{refusal(version, reason)}. It was so twice; see weights.canary")
        self._lost = version
        raise NoReplicaLeft(refusal(version, reason))

    async def _refresh(self, name: str, replica: Any) -> None:
        """Bring the committed weights to a replica that has others.

        Raises:
            ArealRayError: It did not take them, or differs with them, too.
        """
        committed = await self._settled()
        if committed.plan is None:
            raise PublishError(f"{name} differed at the first publish: there is no snapshot yet")
        await bring_committed(name, replica, committed, self._limit_s)
