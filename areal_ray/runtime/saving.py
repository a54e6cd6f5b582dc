"""CheckpointService: has the learner write a checkpoint, and makes it the newest in one rename.

save waits for the learner's ranks; a crash at any moment leaves the previous checkpoint in force.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from areal_ray.checkpoint import CheckpointConfig, Checkpoints
from areal_ray.core.storage import writing
from areal_ray.runtime.services import LearnerService

CHECKPOINTS_FOLDER = "checkpoints"


class Saved(Protocol):
    """What a run must tell to be saved."""

    step: int
    steps: int

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from, as JSON values."""


class CheckpointService:
    """Checkpoints of one run."""

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        learners: LearnerService,
        *,
        told: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`told` is called with the step of each checkpoint that is in force."""
        self._told = told
        self._folder = folder
        self._config = config
        self._learners = learners
        self._checkpoints = Checkpoints(folder / CHECKPOINTS_FOLDER, config.keep)
        self._saved_step = -1

    async def save_if_due(self, run: Saved) -> None:
        """Save after every `every_steps` steps, and after the last."""
        if self._config.is_due(run.step) or run.step == run.steps:
            await self.save(run)

    async def save(self, run: Saved) -> None:
        """Model, optimizer and the run's own state."""
        if run.step in (0, self._saved_step):
            return
        state = run.state_dict()
        draft = await asyncio.to_thread(self._checkpoints.begin, run.step)
        await self._learners.save(str(draft.resolve()))
        await asyncio.to_thread(self._checkpoints.commit, run.step, state)
        self._saved_step = run.step
        self._told(run.step)

    async def export(self, name: str) -> None:
        """The weights as a Hugging Face checkpoint in the run folder, whole or not at all."""
        final, draft = self._folder / name, self._folder / f".writing-{name}"
        with writing(final):
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        await self._learners.export(str(draft.resolve()))
        with writing(final):
            shutil.rmtree(final, ignore_errors=True)
            draft.rename(final)
