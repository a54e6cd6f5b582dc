"""Runs that learn from pairs, and a reward model as the reward of another run."""

import pytest

from areal_ray import launch
from areal_ray.recipe import parse_recipe
from areal_ray.telemetry.rows import read_rows
from tests.support.whole_runs import PATIENCE_S, ROOT, Runs, episodes_of

RECIPE = """\
kind: {kind}
name: {kind}
model: {{path: "{{fileroot}}/tiny"}}
{reference}preference:
  source: tests.support.pairs:polite
  args: {{count: 64}}
  held_out: {{args: {{first: 1000, count: 32}}, num_pairs: 32}}
  steps: 12
  batch_size: 16
  every_steps: 6
learner: {{optimizer: {{lr: 0.003}}}}
checkpoint: {{every_steps: null}}
telemetry: {{console: "off", tensorboard: false, ray_metrics: false}}
"""


def separated(runs: Runs, kind: str, *overrides: str):
    """The run folder of a finished run whose held-out pairs are told apart."""
    reference = "reference: {path: null}\n" if kind == "dpo" else ""
    text = RECIPE.format(kind=kind, reference=reference)
    recipe = parse_recipe(
        text, [f"cluster.fileroot={runs.folder}", *overrides], origin=ROOT / "mine.yaml"
    )
    summary = launch(recipe).wait(PATIENCE_S)
    assert (summary.outcome, summary.steps) == ("finished", 12)
    assert summary.eval.before == 0.5, "nothing tells them apart yet"
    assert summary.eval.after > 0.9
    assert [point.step for point in summary.eval.curve] == [0, 6, 12]
    rows = read_rows(recipe.folder / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "step"]
    assert steps[-1]["learner/loss"] < steps[0]["learner/loss"]
    assert steps[-1]["reward/margin_mean"] > 0 == steps[0]["reward/margin_mean"]
    assert (recipe.folder / "report.html").is_file()
    return recipe.folder


def test_dpo_tells_held_out_pairs_apart(runs: Runs) -> None:
    separated(runs, "dpo")


@pytest.fixture(scope="module")
def reward_model(runs: Runs):
    """The checkpoint of a reward model trained by two ranks."""
    return separated(runs, "reward_model", "learner.ranks=2") / "model"


@pytest.mark.extended
def test_a_reward_model_is_the_reward_of_a_run(runs: Runs, reward_model) -> None:
    score = "areal_ray.engines.reward_model:score"
    overrides = [f"reward.score={score}", f"reward.args={{path: {reward_model}}}", "steps=2"]
    summary = runs.run("scored", *overrides)
    assert (summary.outcome, summary.steps) == ("finished", 2)
    assert summary.ledger.failed == 0
    rewards = {episode["reward"] for episode in episodes_of(runs.folder / "scored")}
    assert len(rewards) > 4, "the score depends on what was said"
    assert None not in rewards
