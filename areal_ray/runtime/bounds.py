"""BoundsService: judges what a step made before a rollout gets it, and brings good weights back.

A candidate goes to the evaluation replica alone, as a snapshot; the fleet keeps its version
meanwhile. Good weights lie in the run folder with their optimizer, as checkpoints do.
judge waits for: the evaluation of one candidate. roll_back: for the learner's ranks to load.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from areal_ray.checkpoint import Checkpoints
from areal_ray.core.bounds import BoundsConfig, GoodVersion, GoodVersions
from areal_ray.errors import ActorLost, PromotionRefused, PublishError
from areal_ray.runtime.evaluation import EvaluationResult, EvaluationService
from areal_ray.runtime.publish_report import Committed
from areal_ray.runtime.services import LearnerService, SyncService

GOOD_FOLDER = "good"
"""Of the weights that a run may go back to, in its folder."""
_KEPT = 2


class _Unjudged(Exception):
    """Why a candidate got no score."""


class BoundsService:
    """The bounds of one run, and the weights that kept them."""

    def __init__(
        self,
        config: BoundsConfig,
        folder: Path,
        learners: LearnerService,
        sync: SyncService,
        evaluation: EvaluationService | None,
        *,
        last_step: int,
        evaluated: Callable[[EvaluationResult], None],
    ) -> None:
        """Start nothing.

        Args:
            config: What has to hold.
            folder: Of the run.
            learners: Whose weights are judged and brought back.
            sync: Where a candidate's bytes come from.
            evaluation: Scores candidates; needed for a gate.
            last_step: Its weights are judged whatever `gate.every_steps` says.
            evaluated: Takes the scores of versions that are in force.
        """
        assert config.gate is None or evaluation is not None, "a gate needs held-out tasks"
        self._config = config
        self._kept = Checkpoints(folder / GOOD_FOLDER, _KEPT)
        self._learners = learners
        self._sync = sync
        self._evaluation = evaluation
        self._last_step = last_step
        self._evaluated = evaluated
        self._good = GoodVersions(GoodVersion(0))
        self._refusals = 0
        self.measured: Mapping[str, float] = {}
        """Of the last candidate, for the row of its step."""

    async def begin(self, version: int) -> None:
        """Take what the run begins with for good: there is nothing before it."""
        for left in await asyncio.to_thread(self._kept.steps):
            await asyncio.to_thread(self._kept.remove, left)  # of a run before this resumption
        score = None
        if self._evaluation is not None and self._config.gate is not None:
            result = await self._evaluation.score_committed(version)
            score = self._in_force(result)
        self._good = GoodVersions(GoodVersion(version, score))
        await self._save(version)

    async def judge(self, step: int, metrics: Mapping[str, float]) -> str:
        """Why what `step` made is not to be promoted; empty where it is, and then it is kept.

        Args:
            step: Whose candidate it is, and the version that it would become.
            metrics: What the step measured.
        """
        self.measured = {"bounds/refused_versions": 0.0}
        reason = self._config.kl_refusal(metrics)
        if reason:
            disowned = self._good.disown()
            if disowned is not None:
                await asyncio.to_thread(self._kept.remove, disowned)
            return reason
        gate, result = self._config.gate, None
        if gate is not None:
            if not gate.is_due(step, self._last_step):
                self._good.promote()
                return ""
            try:
                result = await self._score(step, await self._sync.candidate(step))
            except _Unjudged as lost:  # and what is not judged is not promoted
                return str(lost)
            reason = gate.refusal(result.accuracy, self._good.newest.score)
            if reason:
                return reason
        await self._save(step)
        self._good.keep(GoodVersion(step, None if result is None else self._in_force(result)))
        self._refusals = 0
        return ""

    async def roll_back(self) -> int:
        """Have the learner load the last good weights and their optimizer; their version."""
        self.measured = {**self.measured, "bounds/refused_versions": 1.0}
        self._refusals += 1
        folder = self._kept.folder_of(self._good.newest.version)
        await self._learners.restore(str(folder.resolve()))
        return self._good.go_back().version

    def check_refusals(self, step: int, reason: str) -> None:
        """Raises:
        PromotionRefused: The recipe has the run end here.
        """
        where = f"step {step}: what it made is not promoted: {reason}"
        if self._config.on_refusal == "stop":
            raise PromotionRefused(f"{where}; bounds.on_refusal is stop")
        if self._refusals >= self._config.max_refusals:
            raise PromotionRefused(
                f"{where}; that was refusal {self._refusals} in a row, bounds.max_refusals allows "
                "no more. Look at the rewards, lower learner.optimizer.lr, or widen the bound"
            )

    async def _score(self, step: int, candidate: Committed) -> EvaluationResult:
        assert self._evaluation is not None
        try:
            result = await self._evaluation.score_candidate(step, candidate)
        except (ActorLost, PublishError) as lost:
            raise _Unjudged(f"it could not be judged: {lost}") from lost
        self.measured = {**self.measured, "bounds/candidate_accuracy_fraction": result.accuracy}
        return result

    def _in_force(self, result: EvaluationResult) -> float:
        assert self._evaluation is not None
        self._evaluated(result)
        self._evaluation.scored_version = result.version
        return result.accuracy

    async def _save(self, version: int) -> None:
        draft = await asyncio.to_thread(self._kept.begin, version)
        await self._learners.save(str(draft.resolve()))
        await asyncio.to_thread(self._kept.commit, version, {"version": version})
