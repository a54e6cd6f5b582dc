"""Checkpoints: complete or not there, newest by number, old ones only after new ones."""

import json
import math
import signal
import subprocess
import sys

import pytest

from areal_ray.checkpoint import CheckpointConfig, Checkpoints
from areal_ray.errors import StorageError


def _save(checkpoints, step, text="weights", **state):
    folder = checkpoints.begin(step)
    (folder / "model.safetensors").write_text(text)
    (folder / "inner").mkdir()
    (folder / "inner" / "more.bin").write_text(text)
    return checkpoints.commit(step, {"step": step, **state})


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path):
    saved = _save(Checkpoints(tmp_path), 40, version=41, cursor={"epoch": 1, "seen": ["a"]})
    found = Checkpoints(tmp_path).latest()
    assert found.skipped == ()
    assert found.checkpoint == saved
    assert found.checkpoint.state == {
        "step": 40,
        "version": 41,
        "cursor": {"epoch": 1, "seen": ["a"]},
    }
    assert (found.checkpoint.folder / "inner" / "more.bin").read_text() == "weights"


def test_a_folder_without_checkpoints_has_no_latest(tmp_path):
    assert Checkpoints(tmp_path / "never").latest().checkpoint is None
    assert Checkpoints(tmp_path).latest().checkpoint is None


def test_the_latest_is_the_largest_number_not_the_last_word(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (9, 10, 999_999, 1_000_000):
        _save(checkpoints, step)
        assert checkpoints.latest().checkpoint.step == step
    assert (tmp_path / "latest").read_text().strip() == "step-1000000"


def test_older_ones_beyond_keep_go_and_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (2, 4, 6, 8):
        _save(checkpoints, step)
    assert _names(tmp_path) == ["latest", "step-000006", "step-000008"]


def test_with_keep_one_a_failed_save_leaves_the_previous_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    _save(checkpoints, 2)
    folder = checkpoints.begin(4)
    (folder / "model.safetensors").write_text("half")  # and the writer never comes to commit
    found = Checkpoints(tmp_path, keep=1).latest()
    assert found.checkpoint.step == 2
    with pytest.raises(ValueError, match="Out of range float"):
        checkpoints.commit(4, {"loss": math.nan})
    assert Checkpoints(tmp_path, keep=1).latest().checkpoint.step == 2


@pytest.mark.parametrize(
    "damage", ["truncated", "lost", "no list", "no state", "broken state", "list"]
)
def test_a_damaged_checkpoint_is_passed_over_with_a_reason(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 2)
    newest = _save(checkpoints, 4).folder
    expected = {
        "truncated": "inner/more.bin has 3 bytes instead of 7",
        "lost": "model.safetensors is missing",
        "no list": "complete.json is missing",
        "no state": "run_state.json is missing",
        "broken state": "run_state.json",
        "list": "no JSON object",
    }[damage]
    if damage == "truncated":
        (newest / "inner" / "more.bin").write_text("wei")
    elif damage == "lost":
        (newest / "model.safetensors").unlink()
    elif damage == "no list":
        (newest / "complete.json").unlink()
    elif damage == "no state":
        (newest / "run_state.json").unlink()
    elif damage == "list":
        (newest / "run_state.json").write_text("[]")
    else:
        (newest / "run_state.json").write_text("{")
    found = checkpoints.latest()
    assert found.checkpoint.step == 2
    assert len(found.skipped) == 1
    assert "step-000004" in found.skipped[0]
    assert expected in found.skipped[0]


def test_an_empty_numbered_folder_and_foreign_files_are_not_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 2)
    (tmp_path / "step-000009").mkdir()
    (tmp_path / "step-best").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert checkpoints.latest().checkpoint.step == 2
    _save(checkpoints, 10)
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "step-best").exists()


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    _save(checkpoints, 2)
    (_save(checkpoints, 4).folder / "model.safetensors").unlink()
    _save(checkpoints, 6)
    assert checkpoints.latest().checkpoint.step == 6
    assert (tmp_path / "step-000002").exists()


def test_saving_the_same_step_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 4, text="first")
    _save(checkpoints, 4, text="second")
    assert (checkpoints.latest().checkpoint.folder / "model.safetensors").read_text() == "second"
    assert _names(tmp_path) == ["latest", "step-000004"]


_SLOW_WRITER = """
import sys, time
from pathlib import Path
from areal_ray.checkpoint import Checkpoints
folder = Checkpoints(Path(sys.argv[1])).begin(4)
with open(folder / "model.safetensors", "w") as file:
    file.write("half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_writer_killed_in_the_middle_leaves_the_previous_one_and_no_litter(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 2)
    writer = subprocess.Popen(
        [sys.executable, "-c", _SLOW_WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout.readline().strip() == "writing"
    writer.send_signal(signal.SIGKILL)
    writer.wait(timeout=10)
    writer.stdout.close()
    assert checkpoints.latest().checkpoint.step == 2
    _save(checkpoints, 4)
    assert checkpoints.latest().checkpoint.step == 4
    assert _names(tmp_path) == ["latest", "step-000002", "step-000004"]


def test_a_disk_that_refuses_is_reported_with_the_folder(tmp_path):
    in_the_way = tmp_path / "checkpoints"
    in_the_way.write_text("a file where the folder should be")
    with pytest.raises(StorageError, match=str(in_the_way)):
        Checkpoints(in_the_way).begin(2)


def test_a_checkpoint_is_due_every_so_many_steps_and_never_at_zero():
    config = CheckpointConfig(every_steps=5)
    assert [step for step in range(16) if config.is_due(step)] == [5, 10, 15]
    assert not any(CheckpointConfig(every_steps=None).is_due(step) for step in range(50))


def test_the_state_is_strict_json_on_disk(tmp_path):
    saved = _save(Checkpoints(tmp_path), 2, name="\u00c4")
    text = (saved.folder / "run_state.json").read_text(encoding="utf-8")
    assert json.loads(text)["name"] == "\u00c4"
