"""An agent that is a program of its own: one process for one episode, under limits.

It gets the task as JSON, on standard input and in the file that AREAL_RAY_TASK names, and the
policy by OPENAI_BASE_URL and OPENAI_API_KEY (ANTHROPIC_*, too). How it ended:

    exit code 0      ok; a last line of standard output such as `{"reward": 1.0}` scores it
    exit code 75     the world around it failed, not the model (EX_TEMPFAIL of sysexits.h)
    anything else    an error of the agent's, told with the last that it wrote

run_program waits for: the program; bounded by `agent.timeout_s`, then it is ended with all it
started (`program_guard.py`).
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from areal_ray.agents.episode import AgentConfig, one_line, read_reward
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Outcome
from areal_ray.errors import DataError, RecipeError

TASK_VARIABLE = "AREAL_RAY_TASK"
_GUARD = str(Path(__file__).with_name("program_guard.py"))
_TASK_FILE = "task.json"
_GRACE_S = 1.0
_GUARD_S = 10.0
"""For the guard to have ended everything."""
_ENV_FAILED = 75
_TAIL_CHARACTERS = 240
_LONGEST_LINE_BYTES = 2**20
_MIB = 2**20
_HANDED_ON = (
    *("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TERM"),
    *("LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_PATH", "NODE_EXTRA_CA_CERTS"),
)
"""Variables that every agent gets; none of them holds a secret."""


def program_command(config: AgentConfig, search: Sequence[Path | str], path: str) -> list[str]:
    """The words of `agent.command`, with the program and files beside the recipe made absolute.

    Args:
        config: The section.
        search: Folders that files are looked for in: the recipe's, those above it, the working one.
        path: PATH that the program is looked for in.

    Raises:
        RecipeError: There is no such program, or it may not be executed.
    """
    words = [_placed(word, search) for word in config.command or ()]
    found = shutil.which(words[0], path=path)
    if found is None:
        is_file = os.path.sep in words[0] and Path(words[0]).is_file()
        told = "may not be executed; chmod +x it" if is_file else "is no program here"
        raise RecipeError(
            f"agent.command: {config.command[0]!r} {told}. It is looked for beside the recipe, "  # type: ignore[index]
            f"in the folders above it, and in PATH ({path})."
        )
    return [found, *words[1:]]


def program_path(path: str) -> str:
    """PATH of agents: this interpreter first, so that `python` is the one areal_ray runs under."""
    return os.pathsep.join(filter(None, (str(Path(sys.executable).parent), path)))


def program_environment(config: AgentConfig, ours: Mapping[str, str]) -> dict[str, str]:
    """What the program is given of this process's environment.

    Raises:
        RecipeError: A variable that `agent.env` hands on is not set.
    """
    given = {name: ours[name] for name in _HANDED_ON if name in ours}
    given["PATH"] = program_path(ours.get("PATH", os.defpath))
    for name, text in config.env.items():
        if text is None and name not in ours:
            raise RecipeError(
                f"agent.env.{name}: is null, so it is handed on, but it is not set here. Set it "
                "where the actors run, or give a value."
            )
        given[name] = ours[name] if text is None else text
    return given


def task_json(task: Task, *, shows_answer: bool) -> str:
    """A task as a program gets it: id, messages, fields and, if it may see it, answer.

    Raises:
        DataError: It holds what JSON cannot.
    """
    told: dict[str, Any] = {"id": task.id, "messages": task.messages, "fields": task.fields}
    if shows_answer:
        told["answer"] = task.answer
    try:
        return json.dumps(told, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"task '{task.id}': cannot be written as JSON ({one_line(str(error))}), which "
            "agent.command needs. Use numbers, text, lists and dicts"
        ) from error


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """What became of a program; its outcome, as `run_episode` has it of a coroutine."""

    outcome: Outcome
    reason: str = ""
    """Where the outcome is not ok; one line."""
    reward: float | None = None
    """If it scored itself on its last line."""
    peak_memory_bytes: int = 0
    """Of the program and all that it started, as far as it was looked at."""


async def run_program(
    command: Sequence[str], environment: Mapping[str, str], task: str, config: AgentConfig
) -> ProgramEnd:
    """Run a program to its end or its limits. Cancelling this call ends it with all it started.

    Args:
        command: From `program_command`.
        environment: All of it.
        task: From `task_json`.
        config: The limits.
    """
    # Gone with the program. Its home, too: agents keep settings and histories there.
    folder = str(Path(tempfile.gettempdir(), f"areal-ray-episode-{uuid4().hex[:16]}"))
    asked = {
        "command": list(command),
        "environment": {
            "HOME": folder,
            "TMPDIR": folder,
            TASK_VARIABLE: str(Path(folder, _TASK_FILE)),
            **environment,
        },
        "folder": folder,
        "files": {_TASK_FILE: task},
        "standard_input": _TASK_FILE,
        "max_output_bytes": config.max_output_bytes,
        "max_memory_bytes": config.max_memory_mb * _MIB,
        "grace_s": _GRACE_S,
    }
    told = await _guarded(json.dumps(asked), config.timeout_s)
    if told is None:  # the guard was killed: by the program, or for want of memory
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return ProgramEnd(Outcome.AGENT_ERROR, "the process that guards the agent was killed")
    return _judged(told, config)


async def _guarded(asked: str, timeout_s: float) -> dict[str, Any] | None:
    """What the guard tells; None where it was killed."""
    guard = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", _GUARD),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={},
        limit=_LONGEST_LINE_BYTES,
        start_new_session=True,
    )
    assert guard.stdin is not None
    assert guard.stdout is not None
    telling = asyncio.ensure_future(guard.stdout.readline())
    try:
        with contextlib.suppress(ConnectionError):
            guard.stdin.write(asked.encode() + b"\n")
            await guard.stdin.drain()
        await asyncio.wait({telling}, timeout=timeout_s)
    finally:
        guard.stdin.close()  # where it runs still, this ends it
        try:
            async with asyncio.timeout(_GUARD_S):
                line = await telling
                await guard.wait()
        except TimeoutError:  # something hangs in the kernel
            line = b""
        finally:
            if guard.returncode is None:
                guard.kill()
    return json.loads(line) if line else None


def _judged(told: Mapping[str, Any], config: AgentConfig) -> ProgramEnd:
    peak_bytes, code = told["peak_memory_bytes"], told["exit_code"]

    def ended(outcome: Outcome, reason: str) -> ProgramEnd:
        return ProgramEnd(outcome, one_line(reason), None, peak_bytes)

    if told["refused"]:
        return ended(Outcome.AGENT_ERROR, f"the agent could not be executed: {told['refused']}")
    if told["ended_for"] == "asked":
        return ended(Outcome.TIMEOUT, f"episode exceeded {config.timeout_s:g} s")
    excess = {
        "output": f"wrote more than agent.max_output_bytes = {config.max_output_bytes}",
        "memory": f"took more than agent.max_memory_mb = {config.max_memory_mb}",
        "processes": "started too many processes",
    }
    if told["ended_for"]:
        return ended(Outcome.AGENT_ERROR, f"the agent {excess[told['ended_for']]}")
    tail = _tail(told["errors"]) or _tail(told["output"])
    if code == _ENV_FAILED:
        return ended(Outcome.ENV_ERROR, tail or "environment failed")
    if code:
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        return ended(Outcome.AGENT_ERROR, f"the agent ended with {how}: {tail or 'no output'}")
    try:
        return ProgramEnd(Outcome.OK, "", _reward(told["output"]), peak_bytes)
    except TypeError as error:
        return ended(Outcome.AGENT_ERROR, str(error))


def _tail(text: str) -> str:
    """The last of it, on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= _TAIL_CHARACTERS else f"... {flat[-_TAIL_CHARACTERS:]}"


def _reward(output: str) -> float | None:
    """The reward on the last line, where that is a JSON object that has one.

    Raises:
        TypeError: It is no finite number.
    """
    *_, last = ["", *filter(None, map(str.strip, output.splitlines()))]
    if not last.startswith("{"):
        return None
    try:
        told = json.loads(last)
    except ValueError:
        return None
    return read_reward(told["reward"]) if isinstance(told, dict) and "reward" in told else None


def _placed(word: str, search: Sequence[Path | str]) -> str:
    """A file beside the recipe or above it, absolute; any other word as it is."""
    if not word or word.startswith("-") or (os.path.sep not in word and not Path(word).suffix):
        return word
    return next((str(p.resolve()) for root in search if (p := Path(root, word)).is_file()), word)
