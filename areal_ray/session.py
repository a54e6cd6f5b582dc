"""Session: one run from its connection to its report, in one thread.

Whatever the end, the actors are gone, the summary and the report are written, and the outcome is
one of finished, stopped or failed.
"""

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from areal_ray.actors import ActorGraph, StartPoint
from areal_ray.assembly import (
    ledger_of,
    start_eval,
    start_inference,
    start_pairs,
    start_rl,
    start_sft,
)
from areal_ray.beginning import record_beginning
from areal_ray.core.journal import resumption
from areal_ray.core.ledger import Ledger
from areal_ray.driver import fit, prefer, serve, telling, train
from areal_ray.ending import close_records, report_on, root_cause, summary_of
from areal_ray.errors import ActorLost, ArealRayError, PlacementError, PublishError, StorageError
from areal_ray.gateway.keys import hash_key
from areal_ray.gateway_access import GatewayAccess, access_key
from areal_ray.header import header_of
from areal_ray.prepare import begin_at, make_model
from areal_ray.recipe import MODEL_FOLDER, Recipe
from areal_ray.records import Records
from areal_ray.run import LearnerRun, Run, ServingRun
from areal_ray.run_folder import RunFolder
from areal_ray.runtime.cluster import (
    Connection,
    connect,
    environment_secrets,
    head_patience_s,
    what_connect_does,
)
from areal_ray.runtime.evaluation import EvaluationService, Pinned
from areal_ray.runtime.head_watch import HeadWatch
from areal_ray.runtime.publish_report import Committed
from areal_ray.runtime.session_service import SessionService
from areal_ray.telemetry.log import run_log
from areal_ray.telemetry.progress import Progress, open_progress
from areal_ray.telemetry.sinks import MetricLog, Sink, open_metric_log
from areal_ray.telemetry.summary import RunOutcome, Summary, write_summary
from areal_ray.telemetry.tally import RunTally
from areal_ray.telemetry.waits import WaitBoard

_log = logging.getLogger(__name__)

_END_ACTORS_S = 8.0
_DISCONNECT_S = 20.0
_GONE_S = 4.0
"""For a closing step after one that never returned: Ray is gone."""
_LOST = (ActorLost, PublishError, PlacementError)
"""How a run fails whose actors, or whose Ray, went away."""


_Loops = Callable[[ActorGraph, StartPoint], Coroutine[Any, Any, None]]


class _StoppedBefore(Exception):
    """Stop was asked for before the loops began."""


class _Endings:
    """The last steps of a run; where Ray itself is gone, one may never return."""

    def __init__(self) -> None:
        self._is_gone = False

    def take(self, close: Callable[[], None], what: str, limit_s: float) -> None:
        """Run one in a thread and wait for it, `limit_s` at most."""
        limit_s = min(limit_s, _GONE_S) if self._is_gone else limit_s
        # A daemon: a thread that hangs must not keep the process from ending.
        inside = contextvars.copy_context()
        thread = threading.Thread(target=inside.run, args=(close,), name=what, daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            self._is_gone = True
            _log.warning("%s takes more than %g s; going on without it", what, limit_s)


class Session:
    """One run from its connection to its report."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        progress: Progress | None = None,
        resume: bool = False,
        overwrite: bool = False,
        connection: Connection | None = None,
        folder: RunFolder | None = None,
    ) -> None:
        """Claim the run's folder.

        Args:
            recipe: What to run.
            progress: Where to show it; by default as telemetry.console says.
            resume: Go on from the last checkpoint.
            overwrite: Forget an earlier run in that folder.
            connection: A cluster to use and leave connected.
            folder: The run's folder, where the caller holds it already.

        Raises:
            RecipeError: The folder holds another run, or one that is going on.
        """
        self.recipe = recipe
        shown = recipe.to_yaml(environment_secrets())
        self._folder = folder or RunFolder.hold(recipe.folder)
        self._folder.begin(shown, resume=resume, overwrite=overwrite)
        self.error: BaseException | None = None
        self._progress = progress or open_progress(recipe.telemetry)
        self.tell = self._progress.on_event  # no file has what it shows
        self._resume = resume
        self._connection = connection
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._stop_asked = False
        self._began = time.monotonic()
        self._endings = _Endings()
        self._waits = WaitBoard()
        self._records: Records | None = None
        self._state: LearnerRun | None = None
        self._begin_point: StartPoint | None = None
        self._maker: Session | None = None
        self.gateway: GatewayAccess | None = None  # of kinds online and inference, once it serves

    def stop(self) -> None:
        """End soon; may be called from any thread, at any time."""
        self._stop_asked = True
        if self._maker is not None:
            self._maker.stop()
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loops have ended, the report is written
                self._loop.call_soon_threadsafe(self._stopping.set)

    def run(self) -> Summary:
        """To the end, whatever it is; `error` is what it failed with."""
        with run_log(self.recipe.folder, run=self.recipe.run_name, secrets=environment_secrets()):
            try:
                return self._conclude(self._run())
            finally:
                self._folder.release()

    def _run(self) -> RunOutcome:
        recipe, is_mine = self.recipe, self._connection is None
        try:
            if self._resume:
                self._begin_point = begin_at(recipe, resume=True, tell=self._progress.on_event)
            if self._connection is None:
                self._progress.on_event(what_connect_does(recipe.cluster, recipe.scheduler))
                self._connection = connect(
                    recipe.cluster, recipe.scheduler, recipe.deadlines, self._check_stop
                )
            make_model(recipe, self._train_first, tell=self.tell, check=self._check_stop)
            asyncio.run(self._run_loops(self._connection))
            return "stopped" if self._stop_asked else "finished"
        except _StoppedBefore:
            return "stopped"
        except BaseException as error:
            return self._fail(root_cause(error))
        finally:
            if is_mine and self._connection is not None:
                close = self._connection.close
                self._endings.take(close, "disconnecting from Ray", _DISCONNECT_S)

    def _fail(self, error: BaseException) -> RunOutcome:
        if self._stop_asked and isinstance(error, _LOST):
            # What asked us to stop may have ended the actors by itself.
            self._progress.on_event(f"stopped without a last checkpoint: {error}")
            return "stopped"
        if self.error is not None:  # what ended the run is the cause, not what followed
            return "failed"
        self.error = error
        is_told = isinstance(error, ArealRayError)
        trace = "".join(traceback.format_exception(error))
        _log.log(logging.INFO if is_told else logging.ERROR, "%s", error if is_told else trace)
        return "failed"

    def _check_stop(self) -> None:
        if self._stop_asked:
            raise _StoppedBefore

    def _train_first(self, other: Recipe, held: RunFolder) -> None:
        """Run the recipe that makes this one's model, on the same cluster."""
        maker = self._maker = Session(
            other, overwrite=True, connection=self._connection, folder=held
        )
        if self._stop_asked:
            maker.stop()
        maker.run()
        self._maker = None
        if maker.error is not None:
            raise maker.error
        self._check_stop()

    async def _run_loops(self, connection: Connection) -> None:
        recipe = self.recipe
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        if self._stop_asked:
            return
        begin = self._begin_point or begin_at(recipe, resume=False, tell=self._progress.on_event)
        self._progress.on_event("starting actors ...")
        graph = ActorGraph(recipe, connection, begin, self._check_stop, self._progress.on_event)
        try:
            loops: dict[str, _Loops] = {
                "train": self._rl,
                "fit": partial(self._learners_alone, start_sft, fit),
                "prefer": partial(self._learners_alone, start_pairs, prefer),
                "evaluate": self._eval,
                "serve": self._serve,
            }
            await self._until_stopped(loops[recipe.parts.loop](graph, begin))
        finally:
            self._endings.take(graph.close, "ending the actors", _END_ACTORS_S)

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Loops that run end by themselves when stop is asked for; loading is cut short."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stopping_event().wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done() and self._state is None:
            task.cancel()
        stop.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not self._stop_asked:
                raise

    async def _rl(self, graph: ActorGraph, begin: StartPoint) -> None:
        ledger, journal = ledger_of(self.recipe)
        records = self._open_records(begin, ledger)
        run, self.gateway = await _start_rl(graph, records, self._waits, ledger)
        run.stopping, self._state = self._stopping_event(), run
        record_beginning(self.recipe, begin, run.state_dict())
        self._begin(run.steps, begin)
        records.begin()
        if begin.is_resumed:
            journal.append(resumption(begin.step, begin.version))
        try:
            await train(run)
            await self._save_model(run)
        finally:
            journal.close()

    async def _learners_alone(
        self,
        start: Callable[..., Any],
        loop: Callable[..., Any],
        graph: ActorGraph,
        begin: StartPoint,
    ) -> None:
        """Kinds without rollouts: `start` spawns their learners, `loop` trains them."""
        run = await start(graph, self._open_records(begin, None), self._waits)
        run.stopping, self._state = self._stopping_event(), run
        record_beginning(self.recipe, begin, run.state_dict())
        self._begin(run.steps, begin)
        run.records.begin()
        await loop(run)
        await self._save_model(run)

    async def _eval(self, graph: ActorGraph, begin: StartPoint) -> None:
        records = self._open_records(begin, None)
        service = await start_eval(graph, records.event)
        self._begin(0, begin)
        with self._waits.waiting("driver", "the scores of the held-out tasks"):
            await _score_once(service, records, begin)

    async def _serve(self, graph: ActorGraph, begin: StartPoint) -> None:
        run, self.gateway = await _start_inference(graph, self._open_records(begin, None))
        self._begin(0, begin)
        await serve(run)

    def _stopping_event(self) -> asyncio.Event:
        assert self._stopping is not None, "the loop makes it first"
        return self._stopping

    def _open_records(self, begin: StartPoint, ledger: Ledger | None) -> Records:
        recipe = self.recipe
        tally = RunTally(ledger)
        tally.load_state_dict(begin.state)
        self._records = Records(
            log=_metric_log(recipe, begin),
            progress=self._progress,
            waits=self._waits,
            admission=recipe.admission,
            tally=tally,
            write_status=self._folder.write_status,
            mismatch_alarm_nats=recipe.telemetry.mismatch_alarm_nats,
            probe_alarm_nats=recipe.telemetry.probe_alarm_nats,
        )
        return self._records

    def _begin(self, steps: int, begin: StartPoint) -> None:
        self._progress.start(header_of(self.recipe, steps, begin))

    async def _save_model(self, run: LearnerRun) -> None:
        """The final weights as a Hugging Face checkpoint, written beside and then renamed."""
        if self._stop_asked:
            await run.checkpoints.save(run)
            return
        await run.checkpoints.export(MODEL_FOLDER)

    def _conclude(self, outcome: RunOutcome) -> Summary:
        """Summary and report, for a run that never began too."""
        folder, records = self.recipe.folder, self._records
        begin = self._begin_point or StartPoint("")
        tally = records.tally if records is not None else RunTally.of_state(begin.state)
        try:
            close_records(folder, records, begin)
        except StorageError as error:
            outcome = self._fail(error)
        sum_up = partial(
            summary_of,
            self.recipe,
            began_s=self._began,
            begin=begin,
            state=self._state,
            tally=tally,
        )
        summary = sum_up(outcome, self.error)
        is_refused = self._resume and outcome == "failed" and self._state is None
        try:
            self._folder.put_back() if is_refused else write_summary(folder, summary)
        except StorageError as error:
            summary = sum_up(self._fail(error), self.error)
        report = report_on(folder, self._progress) if records is not None else None
        self._progress.stop(summary, report)
        return summary


async def _score_once(service: EvaluationService, records: Records, begin: StartPoint) -> None:
    """What the model of a run of kind eval comes to."""
    work = service.score(Pinned(begin.step, Committed(begin.version)))
    records.evaluated(await telling(records, HeadWatch(head_patience_s()), work, dict))


async def _start_rl(
    graph: ActorGraph, records: Records, waits: WaitBoard, ledger: Ledger
) -> tuple[Run, GatewayAccess | None]:
    """The run, and how clients get to it where it is served."""
    key = access_key(graph.recipe)
    run = await start_rl(graph, records, waits, ledger, admin_key_hash=hash_key(key))
    if not isinstance(run.agents, SessionService):
        return run, None
    return run, GatewayAccess(run.agents.first_urls(graph.recipe.gateway.replicas), admin_key=key)


async def _start_inference(graph: ActorGraph, records: Records) -> tuple[ServingRun, GatewayAccess]:
    """The run, and how clients get to it."""
    key = access_key(graph.recipe)
    run = await start_inference(graph, records, key)
    return run, GatewayAccess(tuple(run.urls), api_key=key)


def _metric_log(recipe: Recipe, begin: StartPoint) -> MetricLog:
    sinks: list[Sink] = []
    if recipe.telemetry.ray_metrics:
        from areal_ray.runtime.ray_metrics import RayMetricsSink

        sinks.append(RayMetricsSink(recipe.run_name))
    return open_metric_log(
        recipe.folder,
        recipe.telemetry,
        resume_step=begin.last_row if begin.is_resumed else None,
        extra_sinks=sinks,
    )
