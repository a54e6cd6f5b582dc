"""The demo learns, and other objectives learn its task from the same warm start, in fewer steps.

In one file, so that the warm start is made once.
"""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_ray import launch
from areal_ray.telemetry.episodes import EPISODES_FILE
from areal_ray.telemetry.rows import read_rows
from areal_ray.telemetry.sinks import METRICS_FILE
from areal_ray.telemetry.summary import Summary
from tests.support.needs import needs_deepspeed, needs_vllm
from tests.support.online import complaints_of, health_of, program_at, sessions_trained
from tests.support.vllm_process import engine_process_below
from tests.support.whole_runs import (
    ROOT,
    Runs,
    assert_books_balance,
    events_of,
    pid_of,
    until_step,
)

DEMO_STEPS = 14
STEPS = 8
OBJECTIVES = {
    "ppo": ["objective.kind=ppo", "critic={optimizer: {lr: 0.001}}"],
    "rloo": ["objective.kind=rloo"],
    "dapo": [
        "objective.kind=dapo",
        "objective.reward_shaping={overlong_tokens: 8}",
        "admission.drop_equal_rewards=true",
    ],
    "gspo": ["objective.kind=gspo"],
    "icepop": ["objective.kind=icepop"],
    "kpop": ["objective.kind=kpop"],
    "adapters": ["model.lora={rank: 8}", "learner.optimizer.lr=0.003"],
}
TRAIN_ENGINES = {
    "fsdp": ["learner.engine.kind=fsdp", "learner.ranks=2"],
    "deepspeed": [
        "learner.engine={kind: deepspeed, zero_stage: 3, max_tokens_per_mb: 16384}",
        "learner.ranks=2",
    ],
}
RECIPES_CLIP = ["objective.eps_clip=null", "objective.eps_clip_higher=null"]
ONLINE_PROGRAMS = {"openai_agent": ("--groups", "40"), "anthropic_agent": ()}
PATIENCE_S = 500.0
REFUSALS = ("num_refused", "num_failed", "num_gone", "num_defects")

pytestmark = pytest.mark.timeout(PATIENCE_S + 60)


def lifted(runs: Runs, steps: int, *overrides: str) -> float:
    """Points of held-out accuracy that a shortened run of the demo's recipe gains."""
    handle = launch(
        ROOT / "recipes/calculator/grpo.yaml",
        [
            f"cluster.fileroot={runs.folder}",
            f"steps={steps}",
            "evaluation.every_steps=0",
            "learner.optimizer.lr_scheduler_type=constant",  # as in the first half of the demo
            "telemetry.console=off",
            *overrides,
        ],
    )
    summary: Summary = handle.wait(PATIENCE_S)
    assert (summary.outcome, summary.steps) == ("finished", steps)
    assert summary.eval.before is not None
    assert summary.eval.after is not None
    assert summary.staleness.max <= 2
    assert assert_books_balance(handle.folder)["trained"] == 32 * steps
    return summary.eval.after - summary.eval.before


def test_the_demo_lifts_held_out_accuracy_by_thirty_points(runs: Runs) -> None:
    assert lifted(runs, DEMO_STEPS) >= 0.3


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.extended
def test_another_objective_lifts_it_by_twenty_five_points(runs: Runs, name: str) -> None:
    shorter = [f"name=learn-{name}", "evaluation.tasks.limit=100"]
    assert lifted(runs, STEPS, *shorter, *RECIPES_CLIP, *OBJECTIVES[name]) >= 0.25


@pytest.mark.parametrize("name", ["fsdp", pytest.param("deepspeed", marks=needs_deepspeed)])
@pytest.mark.extended
def test_another_train_engine_lifts_it_by_twenty_five_points(runs: Runs, name: str) -> None:
    shorter = [f"name=learn-{name}", "evaluation.tasks.limit=100"]
    assert lifted(runs, STEPS, *shorter, *TRAIN_ENGINES[name]) >= 0.25


@pytest.mark.parametrize(
    "program", ["openai_agent", pytest.param("anthropic_agent", marks=pytest.mark.extended)]
)
def test_the_demo_learns_online_from_a_program_on_either_sdk(runs: Runs, program: str) -> None:
    """As it does in process: no request of the program's fails while weights are swapped."""
    steps = 8
    overrides = [f"cluster.fileroot={runs.folder}", f"steps={steps}", "telemetry.console=off"]
    constant = "learner.optimizer.lr_scheduler_type=constant"
    named = f"name=learn-{program}"
    handle = launch(ROOT / "recipes/online/calculator.yaml", [*overrides, constant, named])
    log = runs.folder / f"{program}.jsonl"
    with program_at(handle, log, program, *ONLINE_PROGRAMS[program]):
        until_step(handle, steps - 1, PATIENCE_S)
        seen = health_of(handle)
        summary = handle.wait(PATIENCE_S)
        complaints = complaints_of(log)
    assert (summary.outcome, summary.steps, summary.version) == ("finished", steps, steps)
    assert not complaints
    assert seen["num_calls"] > 8 * 32 * (steps - 1)
    assert not [name for name in REFUSALS if seen[name]], seen
    assert summary.staleness.max <= 2
    assert assert_books_balance(handle.folder)["trained"] == 32 * steps
    taken = sessions_trained(handle.folder)
    assert len(set(taken)) == len(taken) == 8 * 32 * steps
    rewards = [row["reward/mean"] for row in read_rows(handle.folder / METRICS_FILE)]
    assert sum(rewards[-2:]) / 2 - rewards[0] >= 0.2, rewards
    key = handle.gateway.admin_key
    told = [path for path in handle.folder.rglob("*") if path.is_file()]
    assert not [path for path in told if key.encode() in path.read_bytes()]


@needs_vllm
def test_the_demo_learns_on_vllm_with_versions_published_inside_running_requests(
    runs: Runs,
) -> None:
    """And goes on when vLLM's process is killed: Ray starts the replica anew."""
    steps = 8
    handle = launch(
        ROOT / "recipes/calculator/grpo.yaml",
        [
            f"cluster.fileroot={runs.folder}",
            "name=learn-vllm",
            f"steps={steps}",
            "rollout.engine.kind=vllm",
            "evaluation=null",  # it would be a vLLM of its own
            "deadlines.start_s=400",
            "learner.optimizer.lr_scheduler_type=constant",
            *RECIPES_CLIP,
            "telemetry={console: 'off', dump_every_steps: 1, dump_groups: 32}",
        ],
    )
    until_step(handle, 5)
    os.kill(engine_process_below(pid_of("learn-vllm", "rollout-0")), signal.SIGKILL)
    summary = handle.wait(PATIENCE_S)
    assert (summary.outcome, summary.steps) == ("finished", steps)
    assert summary.staleness.max <= 2
    assert assert_books_balance(handle.folder)["trained"] == 32 * steps
    rewards = [row["reward/mean"] for row in read_rows(handle.folder / METRICS_FILE)]
    assert sum(rewards[-2:]) / 2 - rewards[0] >= 0.2, rewards
    assert len(set(versions_met(handle.folder))) >= 3
    assert "rollout-0" in events_of(handle.folder), "the death of its vLLM was not told"


def versions_met(folder: Path) -> Iterator[int]:
    """Versions that were published while a turn was being sampled and went on with it."""
    for line in (folder / EPISODES_FILE).read_text(encoding="utf-8").splitlines():
        tokens = [token for token in json.loads(line)["tokens"] if token["mask"]]
        for before, after in itertools.pairwise(tokens):
            if before["turn"] == after["turn"] and before["version"] != after["version"]:
                assert before["version"] < after["version"]
                yield after["version"]
