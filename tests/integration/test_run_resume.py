"""Runs that stop and go on: the same steps as if they had not."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_ray.core.journal import read_ledger
from tests.support.command_line import clean_environment, command
from tests.support.whole_runs import (
    ROOT,
    Runs,
    assert_books_balance,
    episodes_of,
    staleness_of,
    steps_of,
    trained_tasks,
    until,
    until_step,
)

# Synchronous: which tasks a step takes is then fixed by the seed alone. Fewer tasks than the run
# takes, so that it goes through more than one epoch.
FIXED = (
    "admission.max_head_offpolicyness=0",
    "tasks.args.num_tasks=10",
    "checkpoint.every_steps=1",
)


@pytest.fixture(scope="module")
def straight(runs: Runs) -> Path:
    """A run of six steps without a break."""
    assert runs.run("straight", *FIXED).steps == 6
    return runs.folder / "straight"


def test_a_stopped_run_goes_on_with_the_tasks_versions_and_counts_it_would_have_had(
    runs: Runs, straight: Path
) -> None:
    handle = runs.start("broken", *FIXED, "agent.run=tests.support.digits:slow_tool")
    until_step(handle, 2)
    handle.stop()
    before = handle.wait(120)
    assert before.outcome == "stopped"
    assert 2 <= before.steps < 6
    assert before.version == before.steps
    resumed = runs.run("broken", *FIXED, resume=True)
    folder = runs.folder / "broken"
    assert (resumed.outcome, resumed.steps, resumed.version) == ("finished", 6, 6)
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6]
    assert trained_tasks(folder) == trained_tasks(straight)
    assert resumed.ledger.trained == 24
    counts = resumed.ledger
    ended = counts.trained + counts.dropped + counts.failed + counts.in_flight
    assert counts.admitted == ended
    assert resumed.staleness.histogram == {"0": 24}
    told = [r for r in read_ledger(folder / "journal") if r["event"] == "resumed"]
    assert [(r["step"], r["version"]) for r in told] == [(before.steps, before.version)]
    assert f"after step {before.steps}, at" in (folder / "report.html").read_text(encoding="utf-8")
    assert set().union(*map(staleness_of, episodes_of(folder))) == {0}


def test_a_truncated_checkpoint_is_passed_over_for_the_one_before_it(
    runs: Runs, straight: Path
) -> None:
    folder = runs.folder / "truncated"
    shutil.copytree(straight, folder, ignore=shutil.ignore_patterns(".lock"))
    model = folder / "checkpoints/step-000006/model.safetensors"
    model.write_bytes(model.read_bytes()[:-100])
    told: list[str] = []
    # With another number of ranks, too: what a checkpoint holds does not depend on it.
    more = ("steps=7", "learner.ranks=2")
    resumed = runs.run("truncated", *FIXED, *more, resume=True, progress=Listener(told))
    assert (resumed.outcome, resumed.steps, resumed.version) == ("finished", 7, 7)
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6, 7]
    assert any("step-000006" in line and "model.safetensors" in line for line in told)
    assert any("resumes after step 5" in line for line in told)
    assert trained_tasks(folder)[:6] == trained_tasks(straight)
    assert resumed.ledger.trained == 28


@pytest.mark.parametrize("stop_at", ["resumes after", "starting actors"])
@pytest.mark.extended
def test_a_resumption_stopped_before_it_trains_keeps_what_the_run_came_to(
    runs: Runs, straight: Path, stop_at: str
) -> None:
    name = "halted-" + stop_at.split()[0]
    shutil.copytree(straight, runs.folder / name, ignore=shutil.ignore_patterns(".lock"))
    told: list[str] = []
    handle = runs.start(name, *FIXED, "steps=9", resume=True, progress=Listener(told))
    until(lambda: any(line.startswith(stop_at) for line in told), stop_at)
    handle.stop()
    summary = handle.wait(120)
    assert (summary.outcome, summary.steps, summary.version) == ("stopped", 6, 6)
    assert (summary.ledger.admitted, summary.ledger.trained) >= (24, 24)
    assert summary.staleness.histogram == {"0": 24}


def test_a_run_without_a_checkpoint_cannot_be_resumed_and_says_so(runs: Runs) -> None:
    (runs.folder / "empty" / "checkpoints").mkdir(parents=True)
    (runs.folder / "empty" / "recipe.yaml").write_text("")
    error = runs.failure("empty", *FIXED, resume=True)
    assert "no whole checkpoint" in str(error)


def test_what_an_ended_run_leaves_is_whole(runs: Runs, straight: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    counts = assert_books_balance(straight)
    assert (counts["trained"], counts["failed"], counts["dropped"]) == (24, 0, 0)
    names = sorted(p.name for p in (straight / "checkpoints").iterdir() if p.is_dir())
    assert names == ["step-000004", "step-000005", "step-000006"]
    model = AutoModelForCausalLM.from_pretrained(straight / "model")
    saved = AutoModelForCausalLM.from_pretrained(straight / "checkpoints/step-000006")
    for ours, theirs in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    tokenizer = AutoTokenizer.from_pretrained(straight / "model")
    assert tokenizer.chat_template
    summary = json.loads((straight / "summary.json").read_text(encoding="utf-8"))
    wanted = {
        "outcome", "steps", "version", "wall_s", "eval", "reward", "staleness", "ledger",
        "tokens", "publish", "driver", "seed",
    }  # fmt: skip
    assert wanted <= summary.keys()
    assert "<svg" in (straight / "report.html").read_text(encoding="utf-8")


class Listener:
    """A display that only listens to events."""

    def __init__(self, told: list[str]) -> None:
        self.on_event = told.append

    def __getattr__(self, name: str):
        return lambda *args, **fields: None


FSDP = ("learner.engine={kind: fsdp}", "learner.ranks=2")
TORCH = ("learner.engine={kind: torch}", "learner.ranks=1")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("before", "after"), [(FSDP, TORCH), (TORCH, FSDP)], ids=["fsdp-torch", "torch-fsdp"]
)
def test_a_run_is_resumed_with_another_train_engine_and_takes_the_step_that_its_own_would_have(
    runs: Runs, before: tuple[str, ...], after: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """By `areal-ray resume`, as when a run moves to another machine."""
    name = request.node.callspec.id
    assert runs.run(name, *FIXED, "steps=3", *before).steps == 3
    folder, same = runs.folder / name, runs.folder / f"{name}-same"
    shutil.copytree(folder, same)
    assert runs.run(same.name, *FIXED, "steps=4", *before, resume=True).steps == 4
    words = command("resume", name, "steps=4", *after, "--fileroot", str(runs.folder))
    done = subprocess.run(
        words, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_of(folder) == steps_of(same) == [1, 2, 3, 4]
    assert trained_tasks(folder) == trained_tasks(same)
    assert (runs.folder / name / "recipe.yaml").read_text().count(after[0].partition(" ")[2][:-1])
    third, here, there = weights_of(folder, 3), weights_of(folder, 4), weights_of(same, 4)
    moved = max((here[key] - third[key]).abs().max() for key in third)
    apart = max((here[key] - there[key]).abs().max() for key in third)
    assert moved > 1e-4
    assert apart < 1e-5
    (state,) = (folder / "checkpoints/step-000004").glob("*.pt")
    assert torch.load(state, weights_only=True)["steps_taken"] == 4


def weights_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Of the checkpoint after a step."""
    return load_file(folder / f"checkpoints/step-{step:06d}/model.safetensors")
