"""Agents that are programs: what they are given, how they end, and that nothing of them stays."""

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from areal_ray.agents.episode import AgentConfig
from areal_ray.agents.program import (
    ProgramEnd,
    program_command,
    program_environment,
    program_path,
    run_program,
    task_json,
)
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Outcome
from areal_ray.errors import DataError, RecipeError

TASK = Task("t-1", ({"role": "user", "content": "2+2?"},), answer="4", fields={"level": 1})
MARK = "MARK_OF_THE_TEST"


@pytest.fixture
def mark(tmp_path: Path) -> str:
    """What the processes of a test have in their environment."""
    return f"{tmp_path}"


def config(code: str = "", **fields: Any) -> AgentConfig:
    return AgentConfig(command=("python", "-c", code), **{"timeout_s": 60.0, **fields})


async def attempt(code: str, mark: str = "", **fields: Any) -> ProgramEnd:
    asked = config(code, **fields)
    environment = program_environment(asked, {"PATH": os.environ["PATH"]})
    command = program_command(asked, [], environment["PATH"])
    task = task_json(TASK, shows_answer=asked.shows_answer)
    return await run_program(command, {**environment, MARK: mark}, task, asked)


def run(code: str, mark: str = "", **fields: Any) -> ProgramEnd:
    return asyncio.run(attempt(code, mark, **fields))


def processes_of(mark: str) -> list[int]:
    """All that have the mark in their environment, whatever session they are in."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in _environ(entry):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _environ(entry: Path) -> bytes:
    return (entry / "environ").read_bytes()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


def test_a_program_gets_the_task_as_json_and_its_last_line_scores_it():
    told = run(
        "import json, os, sys; task = json.load(sys.stdin);"
        "assert task == json.load(open(os.environ['AREAL_RAY_TASK']));"
        "assert task['messages'][0]['content'] == '2+2?' and task['fields'] == {'level': 1};"
        "assert 'answer' not in task; print('thinking'); print('{\"reward\": 0.25}')"
    )
    assert (told.outcome, told.reason, told.reward) == (Outcome.OK, "", 0.25)
    shown = run("import json, sys; assert json.load(sys.stdin)['answer'] == '4'", shows_answer=True)
    assert (shown.outcome, shown.reward) == (Outcome.OK, None)


@pytest.mark.parametrize(
    "last", ["", "4", "{", '{"score": 1}', "[1]", '{"reward": null}', '{"reward": 1} and more']
)
def test_output_that_names_no_reward_leaves_it_to_the_reward_function(last):
    told = run(f"print({last!r})")
    assert (told.outcome, told.reward) == (Outcome.OK, None)


@pytest.mark.parametrize("value", ["NaN", '"high"', "1e300", "[1]"])
def test_a_reward_that_is_no_number_is_an_error_and_no_zero(value):
    told = run(f"print('{{\"reward\": {value}}}')")
    assert told.outcome is Outcome.AGENT_ERROR
    assert "finite number" in told.reason


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        ("raise SystemExit(3)", Outcome.AGENT_ERROR, "exit code 3: no output"),
        ("print('x'); raise ValueError('no such tool')", Outcome.AGENT_ERROR, "no such tool"),
        ("import os; os.kill(os.getpid(), 9)", Outcome.AGENT_ERROR, "SIGKILL"),
        ("import sys; sys.exit('data base is down')", Outcome.AGENT_ERROR, "data base is down"),
        ("import sys; print('down', file=sys.stderr); sys.exit(75)", Outcome.ENV_ERROR, "down"),
    ],
)
def test_an_end_that_is_no_success_is_told_with_its_last_words(code, outcome, reason):
    told = run(code)
    assert told.outcome is outcome
    assert reason in told.reason
    assert told.reward is None


def test_a_program_that_hangs_is_ended_with_its_children_though_they_ignore_sigterm(mark):
    child = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    code = (
        "import os, signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN);"
        f"run = lambda **how: subprocess.Popen([sys.executable, '-c', {child!r}], **how);"
        # one in our session, one in its own, and one whose parent is gone at once
        "run(); run(start_new_session=True);"
        "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(600));"
        "time.sleep(600)"
    )
    started = time.monotonic()
    told = run(code, mark, timeout_s=1.5)
    assert (told.outcome, told.reason) == (Outcome.TIMEOUT, "episode exceeded 1.5 s")
    assert time.monotonic() - started < 30
    assert processes_of(mark) == []


def test_what_a_program_leaves_running_is_ended_and_not_waited_for(mark):
    code = (
        "import os, time;"
        "os.fork() or (os.setsid(), time.sleep(600));"  # it holds both pipes open
        "print('{\"reward\": 1}')"
    )
    told = run(code, mark)
    assert (told.outcome, told.reward) == (Outcome.OK, 1.0)
    assert processes_of(mark) == []


def test_an_episode_that_is_cancelled_leaves_nothing_running(mark):
    async def cancelled() -> None:
        running = asyncio.ensure_future(attempt("import time; time.sleep(600)", mark))
        await until(lambda: processes_of(mark))
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert processes_of(mark) == []


def test_a_program_ends_with_the_process_that_runs_it(mark):
    code = f"""
import asyncio
from tests.unit.test_program import attempt
asyncio.run(attempt("import time; time.sleep(600)", {mark!r}))
"""

    async def killed() -> None:
        path = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.environ["PATH"]}
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=path)
        await until(lambda: processes_of(mark))
        owner.kill()
        await owner.wait()
        await until(lambda: not processes_of(mark))

    asyncio.run(killed())


def test_a_flood_of_output_ends_the_program_and_costs_no_memory(mark):
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"
    told = run(code, mark, max_output_bytes=2**24)
    assert told.outcome is Outcome.AGENT_ERROR
    assert "agent.max_output_bytes = 16777216" in told.reason
    assert processes_of(mark) == []


@pytest.mark.parametrize("where", ["here", "child"])
def test_a_program_that_eats_memory_is_killed_its_children_counted(where, mark):
    eat = "kept = []\nwhile True: kept.append(bytearray(2**24)); import time; time.sleep(0.01)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {eat!r}])"
    told = run(eat if where == "here" else code, mark, max_memory_mb=128)
    assert told.outcome is Outcome.AGENT_ERROR
    assert "agent.max_memory_mb = 128" in told.reason
    assert told.peak_memory_bytes < 2**31
    assert processes_of(mark) == []


def test_memory_taken_at_one_blow_is_refused_by_the_system():
    told = run("bytearray(4 * 2**30)", max_memory_mb=128)
    assert told.outcome is Outcome.AGENT_ERROR
    assert "MemoryError" in told.reason


def test_the_environment_holds_what_is_named_and_no_secret():
    asked = config(env={"SEARCH_API_KEY": None, "MODE": "fast"})
    ours: Mapping[str, str] = {
        "PATH": "/usr/bin",
        "LANG": "C.UTF-8",
        "SEARCH_API_KEY": "named",
        "HF_TOKEN": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "OPENAI_API_KEY": "the user's own",
        "HTTP_PROXY": "http://user:secret@proxy",
    }
    assert program_environment(asked, ours) == {
        "PATH": program_path("/usr/bin"),
        "LANG": "C.UTF-8",
        "SEARCH_API_KEY": "named",
        "MODE": "fast",
    }
    with pytest.raises(RecipeError, match=r"agent\.env\.SEARCH_API_KEY: is null.*not set"):
        program_environment(asked, {"PATH": "/usr/bin"})


def test_a_program_has_a_folder_and_home_of_its_own_that_go_with_it(tmp_path):
    shown = tmp_path / "shown"
    code = (
        "import os; from pathlib import Path;"
        "assert Path.cwd() == Path.home() == Path(os.environ['TMPDIR']);"
        "Path('deep/er').mkdir(parents=True); Path('deep/er/kept').write_text('x');"
        "Path('link').symlink_to('/usr'); os.chmod('deep/er', 0o500);"
        f"Path({str(shown)!r}).write_text(os.getcwd())"
    )
    assert run(code).outcome is Outcome.OK
    assert not Path(shown.read_text()).exists()
    assert Path("/usr").exists()


def test_a_command_is_found_beside_the_recipe_and_in_the_path(tmp_path):
    script = tmp_path / "agent.mjs"
    script.write_text("#!/bin/sh\n")
    path = program_path(os.environ["PATH"])
    asked = AgentConfig(command=("python", "agent.mjs", "--flag", "other"))
    assert program_command(asked, [tmp_path], path) == [
        str(Path(sys.executable).parent / "python"),
        *(str(script), "--flag", "other"),
    ]
    with pytest.raises(RecipeError, match=r"agent\.command: 'no-such-agent' is no program here"):
        program_command(AgentConfig(command=("no-such-agent",)), [tmp_path], path)
    with pytest.raises(RecipeError, match=r"may not be executed; chmod \+x"):
        program_command(AgentConfig(command=("./agent.mjs",)), [tmp_path], path)
    script.chmod(0o755)
    assert program_command(AgentConfig(command=("./agent.mjs",)), [tmp_path], path) == [str(script)]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"run": "a.b:c"}, "an agent is one of the two"),
        ({"args": {"a": 1}}, "Put arguments among its words"),
        ({"command": ()}, "at least 1 item"),
        ({"command": ("", "x")}, "must be a program"),
    ],
)
def test_an_agent_is_a_function_or_a_program(fields, told):
    with pytest.raises(ValueError, match=told):
        AgentConfig(**{"command": ("python",), **fields})


def test_a_task_that_is_no_json_is_named():
    with pytest.raises(DataError, match="task 'odd': cannot be written as JSON"):
        task_json(Task("odd", (), fields={"made": object()}), shows_answer=False)
