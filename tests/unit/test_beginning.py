"""A run that has no checkpoint yet goes on from step 0, by the model that it began with."""

import shutil

import pytest

from areal_ray.actors import StartPoint
from areal_ray.beginning import BEGINNING_FILE, record_beginning
from areal_ray.checkpoint import STATE_FORMAT, Checkpoints
from areal_ray.engines.model_files import weights_mark
from areal_ray.errors import DataError
from areal_ray.prepare import begin_at
from areal_ray.recipe import Recipe, parse_recipe
from areal_ray.run_folder import conflict
from areal_ray.runtime.saving import CHECKPOINTS_FOLDER
from areal_ray.session import Session
from areal_ray.telemetry.progress import QuietProgress
from tests.support.tiny_models import write_tiny_model

ONLINE = """\
kind: online
name: r
steps: 3
model: {path: "{fileroot}/model"}
admission: {groups_per_step: 2, n_samples: 2, max_head_offpolicyness: 1}
"""
STATE = {
    "format": STATE_FORMAT,
    "step": 0,
    "version": 0,
    "tasks": {"next_slot": 0},
    "unfinished": [],
}


@pytest.fixture
def recipe(tmp_path):
    write_tiny_model(tmp_path / "model")
    made = parse_recipe(ONLINE, [f"cluster.fileroot={tmp_path}"])
    made.folder.mkdir()
    (made.folder / "recipe.yaml").write_text(made.to_yaml())
    record_beginning(made, StartPoint(made.model_path), STATE)
    return made


def resumed(recipe: Recipe) -> StartPoint:
    return begin_at(recipe, resume=True, tell=lambda line: None)


def test_it_begins_at_step_0_with_the_model_of_the_recipe_and_what_was_written_down(recipe):
    point = resumed(recipe)
    assert (point.step, point.version, point.checkpoint) == (0, 0, "")
    assert (point.model_path, point.state) == (recipe.model_path, STATE)
    assert point.is_resumed
    assert point.last_row == -1


def test_a_run_that_goes_on_leaves_what_is_written_down(recipe):
    record_beginning(recipe, resumed(recipe), {**STATE, "step": 5})
    assert resumed(recipe).state == STATE


@pytest.mark.parametrize("part", ["tasks", "rows"])
def test_another_seed_than_that_of_the_order_is_refused_before_anything_starts(recipe, part):
    drawn = {**STATE, "step": 2, part: {"seed": 5}}
    record_beginning(recipe, StartPoint(recipe.model_path), drawn)
    with pytest.raises(DataError, match=r"seed: is 0; must be 5"):
        resumed(recipe)
    checkpoints = Checkpoints(recipe.folder / CHECKPOINTS_FOLDER)
    checkpoints.begin(2)
    checkpoints.commit(2, drawn)
    with pytest.raises(DataError, match=r"seed: is 0; must be 5"):
        resumed(recipe)


def test_a_resumption_that_is_refused_leaves_the_run_as_it_was(recipe):
    record_beginning(recipe, StartPoint(recipe.model_path), {**STATE, "tasks": {"seed": 0}})
    (recipe.folder / "summary.json").write_text("{}")
    left = {path.name: path.read_text() for path in recipe.folder.iterdir()}
    other = parse_recipe(ONLINE, [f"cluster.fileroot={recipe.folder.parent}", "seed=3"])
    session = Session(other, resume=True, progress=QuietProgress())
    assert session.run().outcome == "failed"
    assert "must be 0" in str(session.error)
    now = {p.name: p.read_text() for p in recipe.folder.iterdir()}
    assert "must be 0" in now.pop("log.txt")
    assert now == {**left, ".lock": ""}


def test_what_another_release_wrote_is_refused(recipe):
    older = {name: value for name, value in STATE.items() if name != "format"}
    checkpoints = Checkpoints(recipe.folder / CHECKPOINTS_FOLDER)
    checkpoints.begin(2)
    checkpoints.commit(2, {**older, "step": 2, "version": 2})
    with pytest.raises(DataError, match=r"is of format 1; this release of areal_ray reads \d"):
        resumed(recipe)


def test_a_checkpoint_goes_before_it(recipe):
    checkpoints = Checkpoints(recipe.folder / CHECKPOINTS_FOLDER)
    checkpoints.begin(2)
    made = checkpoints.commit(2, {**STATE, "step": 2, "version": 2})
    assert (resumed(recipe).checkpoint, resumed(recipe).last_row) == (str(made.folder), 2)


def test_where_checkpoints_are_damaged_no_step_is_taken_again_in_silence(recipe):
    checkpoints = Checkpoints(recipe.folder / CHECKPOINTS_FOLDER)
    checkpoints.begin(2)
    made = checkpoints.commit(2, {**STATE, "step": 2, "version": 2})
    (made.folder / "run_state.json").write_text("{}")
    with pytest.raises(DataError, match="no whole checkpoint"):
        resumed(recipe)


def test_other_weights_than_those_that_sampled_are_refused_and_a_moved_folder_is_not(
    recipe, tmp_path
):
    moved = tmp_path / "moved"
    shutil.move(recipe.model_path, moved)
    with pytest.raises(DataError, match=r"model\.path: .*must be weights [0-9a-f]{16}"):
        resumed(recipe)
    there = parse_recipe(ONLINE, [f"cluster.fileroot={tmp_path}", f"model.path={moved}"])
    assert resumed(there).model_path == str(moved)
    (weights,) = moved.glob("*.safetensors")
    told = weights.read_bytes()
    weights.write_bytes(told[:-1] + bytes([told[-1] ^ 1]))
    with pytest.raises(DataError, match="as the run began"):
        resumed(there)


def test_the_mark_of_weights_is_of_files_of_any_size(tmp_path):
    marks = {weights_mark(tmp_path)}
    for size in (0, 1, 2**20, 3 * 2**20):
        (tmp_path / "model.safetensors").write_bytes(b"x" * size)
        marks.add(weights_mark(tmp_path))
    assert len(marks) == 5


def test_what_cannot_be_read_is_told(recipe):
    (recipe.folder / BEGINNING_FILE).write_text("{}")
    with pytest.raises(DataError, match=r"beginning\.json cannot be read"):
        resumed(recipe)


def test_a_run_that_left_nothing_but_its_beginning_may_be_started_anew(recipe):
    assert conflict(recipe.folder) is None
