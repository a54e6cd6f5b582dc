"""Starts whole small runs on the shared Ray, and reads what they left behind."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_ray.core.journal import read_ledger
from areal_ray.telemetry.rows import read_rows
from tests.support.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tests/support/digits.yaml"
PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "240"))
"""For a small run, which takes a few seconds alone, on a machine with more to do."""

_ENDS = ("trained", "dropped", "failed")


class Runs:
    """All small runs of a pytest session: one folder, one model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_tiny_model(folder / "tiny")

    def start(self, name: str, *overrides: str, **how: Any) -> Any:
        """A handle of the started run. `how` goes to launch()."""
        from areal_ray import launch

        return launch(
            RECIPE, [f"name={name}", f"cluster.fileroot={self.folder}", *overrides], **how
        )

    def run(self, name: str, *overrides: str, **how: Any) -> Any:
        """The summary of a run that ended well."""
        handle = self.start(name, *overrides, **how)
        try:
            return handle.wait(PATIENCE_S)
        except TimeoutError:
            told = handle.status()
            handle.stop()
            raise AssertionError(f"{name} goes on: {told}") from None

    def failure(self, name: str, *overrides: str, **how: Any) -> BaseException:
        """What a run ended with."""
        handle = self.start(name, *overrides, **how)
        try:
            summary = handle.wait(PATIENCE_S)
        except TimeoutError:
            handle.stop()
            raise
        except Exception as error:
            return error
        raise AssertionError(f"{name} ended as {summary.outcome}; it should have failed")


@pytest.fixture(scope="session")
def runs(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Whole runs on the shared Ray session."""
    return Runs(tmp_path_factory.mktemp("runs"))


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Wait for a true value; that value."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {patience_s:g} s for {what}")


def until_step(handle: Any, step: int, patience_s: float = PATIENCE_S) -> None:
    """Wait until a run has done a step; its failure is raised at once."""

    def reached() -> bool:
        if steps_of(handle.folder)[-1:] >= [step]:
            return True
        if not handle.status().is_running:
            handle.wait(1.0)
        return False

    until(reached, f"step {step} of {handle.folder.name}", patience_s)


def steps_of(folder: Path) -> list[int]:
    """Steps with a row, in order."""
    return [row["step"] for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "step"]


def episodes_of(folder: Path) -> list[dict[str, Any]]:
    """Every episode that was trained on and written down."""
    lines = (folder / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def staleness_of(episode: dict[str, Any]) -> set[int]:
    """Learner version at consumption - behaviour version, of every sampled token."""
    consumed_at = episode["step"] - 1
    return {consumed_at - t["version"] for t in episode["tokens"] if t["mask"]}


def events_of(folder: Path) -> str:
    """Everything the run told."""
    return (folder / "log.txt").read_text(encoding="utf-8")


def trained_groups(folder: Path) -> dict[int, list[str]]:
    """Ids of the groups that each step trained on; of a step taken twice, the last time."""
    records = [r for r in read_ledger(folder / "journal") if r["event"] == "trained"]
    return {record["step"]: record["groups"] for record in records}


def trained_tasks(folder: Path) -> list[list[str]]:
    """Task ids of each step's groups, sorted, in the order of the steps."""
    by_step = trained_groups(folder)
    return [sorted(group.split("/")[1] for group in by_step[step]) for step in sorted(by_step)]


def assert_books_balance(folder: Path, *, resumed: bool = False) -> dict[str, int]:
    """Every group ended at most once, and the summary's ledger adds up; its counts.

    Of a resumed run only what was trained is compared with the journal, the last time each step
    was taken: what ended after the last checkpoint was forgotten with the weights it led to.
    """
    ends: Counter[str] = Counter()
    for record in read_ledger(folder / "journal"):
        if record["event"] in _ENDS and not resumed:
            ends.update(record["groups"] if "groups" in record else [record["group"]])
    if resumed:
        ends.update(group for groups in trained_groups(folder).values() for group in groups)
    twice = [group for group, count in ends.items() if count > 1]
    assert not twice, f"ended twice: {twice}"
    counts = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["ledger"]
    assert counts["admitted"] == sum(counts[name] for name in (*_ENDS, "in_flight"))
    compared = ("trained",) if resumed else _ENDS
    assert sum(ends.values()) == sum(counts[name] for name in compared)
    return counts


def actor_names(run_name: str) -> list[str]:
    """Actors of a run that are there."""
    import ray

    return [name for name in ray.util.list_named_actors() if name.startswith(f"{run_name}/")]


def actor_of(run_name: str, name: str) -> Any:
    """Handle of a run's actor, by the name its messages use."""
    import ray

    def found() -> Any:
        for spawned in actor_names(run_name):
            if spawned.startswith(f"{run_name}/{name}/"):
                return ray.get_actor(spawned)
        return None

    return until(found, f"actor {name} of {run_name}")


def pid_of(run_name: str, name: str) -> int:
    """Process of a run's actor."""
    import ray

    pid: int = ray.get(
        actor_of(run_name, name).__ray_call__.remote(lambda self: os.getpid()), timeout=60
    )
    return pid
