"""An SGLang server of our own: its command line, its process, its end.

The adapter starts it behind a guard, a small process that holds a pipe from this one. When the pipe
closes, be it because the replica was killed, the guard ends the server's whole process group, so
that no server outlives its replica with the GPU in its hands.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from areal_ray.core.child import child_command
from areal_ray.engines.process_end import OomWatch, ended_how, words_from
from areal_ray.engines.sglang_generation_config import SglangGenerationConfig
from areal_ray.engines.sglang_model import SglangModel
from areal_ray.errors import EngineError

_END_S = 15.0
"""What a server gets to end by itself."""


def server_command(
    config: SglangGenerationConfig, model: SglangModel, *, port: int, version: int
) -> list[str]:
    """The command line of a server for a model.

    Token ids go in and out, so it needs no tokenizer; `version` is what it stamps tokens with.
    """
    wanted: dict[str, str | int | float | bool] = {
        "model_path": str(model.folder),
        "host": "127.0.0.1",
        "port": port,
        "tp_size": config.tp_size,
        "dtype": _dtype(config, model.folder),
        # SGLang keeps two positions for itself.
        "context_length": min(model.window_tokens + 2, model.num_positions or model.window_tokens),
        "weight_version": str(version),
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "enable_memory_saver": config.memory_saver,
    }
    if config.device != "auto":
        kind, _, index = config.device.partition(":")
        wanted["device"] = kind
        if index:
            wanted["base_gpu_id"] = int(index)
    command = [config.python or sys.executable, "-m", "sglang.launch_server"]
    for name, value in (wanted | config.args).items():
        if value is not False:
            option = f"--{name.replace('_', '-')}"
            command += [option] if value is True else [option, str(value)]
    return command


def free_port() -> int:
    """A port that nobody listens on, as the system picks it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class SglangServer:
    """A started server; `close` ends it and all its processes."""

    def __init__(self, command: list[str]) -> None:
        handle, path = tempfile.mkstemp(prefix="areal-ray-sglang-", suffix=".log")
        self.log = Path(path)
        self._oom = OomWatch()
        # In a session of its own: a Ctrl-C in the terminal ends the replica, which ends it.
        with os.fdopen(handle, "wb") as log:
            self._guard = subprocess.Popen(
                child_command(__name__, {"command": command}),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def why_ended(self) -> str:
        """Empty while it runs; else its exit code and the last lines that it wrote."""
        code = self._guard.poll()
        if code is None:
            return ""
        return f"the server {ended_how(code)}{self._oom.told()}. {words_from({self.log: 0})}"

    def close(self) -> None:
        """End the server and wait for its end."""
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        try:
            self._guard.wait(_END_S + 5.0)
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"sglang generation engine: the server's guard (process {self._guard.pid}) does "
                "not end; end its process group by hand."
            ) from error
        self.log.unlink(missing_ok=True)


def _dtype(config: SglangGenerationConfig, folder: Path) -> str:
    """SGLang's own `auto` would make float32 checkpoints half as exact."""
    if config.dtype != "auto":
        return config.dtype
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return str(said.get("dtype") or said.get("torch_dtype") or "auto")


def main(settings: str) -> None:
    """The guard, below a process that waits for it.

    Ray kills an actor's own children along with it, and a server without a guard would stay.
    """
    guard = os.fork()
    if not guard:
        _serve_until_left(json.loads(settings)["command"])
    _, status = os.waitpid(guard, 0)
    _exit_as(os.waitstatus_to_exitcode(status))


def _serve_until_left(command: list[str]) -> NoReturn:
    """Run the server until it ends or the pipe on stdin closes."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while server.poll() is None:
        readable, _, _ = select.select([0], [], [], 0.2)
        if readable and not os.read(0, 1):
            break
    _end_group(server)
    _exit_as(server.returncode)


def _exit_as(code: int) -> NoReturn:
    """As shells do: a signal's number plus 128."""
    sys.exit(code if code >= 0 else 128 - code)


def _end_group(server: "subprocess.Popen[bytes]") -> None:
    """Ask the group to end, then end it; workers that outlived the server too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
