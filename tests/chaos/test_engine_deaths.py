"""An engine's own process dies: the run tells how and goes on, or ends with the cause."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import ray

from areal_ray.errors import ActorLost
from tests.support.sglang_server import server_below, write_interpreter
from tests.support.whole_runs import (
    PATIENCE_S,
    Runs,
    actor_of,
    events_of,
    pid_of,
    steps_of,
    until,
    until_step,
)


def server_process(run_name: str) -> int:
    """The SGLang server below a replica, once it serves."""
    asked = actor_of(run_name, "rollout-0").__ray_call__.remote(
        lambda self: self._engine._server._guard.pid
    )
    return server_below(ray.get(asked, timeout=60))


@pytest.mark.extended
def test_a_server_that_died_is_told_with_its_cause_and_replaced_and_none_is_left_behind(
    runs: Runs, tmp_path: Path
) -> None:
    engine = f"{{kind: sglang, python: {write_interpreter(tmp_path)}, max_context_tokens: 128}}"
    handle = runs.start("server-killed", f"rollout.engine={engine}", "steps=100000")
    until_step(handle, 2)
    os.kill(server_process("server-killed"), signal.SIGKILL)
    until(lambda: "is back at version" in events_of(handle.folder), "its return")
    told = events_of(handle.folder)
    assert "the server ended with code 137 (SIGKILL). The last lines of /" in told
    until_step(handle, steps_of(handle.folder)[-1] + 2)
    left = server_process("server-killed")
    handle.stop()
    assert handle.wait(PATIENCE_S).outcome == "stopped"
    until(lambda: not Path(f"/proc/{left}").exists(), "the server to end with its replica")


@pytest.mark.extended
def test_a_replica_that_cannot_start_again_ends_the_run_with_the_cause(
    runs: Runs, tmp_path: Path
) -> None:
    model = shutil.copytree(runs.folder / "tiny", tmp_path / "model")
    handle = runs.start("not-again", f"model.path={model}", "steps=100000")
    until_step(handle, 1)
    (model / "config.json").unlink()
    os.kill(pid_of("not-again", "rollout-0"), signal.SIGKILL)
    killed_s = time.monotonic()
    with pytest.raises(ActorLost, match=r"rollout-0 died: (.|\n)*config\.json"):
        handle.wait(PATIENCE_S)
    assert time.monotonic() - killed_s < PATIENCE_S / 2  # its turns alone would wait for 600 s
