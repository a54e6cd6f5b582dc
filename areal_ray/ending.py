"""How a run ended: its one cause, in words, and what its files say of it."""

import asyncio
import logging
import time
import traceback
from pathlib import Path

from areal_ray.actors import StartPoint
from areal_ray.core.storage import writing
from areal_ray.errors import ActorLost, ArealRayError, StorageError
from areal_ray.kinds import planned_steps
from areal_ray.recipe import Recipe
from areal_ray.records import Records
from areal_ray.run import LearnerRun
from areal_ray.runtime.cluster import environment_secrets
from areal_ray.telemetry.log import redact
from areal_ray.telemetry.progress import Progress
from areal_ray.telemetry.report import write_report
from areal_ray.telemetry.rows import keep_rows_through
from areal_ray.telemetry.sinks import METRICS_FILE
from areal_ray.telemetry.summary import RunEnd, RunOutcome, Summary, summarize
from areal_ray.telemetry.tally import RunTally

_log = logging.getLogger(__name__)


def root_cause(error: BaseException) -> BaseException:
    """The exception that ended a run, out of the groups that asyncio wraps around it."""
    while isinstance(error, BaseExceptionGroup):
        causes = [e for e in error.exceptions if not isinstance(e, asyncio.CancelledError)]
        # A failure that names its reason beats the deaths that followed from it.
        causes.sort(key=lambda cause: isinstance(cause, ActorLost))
        error = causes[0] if causes else error.exceptions[0]
    return error


def failure_text(error: BaseException | None) -> str:
    """What a run failed with, as a user should read it."""
    if error is None:
        return ""
    return str(error) if isinstance(error, ArealRayError) else f"{type(error).__name__}: {error}"


def close_records(folder: Path, records: Records | None, begin: StartPoint) -> None:
    """The rows as they stay.

    Raises:
        StorageError: The disk did not take the last of them.
    """
    if records is not None:
        records.close()
    elif begin.is_resumed:  # as the records would have done, so that all numbers agree
        with writing(folder / METRICS_FILE):
            keep_rows_through(folder / METRICS_FILE, begin.last_row)


def summary_of(
    recipe: Recipe,
    outcome: RunOutcome,
    error: BaseException | None,
    *,
    began_s: float,
    begin: StartPoint,
    state: LearnerRun | None,
    tally: RunTally,
) -> Summary:
    """A run in numbers, from its rows and its end.

    Args:
        recipe: As run.
        outcome: How it ended.
        error: What it failed with.
        began_s: When it began (monotonic clock).
        begin: Where it began.
        state: How far it came; None if its loops never began.
        tally: Its counts.
    """
    version = state.version if state else begin.version
    bound = recipe.admission.max_head_offpolicyness if recipe.admission else None
    end = RunEnd(
        name=recipe.run_name,
        kind=recipe.kind,
        outcome=outcome,
        # A phase of supervised training may be prolonged until it has reached what it must.
        planned_steps=max(state.steps, state.step) if state else planned_steps(recipe),
        version=version if recipe.parts.has_versions else None,
        wall_s=round(time.monotonic() - began_s, 3),
        seed=recipe.seed,
        failure=redact(failure_text(error), environment_secrets()),
        staleness_bound=bound if isinstance(bound, int) else None,
        **tally.end_facts(),
    )
    return summarize(recipe.folder, end)


def report_on(folder: Path, progress: Progress) -> Path | None:
    """report.html, or None where it cannot be drawn: that must not cost the run its outcome."""
    try:
        return write_report(folder)
    except StorageError as error:
        progress.on_event(f"report.html not written: {error}")
        return None
    except (ArithmeticError, LookupError, TypeError, ValueError, OSError) as error:
        _log.error("%s", "".join(traceback.format_exception(error)))
        progress.on_event(f"report.html not written: {type(error).__name__}: {error}")
        return None
