"""A signal to the whole process group of a run: `timeout`, a batch system, a terminal's Ctrl-C."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from areal_ray.run_folder import read_status
from recipes.calculator.model import create
from tests.integration.test_command_line import (
    ROOT,
    clean_environment,
    descendants,
    is_alive,
    train,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is there already: a run that makes its own takes seconds more to begin."""
    folder = tmp_path_factory.mktemp("made")
    create(folder, 0)
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize("is_stopped", [True, False], ids=["by a signal", "by itself"])
def test_a_run_whose_ray_is_gone_ends_in_order(
    tmp_path: Path, model: Path, is_stopped: bool
) -> None:
    """As where everything is ended at once: the rollout's death is news, and no head is left that
    could say what it left behind."""
    child = started(tmp_path, f"model.path={model}", "model.create=null")
    try:
        wait_until(tmp_path / "r", child, 2)
        below = descendants(child.pid)
        for ended in ("gcs_server", "RolloutActor"):
            pids = [pid for pid in below if ended in command_line(pid)]
            assert pids, f"no process of {ended}"
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        if is_stopped:
            time.sleep(2.5)  # time for a look at the actors
            child.terminate()
        out = child.communicate(timeout=60)[0]
        assert child.returncode == (143 if is_stopped else 1), out[-3000:]
    finally:
        if child.poll() is None:
            child.kill()
    assert "Traceback" not in out
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["outcome"] == ("stopped" if is_stopped else "failed")
    assert ("Ray's head has not answered" in summary["failure"]) is not is_stopped


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "code", "begun", "to_all"),
    [
        pytest.param(signal.SIGTERM, 143, 2, False, marks=pytest.mark.extended),
        pytest.param(signal.SIGINT, 130, 2, False, marks=pytest.mark.extended),
        pytest.param(signal.SIGTERM, 143, None, False, marks=pytest.mark.extended),
        (signal.SIGTERM, 143, 2, True),
    ],
    ids=["SIGTERM", "SIGINT", "SIGTERM while loading", "SIGTERM to each process"],
)
def test_it_ends_the_run_in_seconds_as_a_signal_to_the_run_alone_would(
    tmp_path: Path,
    model: Path,
    number: signal.Signals,
    code: int,
    begun: int | None,
    to_all: bool,
) -> None:
    made = () if begun is None else (f"model.path={model}", "model.create=null")
    child = started(tmp_path, *made)
    try:
        wait_until(tmp_path / "r", child, begun)
        below = descendants(child.pid)
        asked = time.monotonic()
        os.killpg(child.pid, number)
        for pid in below if to_all else ():  # as batch systems do that know the whole tree
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
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
    assert out.count("stopping; once more") == 1
    assert "r stopped: " in out
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["outcome"], summary["failure"]) == ("stopped", "")
    assert summary["steps"] >= (begun or 0)


def started(folder: Path, *made: str) -> subprocess.Popen[str]:
    """A run of many steps, in a process group of its own; without a head for a quarter of a minute
    at most."""
    return subprocess.Popen(
        train(folder, "steps=200", *made),
        cwd=ROOT,
        env={**clean_environment(), "RAY_gcs_rpc_server_reconnect_timeout_s": "30"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def command_line(pid: int) -> str:
    """What a process calls itself; Ray's workers are called after their actor."""
    try:
        told = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return told.replace(b"\0", b" ").decode()


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
