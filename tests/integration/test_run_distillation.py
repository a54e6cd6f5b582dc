"""A student that learns from its teacher: on its own answers, and on given ones."""

import time
from pathlib import Path

import numpy as np
import pytest

from areal_ray import launch
from areal_ray.engines.sft import SftExample
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import LearnerConfig, OptimizerConfig
from areal_ray.gateway.template import ChatTemplate
from areal_ray.recipe import parse_recipe
from areal_ray.runtime.sft_source import tokenize
from areal_ray.telemetry.rows import read_rows
from tests.support.digits import conversations
from tests.support.whole_runs import PATIENCE_S, ROOT, Runs, assert_books_balance

TOP = """\
kind: distill
name: {name}
model: {{path: "{{fileroot}}/student"}}
teacher: {{path: "{{fileroot}}/teacher"}}
telemetry: {{console: "off", tensorboard: false, ray_metrics: false}}
checkpoint: {{every_steps: null}}
"""
ON_POLICY = """\
steps: 80
tasks: {source: "tests.support.digits:tasks"}
admission: {groups_per_step: 16, n_samples: 8, max_head_offpolicyness: 1}
objective: {kind: opd}
rollout:
  engine: {kind: torch, max_context_tokens: 128}
  sampling: {temperature: 1.0, max_new_tokens: 3}
learner: {optimizer: {lr: 0.003, lr_scheduler_type: linear}}
"""
HELD_OUT = """\
reward: {score: "tests.support.digits:exact"}
evaluation: {tasks: {source: "tests.support.digits:tasks", limit: 10}}
"""
OFFLINE = """\
sft:
  phases: [{source: "tests.support.digits:conversations", steps: 20, batch_size: 10}]
  distillation: {top_k: 16}
learner: {optimizer: {lr: 0.003}}
"""


def examples(folder: Path) -> list[SftExample]:
    template = ChatTemplate.from_folder(folder)
    return [tokenize(template, said, "digits") for said in conversations()]


def exact_match(folder: Path, model: Path) -> float:
    """Share of the ten answers that a model gives, teacher-forced."""
    return TorchTrainEngine(model, LearnerConfig()).evaluate_sft(examples(folder)).exact_match


@pytest.fixture(scope="module")
def models(runs: Runs) -> Path:
    """A teacher that can repeat a digit, and a student from half-way there."""
    engine = TorchTrainEngine(
        runs.folder / "tiny", LearnerConfig(optimizer=OptimizerConfig(lr=2e-3))
    )
    given = examples(runs.folder / "tiny")
    is_student_out = False
    for _ in range(400):
        engine.sft_step(given)
        seen = engine.evaluate_sft(given)
        if seen.loss <= 1.6 and not is_student_out:
            engine.export(runs.folder / "student")
            is_student_out = True
        if seen.exact_match == 1.0 and seen.loss < 0.05:
            break
    engine.export(runs.folder / "teacher")
    assert exact_match(runs.folder / "tiny", runs.folder / "student") <= 0.7
    return runs.folder


def finished(text: str, name: str, folder: Path):
    recipe = parse_recipe(
        TOP.format(name=name) + text, [f"cluster.fileroot={folder}"], origin=ROOT / "mine.yaml"
    )
    summary = launch(recipe).wait(PATIENCE_S)
    assert summary.outcome == "finished"
    return summary, [r for r in read_rows(recipe.folder / "metrics.jsonl") if r["kind"] == "step"]


@pytest.mark.extended
def test_on_its_own_answers_the_student_comes_within_five_points_of_its_teacher(models) -> None:
    summary, rows = finished(ON_POLICY + HELD_OUT, "opd", models)
    assert summary.eval.before <= 0.7
    assert summary.eval.after >= 0.95, "the teacher knows all"
    assert rows[-1]["learner/kl_teacher_nats"] < 0.5 * rows[0]["learner/kl_teacher_nats"]
    assert all("reward/mean" not in row for row in rows), "nobody scored what was trained on"


def test_without_rewards_no_reward_actor_is_there_and_the_books_balance(models) -> None:
    import ray

    text = ON_POLICY.replace("steps: 80", "steps: 3")
    recipe = parse_recipe(
        TOP.format(name="unscored") + text,
        [f"cluster.fileroot={models}", "agent.run=tests.support.digits:often_raises"],
        origin=ROOT / "mine.yaml",
    )
    handle = launch(recipe)
    spawned = set()
    while handle.status().is_running:
        spawned |= {n for n in ray.util.list_named_actors() if n.startswith("unscored/")}
        if handle.metrics():
            break
        time.sleep(0.1)
    handle.wait(PATIENCE_S)
    roles = {name.split("/")[1].rsplit("-", 1)[0] for name in spawned}
    assert roles == {"rollout", "learner", "agent", "param"}
    counts = assert_books_balance(models / "unscored")
    assert counts["trained"] == 3 * 16
    rows = [r for r in read_rows(models / "unscored/metrics.jsonl") if r["kind"] == "step"]
    assert sum(row["agent/agent_error_episodes"] for row in rows) > 0
    trained = sum(row["learner/sequences"] for row in rows)
    assert 0 < trained <= sum(row["agent/episodes"] for row in rows)


@pytest.mark.extended
def test_on_given_answers_the_student_comes_closer_to_its_teacher(models) -> None:
    _, rows = finished(OFFLINE, "offline", models)
    name = "learner/kl_teacher_nats"
    assert rows[-1][name] < 0.3 * rows[0][name]
    teacher, student = (
        exact_match(models / "tiny", models / part) for part in ("teacher", "offline/model")
    )
    assert student >= teacher - 0.05
    assert np.isfinite(rows[-1]["learner/loss"])
