"""A signal to the whole process group of a run: `timeout`, a batch system, a terminal's Ctrl-C."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from areal_ray.run_folder import read_status
from tests.integration.test_command_line import (
    ROOT,
    clean_environment,
    descendants,
    is_alive,
    train,
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "code", "begun"),
    [(signal.SIGTERM, 143, 2), (signal.SIGINT, 130, 2), (signal.SIGTERM, 143, None)],
    ids=["SIGTERM", "SIGINT", "SIGTERM while loading"],
)
def test_it_ends_the_run_in_seconds_as_a_signal_to_the_run_alone_would(
    tmp_path: Path, number: signal.Signals, code: int, begun: int | None
) -> None:
    child = subprocess.Popen(
        train(tmp_path, "steps=200"),
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(tmp_path / "r", child, begun)
        below = descendants(child.pid)
        asked = time.monotonic()
        os.killpg(child.pid, number)
        out = child.communicate(timeout=60)[0]
        took_s = time.monotonic() - asked
        assert (child.returncode, took_s < 30) == (code, True), (took_s, out[-3000:])
        end = time.monotonic() + 10
        while left := [pid for pid in below if is_alive(pid)]:
            assert time.monotonic() < end, f"processes are left: {left}"
            time.sleep(0.2)
    finally:
        if child.poll() is None:
            child.kill()
    assert "Traceback" not in out
    assert out.count("stopping") == 1
    assert "r stopped: " in out
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["outcome"], summary["failure"]) == ("stopped", "")
    assert summary["steps"] >= (begun or 0)


def wait_until(folder: Path, child: subprocess.Popen[str], step: int | None) -> None:
    """Until a step is done; None = until Ray's processes are there."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        assert child.poll() is None, child.communicate()[0][-3000:]
        if step is None and len(descendants(child.pid)) >= 8:
            return
        if step is not None and read_status(folder).status.get("step", 0) >= step:
            return
        time.sleep(0.2)
    raise AssertionError(f"{folder} got nowhere")
