"""An engine's own process dies: the run tells how and goes on, or ends with the cause."""

import os
import signal
import time
from pathlib import Path

import pytest
import ray

from areal_ray.errors import ActorLost
from tests.support.sglang_server import write_interpreter
from tests.support.whole_runs import Runs, actor_of, events_of, until, until_step


def server_process(run_name: str) -> int:
    """The SGLang server below a replica, once it serves."""

    def of_engine(self):
        guard = self._engine._server._guard.pid
        return int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])

    return ray.get(actor_of(run_name, "rollout-0").__ray_call__.remote(of_engine), timeout=60)


def test_a_dead_server_is_told_and_replaced_and_one_that_cannot_start_ends_the_run(
    runs: Runs, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    python = write_interpreter(
        tmp_path, f"if [ -e {broken} ]; then echo CUDA out of memory >&2; exit 3; fi"
    )
    engine = f"{{kind: sglang, python: {python}, max_context_tokens: 128}}"
    handle = runs.start("server-killed", f"rollout.engine={engine}", "steps=100000")
    until_step(handle, 2)
    os.kill(server_process("server-killed"), signal.SIGKILL)
    until(lambda: "rollout-0 was restarted and is back" in events_of(handle.folder)
          or "rollout-0 died, was restarted" in events_of(handle.folder), "its return")  # fmt: skip
    told = events_of(handle.folder)
    assert "the server ended with code 137 (SIGKILL)" in told
    assert "areal-ray-sglang-" in told
    step = int(handle.status().status["step"])
    until_step(handle, step + 2)

    broken.touch()
    os.kill(server_process("server-killed"), signal.SIGKILL)
    killed_s = time.monotonic()
    with pytest.raises(ActorLost, match="it ended 3 times in a row") as ended:
        handle.wait(120)
    assert time.monotonic() - killed_s < 90  # turns would wait 600 s
    assert "the server ended with code 3" in str(ended.value)
    assert "  CUDA out of memory" in str(ended.value)
