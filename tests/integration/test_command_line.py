"""The command line on real runs: Ctrl-C, and resuming what it stopped."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_ray.run_folder import read_status
from tests.support.command_line import ROOT, clean_environment, command, descendants, is_alive

SMALL = (
    "model.path={fileroot}/model",
    "model.create=recipes.calculator.model:create",
    "admission.groups_per_step=2",
    "admission.n_samples=2",
    "learner.ppo_n_minibatches=1",
    "evaluation=null",
    "telemetry.console=lines",
    "rollout.engine.max_slots=8",
    "cluster.num_cpus=2",
)


def train(fileroot: Path, *overrides: str) -> list[str]:
    recipe = "recipes/calculator/grpo.yaml"
    return command("train", recipe, f"cluster.fileroot={fileroot}", "name=r", *SMALL, *overrides)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, str, float]]:
    """A long run that Ctrl-C stopped in the middle: its fileroot, exit code, words and time."""
    fileroot = tmp_path_factory.mktemp("stopped")
    child = subprocess.Popen(
        train(fileroot, "steps=100000"),
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 200
        while read_status(fileroot / "r").status.get("step", 0) < 2:
            assert child.poll() is None, child.communicate()[0][-3000:]
            assert time.monotonic() < end, "no step was made"
            time.sleep(0.2)
        below = descendants(child.pid)
        asked = time.monotonic()
        child.send_signal(signal.SIGINT)
        out = child.communicate(timeout=90)[0]
        took = time.monotonic() - asked
        end = time.monotonic() + 20
        while left := [pid for pid in below if is_alive(pid)]:
            assert time.monotonic() < end, f"processes are left: {left}"
            time.sleep(0.2)
        yield fileroot, child.returncode, out, took
    finally:
        if child.poll() is None:
            child.kill()


@pytest.mark.timeout(400)
def test_ctrl_c_ends_a_run_in_seconds_with_a_word_and_no_trace(stopped):
    _, code, out, took = stopped
    assert code == 130
    assert took < 60
    assert "Traceback" not in out
    assert out.count("stopping") == 1
    assert "r stopped: " in out


@pytest.mark.timeout(400)
@pytest.mark.extended
def test_two_command_lines_of_one_name_at_once_are_one_run_and_one_refusal(tmp_path):
    two = [
        subprocess.Popen(
            train(tmp_path, "steps=2"),
            cwd=ROOT,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    ends = []
    try:
        for child in two:
            out = child.communicate(timeout=180)[0]
            ends.append((child.returncode, out))
    finally:
        for child in two:
            child.kill()
    (done, _), (refused, told) = sorted(ends)
    assert (done, refused) == (0, 2), ends
    assert "is going on in another process" in told
    assert len(told.strip().splitlines()) == 1
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("finished", 2)


@pytest.mark.timeout(400)
def test_a_stopped_run_is_resumed_where_it_was(stopped):
    fileroot = stopped[0]
    done = json.loads((fileroot / "r" / "summary.json").read_text())["steps"]
    assert done >= 2
    resumed = subprocess.run(
        command("resume", str(fileroot / "r"), f"steps={done + 2}"),
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout[-2000:]
    summary = json.loads((fileroot / "r" / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["version"]) == (
        "finished",
        done + 2,
        done + 2,
    )
    rows = [json.loads(x) for x in (fileroot / "r" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row.get("kind", "step") == "step"]
    assert steps == sorted(set(steps))
