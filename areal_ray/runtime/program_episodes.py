"""Episodes of agents that are programs: the HTTP edge inside the AgentActor, and a process each.

The edge listens on loopback, on a port that is free; each episode has a key of its own. Its calls
go to the rollout fleet and into a record as those of an agent in process do.

attempt() waits for: a seat (`agent.max_processes`), then the program; bounded by `agent.timeout_s`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from areal_ray.agents.episode import AgentConfig, EpisodeEnd
from areal_ray.agents.program import (
    ProgramEnd,
    program_command,
    program_environment,
    run_program,
    task_json,
)
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Outcome
from areal_ray.core.turn import SampledTurn, TurnChunk, TurnEnd, TurnRequest, TurnSampler
from areal_ray.errors import ArealRayError
from areal_ray.gateway.answer import Answers
from areal_ray.gateway.app import Service, make_app
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.door import SessionRecord
from areal_ray.gateway.episode_door import EpisodeDoor, EpisodeSession, add_reward_route
from areal_ray.gateway.record_policy import RecordPolicy
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.server import GatewayServer
from areal_ray.gateway.template import ChatTemplate
from areal_ray.telemetry.log import redact

_MODEL = "policy"
_CUT_SHORT = (Outcome.OK, Outcome.AGENT_ERROR)
"""Ends of an agent that was refused a further call."""


class ProgramEpisodes:
    """Runs the program of `agent.command` once for each episode.

    Args:
        config: The section agent.
        template: Of the model.
        reader: How it writes its replies.
        sampler: The rollout fleet.
        limits: What a call may ask for.
        search: Folders in which the command's files are looked for.
        ours: This process's environment, of which little is handed on.

    Raises:
        RecipeError: There is no such program here, or a variable that it is to have is not set.
    """

    def __init__(
        self,
        config: AgentConfig,
        template: ChatTemplate,
        reader: ReplyFormat,
        *,
        sampler: TurnSampler,
        limits: CallLimits,
        search: Sequence[str],
        ours: Mapping[str, str],
    ) -> None:
        self._config = config
        self._template = template
        self._reader = reader
        self._environment = program_environment(config, ours)
        self._command = program_command(config, search, self._environment["PATH"])
        self._seats = asyncio.Semaphore(config.max_processes)
        self._door = EpisodeDoor()
        self._fleet = _WatchedSampler(sampler)
        answers = Answers(template, reader, self._fleet, limits=limits)
        service = Service(
            answers=answers, door=self._door, model=_MODEL, created_s=int(time.time())
        )
        app = make_app(service)
        add_reward_route(app, self._door)
        self._server = GatewayServer(app)
        self._opening = asyncio.Lock()
        self._url = ""

    async def attempt(
        self, task: Task, group_id: str, episode_id: str, seed: int
    ) -> tuple[EpisodeEnd, Recorder]:
        """One episode: how it ended, and its record.

        Raises:
            ActorLost, EngineError, DeadlineExceeded: The rollout fleet failed, not the agent.
            DataError: The task cannot be written as JSON.
        """
        told = task_json(task, shows_answer=self._config.shows_answer)
        recorder = Recorder(self._template, RecordPolicy(), self._reader)
        # The name gives each turn its seed.
        record = SessionRecord(f"{episode_id}:{seed}", recorder, True, group_id)
        async with self._seats:
            url = await self._open()
            session = self._door.open(record, self._config.max_turns)
            started = time.monotonic()
            try:
                ended = await self._run(session, url, told)
            finally:
                await self._door.close(session)
            total_s = time.monotonic() - started
        return _as_served(ended, session, total_s), recorder

    async def close(self) -> None:
        """Serve no more."""
        await self._server.stop()

    async def _open(self) -> str:
        async with self._opening:
            self._url = self._url or await self._server.start()
        return self._url

    async def _run(self, session: EpisodeSession, url: str, told: str) -> ProgramEnd:
        """The program to its end, unless the fleet fails it before."""
        environment = {
            "AREAL_RAY_URL": url,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": session.key,
            "OPENAI_MODEL": _MODEL,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.key,
            "ANTHROPIC_MODEL": _MODEL,
            **self._environment,
        }
        program = asyncio.ensure_future(run_program(self._command, environment, told, self._config))
        group_id = session.record.prefix_key
        failed = self._fleet.watch(group_id)
        either: set[asyncio.Future[Any]] = {program, failed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
            return program.result()
        finally:
            self._fleet.unwatch(group_id, failed)
            program.cancel()
            await asyncio.wait({program})


def _as_served(ended: ProgramEnd, session: EpisodeSession, total_s: float) -> EpisodeEnd:
    """The program's end, with what the edge knows of the episode."""
    seconds = {"model": session.model_s, "tool": max(0.0, total_s - session.model_s)}
    end = EpisodeEnd(
        ended.outcome,
        redact(ended.reason, [session.key]),
        ended.reward if session.reward is None else session.reward,
        {place: round(spent_s, 6) for place, spent_s in seconds.items()},
    )
    limit = session.ended_by
    if limit and end.outcome in _CUT_SHORT:
        return replace(end, outcome=Outcome.TRUNCATED, reason=limit)
    return end


class _WatchedSampler:
    """The fleet, and who is to hear of a turn that it could not sample.

    The edge tells clients to try again, and an agent may do so for long.
    """

    def __init__(self, fleet: TurnSampler) -> None:
        self._fleet = fleet
        self._watching: dict[str, set[asyncio.Future[ArealRayError]]] = {}

    def watch(self, prefix_key: str) -> "asyncio.Future[ArealRayError]":
        """Gets the error of the next turn of this key that fails."""
        failed: asyncio.Future[ArealRayError] = asyncio.get_running_loop().create_future()
        self._watching.setdefault(prefix_key, set()).add(failed)
        return failed

    def unwatch(self, prefix_key: str, failed: "asyncio.Future[ArealRayError]") -> None:
        """No more."""
        left = self._watching[prefix_key]
        left.discard(failed)
        if not left:
            del self._watching[prefix_key]
        failed.cancel()

    async def sample(self, request: TurnRequest) -> SampledTurn:
        """See `TurnSampler.sample`."""
        try:
            return await self._fleet.sample(request)
        except ArealRayError as error:
            self._tell(request, error)
            raise

    async def stream(self, request: TurnRequest) -> AsyncGenerator[TurnChunk | TurnEnd, None]:
        """See `TurnSampler.stream`."""
        try:
            async with aclosing(self._fleet.stream(request)) as parts:
                async for part in parts:
                    yield part
        except ArealRayError as error:
            self._tell(request, error)
            raise

    def _tell(self, request: TurnRequest, error: ArealRayError) -> None:
        for failed in self._watching.get(request.prefix_key, ()):
            if not failed.done():
                failed.set_result(error)
