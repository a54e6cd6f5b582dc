"""The demo learns, and other objectives learn its task from the same warm start, in fewer steps.

In one file, so that the warm start is made once.
"""

import pytest

from areal_ray import launch
from areal_ray.telemetry.summary import Summary
from tests.support.whole_runs import ROOT, Runs, assert_books_balance

DEMO_STEPS = 20
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
TRAIN_ENGINES = {"fsdp": ["learner.engine.kind=fsdp", "learner.ranks=2"]}
RECIPES_CLIP = ["objective.eps_clip=null", "objective.eps_clip_higher=null"]
PATIENCE_S = 500.0

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
def test_another_objective_lifts_it_by_twenty_five_points(runs: Runs, name: str) -> None:
    shorter = [f"name=learn-{name}", "evaluation.tasks.limit=100"]
    assert lifted(runs, STEPS, *shorter, *RECIPES_CLIP, *OBJECTIVES[name]) >= 0.25


@pytest.mark.parametrize("name", TRAIN_ENGINES)
def test_another_train_engine_lifts_it_by_twenty_five_points(runs: Runs, name: str) -> None:
    shorter = [f"name=learn-{name}", "evaluation.tasks.limit=100"]
    assert lifted(runs, STEPS, *shorter, *TRAIN_ENGINES[name]) >= 0.25
