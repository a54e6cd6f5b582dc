"""Sends turns to the rollout fleet in few, fat actor calls, and brings their results back.

Requests made within one tick of the event loop, or within `linger_s` while the replica is busy,
travel to it in one `submit`; one `collect` a replica is outstanding while anything is pending
there. A request goes to the replica that holds its prefix unless that one is overloaded, else to
the least loaded. When a replica dies its turns are sampled afresh, on another replica or on the
same after its restart: nothing was recorded yet. A streamed turn goes on from what was streamed.

generate() and stream() wait for: their result; unblocked by the collector; bounded by `deadline_s`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import ActorDiedError, RayError, RayTaskError

from areal_ray.core.trajectory import StopReason
from areal_ray.engines.protocols import GenerationChunk, GenerationRequest, GenerationResult
from areal_ray.errors import ActorLost, EngineError, RequestRefused
from areal_ray.runtime.fleet import explained, reason_of_death
from areal_ray.runtime.lanes import Lane, Lanes
from areal_ray.runtime.pending_turn import PendingTurn
from areal_ray.runtime.streamed_turn import StreamedTurn
from areal_ray.runtime.turn_wire import RequestBatch

_log = logging.getLogger(__name__)

_PROBE_EVERY_S = 0.25
_DRAIN_S = 10.0
"""For turns to end on a replica that is to go, before others are given them."""
_DRAINED_EVERY_S = 0.05


class RolloutClient:
    """One agent actor's access to all rollout replicas.

    Args:
        replicas: Handles by name.
        client_id: Unique in the run; the replicas keep finished turns under it.
        deadline_s: Longest wait for one turn, restarts of replicas included.
        linger_s: A replica waits so long for further turns once one has ended, and turns for a busy
            replica so long for each other.
        spill_requests: A prefix leaves its replica when that one has so many more requests
            pending than the least loaded.
        max_tries: Times one turn is given to a replica before the run hears of it.
    """

    def __init__(
        self,
        replicas: Mapping[str, Any],
        client_id: str,
        *,
        deadline_s: float = 600.0,
        linger_s: float = 0.002,
        spill_requests: int = 32,
        max_tries: int = 5,
    ) -> None:
        self._lanes = Lanes(replicas, spill_requests)
        self._client_id = client_id
        self._deadline_s = deadline_s
        self._linger_s = linger_s
        self._max_tries = max_tries
        self._background: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        """Rings when the turn that waits for the longest is due."""
        self.num_submits = 0
        self.num_collects = 0

    @property
    def num_pending(self) -> int:
        """Turns under way."""
        return sum(len(lane.pending) for lane in self._lanes)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """One sampled turn. Cancelling this call aborts the turn on its replica.

        Raises:
            DeadlineExceeded: No result within `deadline_s`; names the replica.
            EngineError: The engine failed at it, or cannot serve it as it is asked.
            ActorLost: Replicas kept dying under it.
        """
        pending = self._begin(request)
        try:
            return _sound(await pending.future)
        finally:
            self._forget(request.request_id)

    async def stream(
        self, request: GenerationRequest
    ) -> AsyncGenerator[GenerationChunk | GenerationResult, None]:
        """One sampled turn as it is sampled: its chunks, and last of all its whole result.

        A consumer that takes its time gets fewer and longer chunks; one that breaks off (closes the
        generator, or is cancelled) aborts the turn. When the replica dies, another goes on from
        what was streamed, as long as nothing of the sampling looks back at it.

        Raises:
            DeadlineExceeded: No end within `deadline_s`; names the replica.
            EngineError: The engine failed at it, or cannot serve it as it is asked.
            ActorLost: Replicas kept dying under it, or the turn cannot be continued.
        """
        turn = StreamedTurn(request)
        pending = self._begin(turn.request, turn)
        try:
            while (chunk := await turn.next_chunk(pending.future)) is not None:
                yield chunk
            yield _sound(pending.future.result())
        finally:
            self._forget(request.request_id)

    def _begin(self, request: GenerationRequest, stream: StreamedTurn | None = None) -> PendingTurn:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[GenerationResult] = loop.create_future()
        if stream is not None:
            future.add_done_callback(stream.wake)
        pending = PendingTurn(request, future, loop.time() + self._deadline_s, stream)
        self._route(pending)
        if self._alarm is None:  # one for all: a timer a turn costs more than all else here
            self._alarm = loop.call_at(pending.due_s, self._end_overdue)
        return pending

    async def close(self) -> None:
        """Stop collecting; turns still under way are aborted."""
        if self._alarm is not None:
            self._alarm.cancel()
        for lane in self._lanes:
            if lane.pending:
                lane.replica.abort.remote(list(lane.pending))
                lane.pending.clear()
            if lane.collector is not None:
                lane.collector.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def use(self, replicas: Mapping[str, Any], *, drain_s: float = _DRAIN_S) -> None:
        """Send turns to these replicas alone from now on; returns once others have none.

        What does not end there within `drain_s` is continued on one of these, streamed turns from
        what was streamed; but for those that look back at it, which have their own deadline.
        """
        going = self._lanes.change(replicas)
        ends_s = asyncio.get_running_loop().time() + drain_s
        while any(lane.pending for lane in going):
            if asyncio.get_running_loop().time() >= ends_s:
                for lane, pending in [(one, p) for one in going for p in one.handed_over()]:
                    self._again(lane, pending, "leaves the run")
            await asyncio.sleep(_DRAINED_EVERY_S)
        self._lanes.forget(going)

    # -- choosing a replica --------------------------------------------------------------------

    def _route(self, pending: PendingTurn) -> None:
        lane = self._lanes.choose(pending.request.prefix_key)
        pending.tries += 1
        # A busy replica takes new turns between two steps only: they may as well come together.
        delay_s = self._linger_s if lane.pending else 0.0
        lane.pending[pending.request_id] = pending
        lane.outbox.append(pending.request)
        if not lane.is_flush_due:
            lane.is_flush_due = True
            asyncio.get_running_loop().call_later(delay_s, self._flush, lane)

    def _forget(self, request_id: str) -> None:
        """Drop a turn that is no longer awaited; its replica ends it unless it has answered."""
        for lane in self._lanes:
            if lane.pending.pop(request_id, None) is None:
                continue
            lane.outbox = [r for r in lane.outbox if r.request_id != request_id]
            lane.replica.abort.remote([request_id])

    # -- talking to a replica ------------------------------------------------------------------

    def _flush(self, lane: Lane) -> None:
        lane.is_flush_due = False
        if lane.down_reason:
            return  # the collector sends all of it when the replica is back
        requests, lane.outbox = lane.outbox, []
        if requests:
            self._start(self._submit(lane, requests))
        if lane.pending and (lane.collector is None or lane.collector.done()):
            lane.collector = self._start(self._collect(lane))

    def _start(self, coroutine: Any) -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _submit(self, lane: Lane, requests: Sequence[GenerationRequest]) -> None:
        self.num_submits += 1
        try:
            await lane.replica.submit.remote(self._client_id, RequestBatch(requests))
        except RayTaskError as error:
            lane.fail([r.request_id for r in requests], explained(lane.name, error))
        except RayError as error:  # it died, or what it answered died with a node
            self._lost(lane, error)

    async def _collect(self, lane: Lane) -> None:
        """Fetch finished turns until none is pending."""
        while lane.pending:
            if lane.down_reason:
                await self._revive(lane)
                continue
            try:
                if not lane.incarnation:
                    lane.incarnation = await lane.replica.incarnation.remote()
                self.num_collects += 1
                came = await lane.replica.collect.remote(self._client_id, self._linger_s)
                if not came.results and not came.chunks:
                    await self._notice_restart(lane)
            except RayTaskError as error:
                lane.fail(lane.pending, explained(lane.name, error))
            except RayError as error:
                self._lost(lane, error)
            else:
                for chunk in came.chunks:
                    if chunk.request_id in lane.pending:
                        lane.pending[chunk.request_id].add(chunk)
                for result in came.results:
                    self._deliver(lane, result)

    def _deliver(self, lane: Lane, result: GenerationResult) -> None:
        pending = lane.pending.get(result.request_id)
        if pending is None or pending.future.done():
            return
        is_aborted = result.stop_reason is StopReason.ABORT and not result.error
        if is_aborted and len(result.token_ids) < pending.request.sampling.max_new_tokens:
            self._again(lane, pending, "aborted by the engine")
            return
        pending.end(replace(result, stop_reason=StopReason.LENGTH) if is_aborted else result)
        del lane.pending[result.request_id]

    # -- death and return ----------------------------------------------------------------------

    async def _notice_restart(self, lane: Lane) -> None:
        """A replica that restarted between two calls has forgotten our turns: send them again."""
        incarnation = await lane.replica.incarnation.remote()
        if incarnation != lane.incarnation:
            lane.incarnation = incarnation
            self._resend(lane, "restarted")

    def _lost(self, lane: Lane, error: BaseException) -> None:
        if lane.down_reason:
            return
        lane.down_reason = reason_of_death(error)
        lane.incarnation = ""
        _log.warning(
            "%s is lost (%s); %d turns go elsewhere", lane.name, lane.down_reason, len(lane.pending)
        )
        if self._lanes.can_take_over():
            self._resend(lane, lane.down_reason)
        if lane.collector is None or lane.collector.done():
            lane.collector = self._start(self._collect(lane))

    async def _revive(self, lane: Lane) -> None:
        """Wait for Ray to restart the replica; its turns, if still here, are sent again."""
        try:
            lane.incarnation = await lane.replica.incarnation.remote()
        except RayError as error:
            told = explained(lane.name, error) if isinstance(error, RayTaskError) else None
            lane.down_reason = str(told) if told else reason_of_death(error)
            if isinstance(error, ActorDiedError):  # for good: nobody is to wait for it
                lane.fail(lane.pending, ActorLost(f"{lane.name} died: {lane.down_reason}"))
            await asyncio.sleep(_PROBE_EVERY_S)
        else:
            lane.down_reason = ""
            self._resend(lane, "restarted")

    def _resend(self, lane: Lane, reason: str) -> None:
        waiting, lane.pending = list(lane.pending.values()), {}
        lane.outbox.clear()
        for pending in waiting:
            if not pending.future.done():
                self._again(lane, pending, reason)

    def _again(self, lane: Lane, pending: PendingTurn, reason: str) -> None:
        lane.pending.pop(pending.request_id, None)
        if pending.may_try_again(self._max_tries, f"{lane.name}: {reason}"):
            self._route(pending)

    def _end_overdue(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._lanes.end_overdue(loop.time(), self._deadline_s)
        self._alarm = None if due_s is None else loop.call_at(due_s, self._end_overdue)


def _sound(result: GenerationResult) -> GenerationResult:
    """The result, or its error raised."""
    if result.error:
        kind = RequestRefused if result.is_refused else EngineError
        raise kind(f"turn {result.request_id}: {result.error}")
    return result
