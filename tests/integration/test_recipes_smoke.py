"""Every recipe of a named algorithm, made tiny, takes its two steps as a real Ray graph."""

import json
from pathlib import Path

import pytest

from areal_ray import launch
from areal_ray.recipe import load_recipe
from areal_ray.smoke import smoke_recipe
from areal_ray.telemetry.rows import read_rows
from tests.support.whole_runs import PATIENCE_S, ROOT, Runs

RECIPES = [
    *(p for p in sorted((ROOT / "recipes/gsm8k").glob("*.yaml")) if "cpu" not in p.stem),
    *sorted((ROOT / "recipes/hh_rlhf").glob("*.yaml")),
]
CORE = {"ppo", "sft", "reward_model"}
"""For the short suite; other files of it run the other kinds."""
QUIET = ['telemetry.console="off"', "telemetry.tensorboard=false", "telemetry.ray_metrics=false"]


def fewer_actors(kind: str) -> list[str]:
    """Overrides that leave held-out tasks out: they would double the processes of each run."""
    return {"rl": ["evaluation=null"], "distill": ["evaluation=null", "reward=null"]}.get(kind, [])


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in CORE else pytest.mark.extended)
        for path in RECIPES
    ],
)
def test_a_recipe_made_tiny_takes_two_steps_and_leaves_a_model(runs: Runs, path: Path) -> None:
    loaded = load_recipe(path, [f"cluster.fileroot={runs.folder}", *QUIET])
    told: list[str] = []
    recipe = smoke_recipe(loaded, fewer_actors(loaded.kind), tell=told.append)
    summary = launch(recipe, overwrite=True).wait(PATIENCE_S)
    assert (summary.outcome, summary.steps) == ("finished", 2)
    rows = [r for r in read_rows(recipe.folder / "metrics.jsonl") if r["kind"] == "step"]
    assert len(rows) == 2
    assert all(row["learner/updates"] >= 1 for row in rows)
    assert not any(row["learner/empty_updates"] for row in rows)
    assert all(row["learner/trained_tokens"] > 0 for row in rows)
    config = json.loads((recipe.folder / "model/config.json").read_text())
    is_scored = loaded.kind == "reward_model"
    assert config["architectures"][0].endswith("SequenceClassification") == is_scored
    for line in told:  # the tests are offline: made-up rows, and the reason
        assert "cannot be read here" in line
