"""Coding agents as their makers ship them, pointed at a gateway by base URL and key alone.

Each is a program that an environment variable names; no test reaches anything but loopback: what
else they would call (updates, telemetry, lists of models) is turned off, and sent to a closed port.
"""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TASK = "Count the lines of notes.txt with a command. Say the number alone."
CODEX_IDLE_S = 6
"""Longest silence of a stream before Codex begins anew; comments do not count."""
_CLOSED = "http://127.0.0.1:9"


@dataclass(frozen=True)
class Pointed:
    """How to run an agent once."""

    command: Sequence[str]
    environment: dict[str, str]


Pointing = Callable[[str, str, str, Path], Pointed]
"""Of program, URL, key and a home of its own."""


def claude_code(program: str, url: str, key: str, home: Path) -> Pointed:
    """Claude Code, without a terminal."""
    quiet = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY")
    return Pointed(
        [program, "-p", TASK, "--model", "policy", "--allowedTools", "Bash"],
        {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
            "CLAUDE_CONFIG_DIR": str(home / "claude"),
            **dict.fromkeys((*quiet, "DISABLE_ERROR_REPORTING"), "1"),
        },
    )


def codex(program: str, url: str, key: str, home: Path) -> Pointed:
    """Codex, with the configuration of docs/online.md."""
    config = f"""
        model = "policy"
        model_provider = "areal"
        [model_providers.areal]
        name = "areal"
        base_url = "{url}/v1"
        env_key = "AREAL_RAY_KEY"
        wire_api = "responses"
        stream_idle_timeout_ms = {CODEX_IDLE_S * 1000}
        [analytics]
        enabled = false
    """
    (home / "config.toml").write_text(config)
    return Pointed(
        [
            *(program, "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", TASK),
        ],
        {"AREAL_RAY_KEY": key, "CODEX_HOME": str(home)},
    )


def opencode(package: str) -> Pointing:
    """Opencode over one of the packages that speak a dialect."""

    def point(program: str, url: str, key: str, home: Path) -> Pointed:
        provider = {
            "npm": package,
            "options": {"baseURL": f"{url}/v1", "apiKey": "{env:AREAL_RAY_KEY}"},
            "models": {"policy": {}},
        }
        config = {"model": "areal/policy", "provider": {"areal": provider}, "share": "disabled"}
        (home / "opencode.json").write_text(json.dumps(config))
        quiet = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        return Pointed(
            [program, "run", TASK],
            {
                "AREAL_RAY_KEY": key,
                "OPENCODE_CONFIG": str(home / "opencode.json"),
                **{f"OPENCODE_DISABLE_{name}": "1" for name in quiet},
            },
        )

    return point


@dataclass
class Traffic:
    """What came in and what went out, by request; to be put before an application."""

    app: Any = None
    statuses: list[tuple[str, str, int, str]] = field(default_factory=list)
    """Method, path, status and content type, in the order of the answers."""

    def watch(self, app: Any) -> "Traffic":
        """Stand before it."""
        self.app = app
        return self

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def seen(message: Any) -> None:
            if message["type"] == "http.response.start":
                kind = dict(message["headers"]).get(b"content-type", b"").decode()
                answer = (scope["method"], scope["path"], message["status"], kind)
                self.statuses.append(answer)
            await send(message)

        await self.app(scope, receive, seen)


def program_of(variable: str) -> str:
    """The program that a variable names; skips the test where it names none."""
    program = os.environ.get(variable, "")
    if not program:
        pytest.skip(f"{variable} names no program (CONTRIBUTING.md says where they come from)")
    return program


def play(pointing: Pointing, program: str, url: str, key: str, folder: Path) -> tuple[int, str]:
    """Run an agent on the task to its end: exit code, and all it wrote."""
    home, desk = folder / "home", folder / "desk"
    home.mkdir(parents=True)
    desk.mkdir()
    (desk / "notes.txt").write_text("one\ntwo\nthree\n")
    pointed = pointing(program, url, key, home)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TERM": "dumb",
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), _CLOSED),
        "NO_PROXY": "127.0.0.1,localhost",
        **pointed.environment,
    }
    done = subprocess.run(
        pointed.command,
        cwd=desk,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout
