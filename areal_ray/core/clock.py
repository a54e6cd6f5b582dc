"""Time for deadlines that outlive a process: a machine's clock may be set while they run."""

import time
from collections.abc import Callable


class SteadyClock:
    """Seconds since the epoch, as the machine's clock said when this one was made; from then on
    nobody sets it forward or back.

    Args:
        wall: Seconds since the epoch.
        steady: Seconds since any moment; never goes back.
    """

    def __init__(
        self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._steady = steady
        self._ahead_s = wall() - steady()

    def __call__(self) -> float:
        """Now."""
        return self._ahead_s + self._steady()


steady_time = SteadyClock()
"""This process's."""
