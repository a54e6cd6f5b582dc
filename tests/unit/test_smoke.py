"""--smoke: any recipe made tiny is a recipe that needs nothing of its own."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from areal_ray.agents.sample_rows import by_chance
from areal_ray.cli import app
from areal_ray.core.imports import resolve
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Trajectory
from areal_ray.errors import RecipeError
from areal_ray.preflight import check_files
from areal_ray.recipe import load_recipe, parse_recipe
from areal_ray.smoke import load_to_smoke, smoke_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def made_tiny(recipe, *overrides):
    told: list[str] = []
    return smoke_recipe(recipe, overrides, tell=told.append), told


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_recipe_made_tiny_has_all_it_names_and_needs_no_gpu(path, tmp_path):
    loaded = load_recipe(path, [f"cluster.fileroot={tmp_path}"])
    tiny, _ = made_tiny(loaded)
    assert check_files(tiny) == []
    assert tiny.kind == loaded.kind
    assert tiny.run_name == f"{loaded.run_name}-smoke"
    assert tiny.cluster.n_gpus_per_node == tiny.rollout.num_gpus == tiny.learner.num_gpus == 0
    assert parse_recipe(tiny.to_yaml(), origin=path).digest == tiny.digest
    assert tiny.objective.kind == loaded.objective.kind
    paths = tiny.companions
    for companion in (paths.reference_path, paths.teacher_path, paths.critic_path):
        assert companion == "" or Path(companion).is_relative_to(tiny.model_path)


def recipe_of(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    return load_recipe(tmp_path / "mine.yaml", [f"cluster.fileroot={tmp_path}"])


RL = """\
kind: rl
name: mine
steps: 50
model: {path: owner/model}
tasks: {source: "mine_tasks:tasks", args: {path: rows.jsonl}}
reward: {score: "mine_tasks:score", args: {bonus: 2}}
admission: {groups_per_step: 8, n_samples: 8}
"""
CODE = """\
from areal_ray.agents import Task
from areal_ray.agents.jsonl import read_jsonl

def tasks(path):
    for n, row in enumerate(read_jsonl(path)):
        yield Task(f"t{n}", ({"role": "user", "content": row["q"]},))

async def score(task, trajectory, bonus):
    return {"reward": bonus}
"""


def test_the_first_rows_of_a_source_are_taken_where_it_can_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_tasks.py").write_text(CODE)
    rows = [json.dumps({"q": f"row {n}"}) for n in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    tiny, told = made_tiny(recipe_of(tmp_path, RL))
    assert told == []
    made = list(resolve(tiny.tasks.source, tiny.import_roots)(**tiny.tasks.args))
    assert [task.messages[0]["content"] for task in made] == [f"row {n}" for n in range(8)]
    (tmp_path / "rows.jsonl").unlink()
    tiny, told = made_tiny(recipe_of(tmp_path, RL))
    assert len(told) == 1
    assert "tasks: mine_tasks:tasks cannot be read here (rows.jsonl: cannot be read" in told[0]
    made = list(resolve(tiny.tasks.source)(**tiny.tasks.args))
    assert len(made) == 8
    assert all(isinstance(task, Task) and task.answer for task in made)


def test_a_source_that_does_not_exist_is_a_defect_of_the_recipe(tmp_path):
    with pytest.raises(RecipeError, match="no module 'mine_tusks'"):
        made_tiny(recipe_of(tmp_path, RL.replace("mine_tasks:tasks", "mine_tusks:tasks")))


def test_whatever_is_sampled_no_two_episodes_of_a_tiny_run_are_rewarded_alike():
    nothing = np.zeros(0, np.int32)
    arrays = dict.fromkeys(("token_ids", "versions", "turn_ids"), nothing)
    one = Trajectory(**arrays, loss_mask=nothing > 0, behaviour_logprobs=nothing / 1.0,
                     task_id="t", group_id="g", episode_id="e", final_text="ok")  # fmt: skip

    def rewarded(**fields):
        score = "tests.support.reward_functions:as_said"
        return asyncio.run(by_chance(Task("t", ()), replace(one, **fields), score, {}, [ROOT]))

    names = [f"0/task-{task}/{attempt}/{i}" for task in "ab" for attempt in (0, 1) for i in "01"]
    rewards = [rewarded(episode_id=name) for name in names]
    assert len(set(rewards)) == len(names)
    assert all(1.0 <= reward <= 1.5 for reward in rewards)
    assert rewards == [rewarded(episode_id=name) for name in names]
    assert rewarded(final_text="abstain") is None


def test_what_the_user_says_wins_over_what_is_made_tiny():
    loaded = load_recipe(ROOT / "recipes/gsm8k/dapo.yaml")
    tiny, _ = made_tiny(loaded, "steps=5", "admission.n_samples=3", "evaluation=null")
    assert (tiny.steps, tiny.admission.n_samples, tiny.evaluation) == (5, 3, None)
    assert tiny.admission.drop_equal_rewards
    assert tiny.objective.reward_shaping.overlong_tokens == 4


def shown(*words):
    told = CliRunner().invoke(app, ["train", *map(str, words), "--smoke", "--print-config"])
    assert told.exit_code == 0, told.output or told.exception
    return parse_recipe(told.stdout)


@pytest.mark.parametrize(
    ("recipe", "override", "value"),
    [
        ("gsm8k/ppo.yaml", "admission.groups_per_step=2", lambda r: r.admission.groups_per_step),
        ("gsm8k/ppo.yaml", "admission.groups_per_step=3", lambda r: r.admission.groups_per_step),
        ("gsm8k/ppo.yaml", "learner.ppo_n_minibatches=1", lambda r: r.learner.ppo_n_minibatches),
        ("gsm8k/grpo.yaml", "rollout.replicas=3", lambda r: r.rollout.replicas),
        ("gsm8k/grpo.yaml", "rollout.engine.device=cpu", lambda r: r.rollout.engine.device),
    ],
)
def test_an_override_need_only_fit_what_is_made_tiny(recipe, override, value):
    tiny = shown(ROOT / "recipes" / recipe, override)
    assert str(value(tiny)) == override.partition("=")[2]


def test_checks_of_a_section_see_the_final_recipe_too(tmp_path):
    (tmp_path / "mine_tasks.py").write_text(CODE)
    recipe_of(tmp_path, RL.replace("n_samples: 8", "n_samples: 8, min_scored_samples: 6"))
    tiny = shown(tmp_path / "mine.yaml", "admission.n_samples=3")
    assert (tiny.admission.n_samples, tiny.admission.min_scored_samples) == (3, 2)


def test_what_is_wrong_in_the_end_is_told_and_so_is_a_file_that_is_wrong_by_itself(tmp_path):
    recipe = ROOT / "recipes/gsm8k/ppo.yaml"
    with pytest.raises(RecipeError, match="unknown key"):
        load_to_smoke(recipe, ["admission.groups_per_step=2", "admission.group=2"])
    loaded = load_to_smoke(recipe, ["kind=sft", "admission.groups_per_step=2"])
    with pytest.raises(RecipeError, match="sft: is missing"):
        smoke_recipe(loaded, ["kind=sft"], tell=print)
    (tmp_path / "bad.yaml").write_text(RL + "learner: {ppo_n_minibatches: 3}\n")
    with pytest.raises(RecipeError, match="ppo_n_minibatches"):
        load_to_smoke(tmp_path / "bad.yaml")


def test_a_source_of_the_users_is_made_tiny_like_the_recipes_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_tasks.py").write_text(CODE)
    (tmp_path / "other.jsonl").write_text("\n".join(json.dumps({"q": f"{n}"}) for n in range(50)))
    recipe_of(tmp_path, RL)
    tiny = shown(tmp_path / "mine.yaml", "tasks.args.path=other.jsonl", "reward.args.bonus=3")
    made = list(resolve(tiny.tasks.source, [tmp_path])(**tiny.tasks.args))
    assert [task.messages[0]["content"] for task in made] == [f"{n}" for n in range(8)]
    assert tiny.reward.args["args"] == {"bonus": 3}


def test_the_command_line_shows_the_tiny_recipe():
    recipe = str(ROOT / "recipes/gsm8k/gspo.yaml")
    shown = CliRunner().invoke(app, ["train", recipe, "--smoke", "--print-config"])
    assert shown.exit_code == 0, shown.output
    assert "name: gsm8k-gspo-smoke" in shown.output
    assert "create: areal_ray.engines.tiny_model:create" in shown.output
