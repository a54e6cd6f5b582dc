"""`ray start --head`, then `ray job submit -- areal-ray train ...` on that cluster."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
RAY = Path(sys.executable).with_name("ray")
SLOW_S = 420


def free_ports(count: int) -> list[int]:
    """Below those that the kernel hands out, so that no other Ray's process gets one meanwhile."""
    ports: list[int] = []
    for port in random.sample(range(20_000, 32_000), 500):
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            break
    return ports


def environment(home: Path) -> dict[str, str]:
    """This process's, without what a Ray or a token of the machine's user left in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "HOME": str(home), "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Iterator[tuple[str, dict[str, str]]]:
    """A cluster started as a user would, beside any other Ray of this machine."""
    # Short: Ray's sockets lie below it, and their names have a limit.
    folder = tmp_path_factory.mktemp("r")
    port, dashboard, agent, agent_grpc, client = free_ports(5)
    env = environment(folder)
    command = [
        str(RAY), "start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--ray-client-server-port={client}", "--num-cpus=2", "--disable-usage-stats",
        "--object-store-memory=200000000", "--include-dashboard=true",
    ]  # fmt: skip
    with (folder / "head.txt").open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{dashboard}", env
    finally:
        process.terminate()  # --block ends everything that it started
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def submit(head: tuple[str, dict[str, str]], *words: str) -> "subprocess.CompletedProcess[str]":
    """What `ray job submit` says in the end; a cluster takes jobs some seconds after its start."""
    url, env = head
    command = [str(RAY), "job", "submit", "--address", url, "--", sys.executable, "-m"]
    end = time.monotonic() + 120
    while True:
        done = subprocess.run(
            [*command, "areal_ray.cli", *words],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SLOW_S,
        )
        told = done.stdout + done.stderr
        if "WebSocket connection closed" in told:  # Ray lets go of a log on a busy machine
            return followed(head, told)
        is_starting = "No available agent" in told or "Failed to connect to Ray" in told
        if not is_starting or time.monotonic() > end:
            return done
        time.sleep(1.0)


def followed(head: tuple[str, dict[str, str]], told: str) -> "subprocess.CompletedProcess[str]":
    """The same of a job that goes on, by asking for its status."""
    url, env = head
    found = re.search(r"raysubmit_\w+", told)
    assert found is not None, told

    def asked(what: str) -> str:
        command = [str(RAY), "job", what, "--address", url, found[0]]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    end = time.monotonic() + SLOW_S
    while not re.search("succeeded|failed|stopped", status := asked("status")):
        assert time.monotonic() < end, status
        time.sleep(1.0)
    code = 0 if "succeeded" in status else 1
    return subprocess.CompletedProcess([], code, asked("logs") + status, "")


def words(folder: Path, *overrides: str) -> list[str]:
    recipe = str(ROOT / "tests/support/digits.yaml")
    settings = [f"cluster.fileroot={folder}", "telemetry.console=lines", "steps=2"]
    return ["train", recipe, *settings, *overrides]


@pytest.mark.timeout(SLOW_S + 60)
def test_a_submitted_job_trains_on_the_cluster_it_was_submitted_to(head, tmp_path):
    write_tiny_model(tmp_path / "tiny")
    done = submit(head, *words(tmp_path, "name=job"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "joining the Ray at" in done.stdout
    assert "starting Ray" not in done.stdout
    assert "job finished: 2 of 2 steps" in done.stdout
    assert "succeeded" in done.stdout
    assert json.loads((tmp_path / "job" / "summary.json").read_text())["outcome"] == "finished"


@pytest.mark.timeout(SLOW_S + 60)
@pytest.mark.extended
def test_a_job_with_an_unknown_key_fails_with_the_reason_in_its_last_lines(head, tmp_path):
    done = submit(head, *words(tmp_path, "admission.max_stalness=1"))
    assert done.returncode != 0
    assert "admission.max_stalness: unknown key" in (done.stdout + done.stderr)[-3000:]


@pytest.mark.timeout(SLOW_S + 60)
@pytest.mark.extended
def test_a_job_whose_reward_always_raises_fails_and_says_so(head, tmp_path):
    write_tiny_model(tmp_path / "tiny")
    raising = "reward.score=tests.support.reward_functions:always_raises"
    done = submit(head, *words(tmp_path, "name=bad", raising))
    assert done.returncode != 0
    assert "no verdict today" in (done.stdout + done.stderr)[-3000:]
