"""launch: starts a run in the background and hands out a RunHandle; what every front end calls.

The run lives in a thread of its own with its own event loop, so a notebook cell returns at once and
the command line can watch for Ctrl-C.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_ray.errors import ArealRayError
from areal_ray.gateway_access import GatewayAccess
from areal_ray.preflight import preflight
from areal_ray.recipe import Recipe, load_recipe
from areal_ray.run_folder import RunStatus, read_status
from areal_ray.session import Session
from areal_ray.telemetry.plot import plot
from areal_ray.telemetry.progress import Progress
from areal_ray.telemetry.rows import read_rows
from areal_ray.telemetry.sinks import METRICS_FILE
from areal_ray.telemetry.summary import Summary

_LOOK_S = 0.1


def launch(
    recipe: Recipe | Path | str,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    is_checked: bool = False,
) -> "RunHandle":
    """Start a run and return at once.

    Args:
        recipe: A recipe, or the file it is in.
        overrides: `key=value`, as on the command line.
        resume: Go on from the last checkpoint in the run's folder.
        overwrite: Forget an earlier run in that folder.
        progress: Where to show what happens; by default as telemetry.console says.
        is_checked: The caller has looked at what the recipe names (`preflight`) itself.

    Raises:
        RecipeError: The recipe, or a file it names, is wrong; nothing was started.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    if not is_checked:
        preflight(recipe, resume=resume, overwrite=overwrite)
    session = Session(recipe, resume=resume, overwrite=overwrite, progress=progress)
    handle = RunHandle(session)
    handle.start()
    return handle


class RunHandle:
    """A run that goes on in the background."""

    def __init__(self, session: Session) -> None:
        self.recipe = session.recipe
        self.folder = session.recipe.folder
        self._session = session
        self._summary: Summary | None = None
        self._thread = threading.Thread(target=self._work, name="areal-ray", daemon=True)

    def start(self) -> None:
        """Begin; called once, by `launch`."""
        self._thread.start()

    def tell(self, text: str) -> None:
        """Show something where the run shows what happens, and nowhere else."""
        self._session.tell(text)

    def status(self) -> RunStatus:
        """Whether it runs, the step it is at, and what each role waits for."""
        return read_status(self.folder)

    def metrics(self) -> list[dict[str, Any]]:
        """Every row written so far."""
        return read_rows(self.folder / METRICS_FILE)

    def plot(self) -> str:
        """Reward (or loss) and held-out accuracy by step, drawn as text."""
        rows = self.metrics()
        curves = {}
        for name in ("reward/mean", "learner/loss", "eval/accuracy_fraction"):
            curves[name] = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        if curves["reward/mean"]:
            del curves["learner/loss"]
        drawn = [[name, *plot(c, width=60, height=8)] for name, c in curves.items() if c]
        return "\n".join(line for lines in drawn for line in lines)

    @property
    def gateway(self) -> GatewayAccess | None:
        """Where and with which key it is called; None in kinds that serve nothing, and until it
        serves."""
        return self._session.gateway

    def wait_for_gateway(self, timeout_s: float = 600.0) -> GatewayAccess:
        """The same, once it serves.

        Raises:
            TimeoutError: It does not yet.
            ArealRayError: What the run failed with before; or it has no gateway.
        """
        end_s = time.monotonic() + timeout_s
        while (access := self.gateway) is None:
            if not self._thread.is_alive() or not self.recipe.parts.serves:
                self.wait(0.0)
                raise ArealRayError(f"run {self.recipe.run_name} has no gateway")
            if time.monotonic() > end_s:
                raise TimeoutError(f"the gateway does not serve after {timeout_s} s")
            time.sleep(_LOOK_S)
        return access

    def wait(self, timeout_s: float | None = None) -> Summary:
        """Wait for the end; the summary.

        Raises:
            TimeoutError: It goes on.
            ArealRayError: What the run failed with.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"run {self.recipe.run_name} goes on after {timeout_s} s")
        if self._session.error is not None:
            raise self._session.error
        assert self._summary is not None
        return self._summary

    def stop(self) -> None:
        """Ask the run to end; `wait` returns soon after."""
        self._session.stop()

    def _work(self) -> None:
        try:
            self._summary = self._session.run()
        except ArealRayError as error:  # log.txt could not even be opened
            self._session.error = error
