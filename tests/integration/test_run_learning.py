"""The demo learns: its own recipe, shortened."""

from areal_ray import launch
from tests.support.whole_runs import ROOT, Runs, assert_books_balance

STEPS = 20


def test_the_demo_lifts_held_out_accuracy_by_thirty_points(runs: Runs) -> None:
    handle = launch(
        ROOT / "recipes/calculator/grpo.yaml",
        [
            f"cluster.fileroot={runs.folder}",
            f"steps={STEPS}",
            "evaluation.every_steps=0",
            "learner.optimizer.lr_scheduler_type=constant",  # as in the first half of the demo
            "telemetry.console=off",
        ],
    )
    summary = handle.wait(290)
    assert (summary.outcome, summary.steps) == ("finished", STEPS)
    assert summary.eval.before is not None
    assert summary.eval.after is not None
    assert summary.eval.after - summary.eval.before >= 0.3
    assert summary.staleness.max <= 2
    assert assert_books_balance(handle.folder)["trained"] == 32 * STEPS
