"""RunHistory: the curves and the pace that a progress display shows."""

import time
from collections.abc import Callable

from areal_ray.telemetry.views import EvalView, Header, StepView

_RECENT_STEPS = 10


class RunHistory:
    """What a display remembers of a run: its curves and the pace of its last steps."""

    def __init__(self, header: Header, clock: Callable[[], float] = time.monotonic) -> None:
        self.header = header
        self.rewards: list[tuple[float, float]] = []
        """(step, reward); the loss where there is no reward."""
        self.evals: list[tuple[float, float]] = []
        """(step, accuracy)"""
        self.last: StepView | None = None
        self._clock = clock
        self._began = clock()
        self._pace: list[float] = []
        self._num_steps = 0

    def add_step(self, view: StepView) -> None:
        """Remember a step."""
        self.last = view
        if self._num_steps == 1:
            self._pace.clear()  # the first step has the start of everything in it
        self._num_steps += 1
        self._pace = [*self._pace[1 - _RECENT_STEPS :], view.step_s]
        value = view.reward if view.reward is not None else view.loss
        if value is not None:
            self.rewards.append((view.step, value))

    def add_eval(self, view: EvalView) -> None:
        """Remember an evaluation."""
        self.evals.append((view.step, view.accuracy))

    @property
    def elapsed_s(self) -> float:
        """Since the display began."""
        return self._clock() - self._began

    @property
    def steps_done(self) -> int:
        """Steps done, those before a resumption included."""
        return self.last.step if self.last else self.header.first_step

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the pace of the last ten; None before the first."""
        if not self._pace:
            return None
        left = max(0, self.header.total_steps - self.steps_done)
        return left * sum(self._pace) / len(self._pace)
