"""The thread of a generation engine: steps while there is work, stands still while paused.

Owned by the torch generation engine, which says what a step is. It waits without using the
processor for: work, an errand, `resume` or `close`; unblocked by each of these.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from areal_ray.engines.errands import Errand, Errands
from areal_ray.errors import EngineError

_log = logging.getLogger(__name__)
_CLOSE_DEADLINE_S = 10.0


class EngineLoop:
    """A loop thread and how other threads reach it.

    What is shared with it is read and changed under `changed`.
    """

    def __init__(self, num_threads: int) -> None:
        self.changed = threading.Condition()
        self.errands = Errands()
        self.is_paused = False
        self.is_closed = False
        self._num_threads = num_threads
        self._is_stepping = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        has_work: Callable[[], bool],
        step: Callable[[], None],
        end: Callable[[Exception | None], None],
    ) -> None:
        """Begin; once.

        Args:
            has_work: Whether a step would do something, errands aside; called under `changed`.
            step: One engine step.
            end: Hands everything back, and tells what ended the loop; nothing is called after it.
        """
        if self._thread is not None:
            raise EngineError("torch generation engine: start was called twice; call it once.")
        self._thread = threading.Thread(
            target=self._run, args=(has_work, step, end), name="torch-generation", daemon=True
        )
        self._thread.start()

    def pause(self) -> None:
        """Stop between two steps; returns when it stands still."""
        with self.changed:
            self.is_paused = True
            if threading.current_thread() is not self._thread:
                self.changed.wait_for(lambda: not self._is_stepping)

    def resume(self) -> None:
        """Go on after `pause`."""
        with self.changed:
            self.is_paused = False
            self.changed.notify_all()

    def run(self, errand: Errand) -> Any:
        """Have an errand done between two steps; before `start`, here and now.

        Raises:
            EngineError: It failed, the loop is over, or this is the loop's own thread.
        """
        self.check_caller(errand.name)
        with self.changed:
            self.raise_if_over()
            if self._thread is None:
                with torch.inference_mode():
                    return errand.work()
            self.errands.add(errand)
            self.changed.notify_all()
        return errand.wait()

    def check_caller(self, verb: str) -> None:
        """Raise EngineError on the loop's own thread, which would wait for itself."""
        if threading.current_thread() is self._thread:
            raise EngineError(
                f"torch generation engine: {verb} was called from on_results or on_chunks."
            )

    def do(self, errand: Errand) -> None:
        """Do one that `errands` gave; called by a step."""
        try:
            errand.outcome = errand.work()
        except Exception as error:
            errand.failure = error
            if errand.ends_loop:
                raise
        finally:
            errand.done.set()

    def close(self) -> None:
        """Stop after the current step."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_DEADLINE_S)

    def raise_if_failed(self) -> None:
        """Raise EngineError with what ended the loop, if something did; under `changed`."""
        if self._failure is not None:
            raise EngineError(
                f"torch generation engine: the loop stopped: {type(self._failure).__name__}: "
                f"{self._failure}. Start a new engine."
            ) from self._failure

    def raise_if_over(self) -> None:
        """Raise EngineError if the loop failed or is closed; under `changed`."""
        self.raise_if_failed()
        if self.is_closed:
            raise EngineError("torch generation engine: it is closed. Start a new engine.")

    # -- the loop thread ------------------------------------------------------------------------

    def _run(
        self,
        has_work: Callable[[], bool],
        step: Callable[[], None],
        end: Callable[[Exception | None], None],
    ) -> None:
        failure: Exception | None = None
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            try:
                while self._wait_for(has_work):
                    step()
            except Exception as error:
                _log.exception("torch generation engine: the loop stopped")
                failure = error
            self._mark_over(failure)
            end(failure)

    def _wait_for(self, has_work: Callable[[], bool]) -> bool:
        """Block without using the processor until there is something to do; False = closed."""
        with self.changed:
            self._is_stepping = False
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.is_closed or bool(self.errands) or has_work())
            self._is_stepping = not self.is_closed
            return not self.is_closed

    def _mark_over(self, failure: Exception | None) -> None:
        with self.changed:
            self._failure = failure
            self.is_closed = True
            self._is_stepping = False
            self.errands.end(failure or EngineError("the engine was closed"))
            self.changed.notify_all()
