"""Online runs in tests: their gateway, and the agent program of the recipe in its own process."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import openai

from areal_ray.core.journal import read_ledger
from areal_ray.gateway.recorder import Recorder
from areal_ray.gateway.session_journal import SessionJournal
from areal_ray.gateway.sessions import Sessions, SessionsConfig
from areal_ray.gateway.template import ChatTemplate
from tests.support.whole_runs import PATIENCE_S, ROOT

RECIPE = ROOT / "recipes/online/calculator.yaml"
HELLO: Any = [{"role": "user", "content": "What is 12 plus 30?"}]


def client_of(url: str, session: dict[str, str]) -> openai.OpenAI:
    """OpenAI's SDK, that tries again for as long as a gateway's restart takes on a busy machine."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=session["api_key"], max_retries=40)


def told(url: str, session: dict[str, str], *, stream: bool = False) -> str:
    """The reply to one call with OpenAI's SDK."""
    with client_of(url, session) as client:
        ask = client.chat.completions.create
        if not stream:
            return str(ask(model="m", messages=HELLO).choices[0].message.content)
        chunks = ask(model="m", messages=HELLO, stream=True)
        return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@contextmanager
def program_at(
    handle: Any, log: Path, program: str, *options: str, python: str = sys.executable
) -> Iterator[subprocess.Popen[bytes]]:
    """A program of `recipes/online` at the gateway of a run; what it complains of goes beside
    `log`."""
    access = handle.wait_for_gateway(2 * PATIENCE_S)  # the warm-up, too, may have to be run
    command = [python, "-m", f"recipes.online.{program}", access.url, *options]
    path = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "AREAL_RAY_ADMIN_KEY": access.admin_key, "PATH": path}
    with log.with_suffix(".err").open("ab") as complaints:
        running = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=complaints)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def agent_program(
    handle: Any, log: Path, *options: str
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """The program of OpenAI's SDK; `log` gets its sessions."""
    return program_at(handle, log, "openai_agent", "--log", str(log), *options)


def health_of(handle: Any) -> dict[str, Any]:
    """What the gateway of a run has seen since it started."""
    url = handle.wait_for_gateway(PATIENCE_S).url
    with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


def complaints_of(log: Path) -> str:
    """All that programs with this log wrote to stderr."""
    return log.with_suffix(".err").read_text(encoding="utf-8")


def acknowledged(log: Path) -> list[str]:
    """Sessions whose end the gateway has acknowledged to a program."""
    whole = log.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line)["session"] for line in whole.splitlines()]


def sessions_trained(folder: Path) -> list[str]:
    """Sessions that the run trained on, once for each time."""
    of_group: dict[str, list[str]] = {}
    found: list[str] = []
    for event in read_ledger(folder / "journal"):
        if event["event"] == "committed":
            of_group[event["group"]] = event["sessions"]
        elif event["event"] == "trained":
            found += [session for group in event["groups"] for session in of_group[group]]
    return found


def unaccounted(folder: Path, model: Path, sessions: list[str]) -> set[str]:
    """Of these sessions, those that were neither trained nor rejected with a reason, and that no
    gateway's journal holds either."""
    template = ChatTemplate.from_folder(str(model))
    known: set[str] = set()
    for name in {path.name.split("-")[1] for path in folder.glob("journal/sessions-*.seg")}:
        held = Sessions(
            SessionsConfig(),
            lambda: Recorder(template),
            SessionJournal(folder / "journal", name),
            admin_key_hash=b"",
        )
        known |= {*held.book.sessions, *(n for n, past in held.book.past.items() if past.reason)}
        held.close()
    return set(sessions) - known - set(sessions_trained(folder))
