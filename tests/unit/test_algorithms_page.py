"""docs/algorithms.md: every kind is there, as the code has it, and all its recipe lines load."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.presets import CLIPS, PRESETS, AggregationName
from areal_ray.kinds import RunKind
from areal_ray.recipe import parse_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)[^\n]*\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BASE = """
kind: rl
name: page
model: {path: Qwen/Qwen2.5-1.5B-Instruct}
"""
ROLLED_OUT = """
steps: 2
tasks: {source: "recipes.gsm8k.tasks:load"}
admission: {groups_per_step: 4, n_samples: 4}
rollout: {engine: {max_context_tokens: 128}, sampling: {max_new_tokens: 64}}
"""
REWARD = 'reward: {score: "areal_ray.rewards.math:score"}'


def whole_recipe(snippet: str) -> dict[str, Any]:
    """The lines of the page in the smallest recipe they belong to."""
    said = yaml.safe_load(snippet)
    given = yaml.safe_load(BASE)
    if said.get("kind", "rl") == "rl":
        given |= yaml.safe_load(ROLLED_OUT) | yaml.safe_load(REWARD)
    elif said["kind"] == "distill" and "sft" not in said:
        given |= yaml.safe_load(ROLLED_OUT)
    return given | said


def preset_row(kind: str) -> str:
    """What the table has to say of a kind."""
    objective = ObjectiveConfig.model_validate({"kind": kind})
    bounds, weight = objective.rejection_sampling, objective.behaviour_weight
    if bounds is not None:
        lower = "" if bounds.lower is None else f"{bounds.lower:g} .. "
        weight = f"{weight}, {bounds.metric} {lower}{bounds.upper:g}"
    low, high = objective.clip_range if objective.loss in CLIPS else (0.0, 0.0)
    old = {"behaviour": "mu", "proximal": "p"}[objective.clip_centre]
    rewards, advantages = objective.reward_norm, objective.advantage_norm
    cells = (
        f"[`{kind}`](#{kind})",
        f"`{objective.loss}`",
        "-" if objective.loss == "reinforce" else old,
        weight,
        f"`{objective.aggregation}`",
        f"{low:g} .. {high:g}" if high else "-",
        f"{rewards.mean}, {rewards.std}",
        f"{advantages.mean}, {advantages.std}",
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("kind", PRESETS)
def test_a_kind_of_objective_has_a_section_with_formula_source_and_lines_that_choose_it(kind):
    section = SECTIONS[kind]
    assert "```text\n" in section
    assert re.search(r"arXiv:|19\d\d|20\d\d|AReaL's documentation", section)
    assert "Use it" in section
    chosen = [
        whole_recipe(snippet)
        for snippet in re.findall(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    ]
    assert any(recipe["objective"]["kind"] == kind for recipe in chosen)


@pytest.mark.parametrize("kind", PRESETS)
def test_the_table_says_of_a_kind_what_its_preset_does(kind):
    assert preset_row(kind) in PAGE.splitlines()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_recipe_lines_of_the_page_load(snippet):
    recipe = parse_recipe(yaml.safe_dump(whole_recipe(snippet)), origin=ROOT / "page.yaml")
    said = yaml.safe_load(snippet).get("objective", {})
    assert recipe.objective.kind == said.get("kind", "grpo")


def test_every_way_to_learn_and_every_aggregation_is_told():
    learned = set(get_args(RunKind)) - {"rl", "online", "eval", "inference"}
    assert learned <= {yaml.safe_load(snippet).get("kind") for snippet in SNIPPETS}
    assert not [name for name in get_args(AggregationName) if f"`{name}`" not in PAGE]


def test_named_metrics_exist():
    known = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:learner|mismatch)/\w+)`", PAGE))
    assert named
    assert not [name for name in named if name not in known]
