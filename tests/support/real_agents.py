"""Agents of other projects, each in a process of its own, at a gateway that plays a script."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_ray.core.trajectory import Trajectory
from areal_ray.gateway import keys
from areal_ray.gateway.answer import Answers
from areal_ray.gateway.app import Service
from areal_ray.gateway.call_limits import CallLimits
from areal_ray.gateway.limits import EdgeLimits
from areal_ray.gateway.record_policy import RecordPolicy
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.reply_parser import ReplyFormat
from areal_ray.gateway.server import GatewayServer
from areal_ray.gateway.session_journal import SessionJournal
from areal_ray.gateway.session_routes import make_sessions_app
from areal_ray.gateway.sessions import Sessions, SessionsConfig
from areal_ray.gateway.template import ChatTemplate
from tests.support.gateway import Script
from tests.support.scripted_sampler import ScriptedSampler
from tests.support.sdk_clients import SHOWS_ALL
from tests.support.sessions import ADMIN_KEY, Replica
from tests.support.tiny_models import tiny_tokenizer
from tests.support.whole_runs import ROOT

AGENT_PYTHON = os.environ.get("AGENT_PYTHON", sys.executable)
"""Interpreter that has the agents' packages: they need not agree with what trains."""
_PATIENCE_S = 240


def needs_agent(package: str) -> None:
    """Skip the test where the agents' interpreter has no such package."""
    found = subprocess.run(
        [AGENT_PYTHON, "-c", f"from importlib.util import find_spec as f; exit(not f({package!r}))"]
    )
    if found.returncode:
        pytest.skip(f"{package} is not installed for {AGENT_PYTHON} (AGENT_PYTHON names another)")


@asynccontextmanager
async def serving_agents(
    folder: Path,
    script: Script,
    watch: Callable[[Any], Any] = lambda app: app,
    edge: EdgeLimits | None = None,
) -> AsyncGenerator[Replica, None]:
    """A gateway with sessions and a long context, whose template writes tools and calls.

    `watch` may put something between the socket and the application.
    """
    tokenizer = tiny_tokenizer()
    template = ChatTemplate(tokenizer, SHOWS_ALL)
    reply_format = ReplyFormat(template)
    sampler = ScriptedSampler(tokenizer, script)
    sessions = Sessions(
        SessionsConfig(),
        lambda: Recorder(template, RecordPolicy(), reply_format),
        SessionJournal(folder, "a"),
        admin_key_hash=keys.hash_key(ADMIN_KEY),
    )
    answers = Answers(template, reply_format, sampler, limits=CallLimits(512, 2**18))
    service = Service(answers=answers, door=sessions, limits=edge or EdgeLimits())
    app = make_sessions_app(service, sessions, time.time)
    replica = Replica(sessions, sampler, service, GatewayServer(watch(app), grace_s=2.0), app)
    replica.url = await replica.server.start()
    try:
        yield replica
    finally:
        await replica.stop()
    assert replica.service.counts.num_defects == 0


async def play(replica: Replica, program: str, *options: str) -> str:
    """Run a program of `recipes/online` to its end; what it complained of."""
    replica.sessions.open_slot()
    _, complaints = await _ended("-m", f"recipes.online.{program}", replica.url, *options)
    return complaints


async def output_of(program: str, *options: str) -> str:
    """What a program says that runs with the agents' packages."""
    said, _ = await _ended(program, *options)
    return said


async def _ended(*command: str) -> tuple[str, str]:
    """What a program of the agents' interpreter wrote to its end; fails if it does."""
    path = os.pathsep.join([str(Path(AGENT_PYTHON).parent), os.environ.get("PATH", "")])
    agent = await asyncio.create_subprocess_exec(
        *(AGENT_PYTHON, *command),
        cwd=ROOT,
        env={**os.environ, "AREAL_RAY_ADMIN_KEY": ADMIN_KEY, "PATH": path},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            said, complaints = await agent.communicate()
    finally:
        if agent.returncode is None:
            agent.kill()
            await agent.wait()
    assert agent.returncode == 0, complaints.decode()
    return said.decode(), complaints.decode()


def trained_ids(lines: list[Trajectory]) -> list[list[int]]:
    """Ids that train, line by line."""
    return [line.token_ids[np.nonzero(line.loss_mask)].tolist() for line in lines]


def sampled_by_call(replica: Replica) -> list[list[int]]:
    """The engine's own log, in the order of the calls."""
    sampled = replica.sampler.sampled
    return [sampled[request.request_id].token_ids.tolist() for request in replica.sampler.requests]


def session_lines(group: Any) -> dict[str, list[Trajectory]]:
    """Lines by session, in the order of the sessions."""
    by_session: dict[str, list[Trajectory]] = {name: [] for name in group.session_ids}
    for line in group.trajectories:
        by_session[line.episode_id].append(line)
    return by_session
