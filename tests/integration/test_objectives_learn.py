"""Objectives learn the demo's task from its warm start, within a fifth of its steps.

GRPO is test_run_learning.py's.
"""

import pytest

from areal_ray import launch
from tests.support.whole_runs import ROOT, Runs, assert_books_balance

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
}
RECIPES_CLIP = ["objective.eps_clip=null", "objective.eps_clip_higher=null"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_it_lifts_held_out_accuracy_by_twenty_five_points(runs: Runs, name: str) -> None:
    handle = launch(
        ROOT / "recipes/calculator/grpo.yaml",
        [
            f"name=learn-{name}",
            f"cluster.fileroot={runs.folder}",
            f"steps={STEPS}",
            "evaluation.every_steps=0",
            "evaluation.tasks.limit=100",
            "learner.optimizer.lr_scheduler_type=constant",
            "telemetry.console=off",
            *RECIPES_CLIP,
            *OBJECTIVES[name],
        ],
    )
    summary = handle.wait(290)
    assert (summary.outcome, summary.steps) == ("finished", STEPS)
    assert summary.eval.before is not None
    assert summary.eval.after is not None
    assert summary.eval.after - summary.eval.before >= 0.25
    assert summary.staleness.max <= 2
    assert assert_books_balance(handle.folder)["trained"] == 32 * STEPS
