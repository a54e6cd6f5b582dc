"""Waiting for a run in a terminal: Ctrl-C or SIGTERM stops it, a second one ends the process."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from areal_ray.errors import ArealRayError
from areal_ray.handle import RunHandle

STOPS = frozenset((signal.SIGINT, signal.SIGTERM))

_POLL_S = 0.1

Tell = Callable[[str], None]


@contextmanager
def stops_pending() -> Iterator[None]:
    """Signals that stop a run stay pending until `follow` takes them.

    Blocked before the run's threads are there, which inherit it: Ray puts a handler of its own in
    place, that would end the process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow(handle: RunHandle, *, tell: Tell, complain: Tell) -> int:
    """Wait for a run; the exit code.

    Args:
        handle: The run.
        tell: Takes what somebody has to read where the run shows nothing itself.
        complain: Takes what goes to stderr.
    """
    asked: list[int] = []
    is_told = not handle.recipe.parts.serves
    while True:
        if not is_told and handle.gateway is not None:
            is_told = True
            handle.tell(handle.gateway.lines())
            if handle.recipe.telemetry.console == "off":
                tell(handle.gateway.lines())
        taken = signal.sigtimedwait(STOPS, _POLL_S)
        if taken is not None:
            if asked:
                os._exit(128 + taken.si_signo)
            asked.append(taken.si_signo)
            handle.stop()
            complain("stopping; once more to end at once")
        try:
            summary = handle.wait(0.0)
        except TimeoutError:
            continue
        except ArealRayError as error:
            if handle.recipe.telemetry.console == "off":
                raise
            return error.exit_code  # the display has told it
        if asked:
            return 128 + asked[0]
        return 0 if summary.outcome == "finished" else 1
