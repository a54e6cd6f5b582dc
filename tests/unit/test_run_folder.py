"""Whose folder it is."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from areal_ray.errors import RecipeError
from areal_ray.run_folder import RunFolder, conflict, find_run, read_status, run_folders


def started(path: Path) -> None:
    """Leave what a run leaves after its first step."""
    folder = RunFolder.claim(path, "kind: rl\n")
    (path / "metrics.jsonl").write_text("{}\n")
    folder.release()


def test_a_folder_that_holds_another_run_is_refused_with_what_to_do(tmp_path):
    started(tmp_path / "a")
    with pytest.raises(RecipeError) as caught:
        RunFolder.claim(tmp_path / "a", "kind: sft\n")
    assert "areal-ray resume" in str(caught.value)
    assert "--overwrite" in str(caught.value)
    assert "name=" in str(caught.value)
    assert (tmp_path / "a" / "recipe.yaml").read_text() == "kind: rl\n"


def test_overwriting_leaves_nothing_of_the_old_run(tmp_path):
    started(tmp_path / "a")
    (tmp_path / "a" / "checkpoints" / "step-000003").mkdir(parents=True)
    RunFolder.claim(tmp_path / "a", "kind: sft\n", overwrite=True)
    assert {p.name for p in (tmp_path / "a").iterdir()} == {".lock", "recipe.yaml"}


def test_resuming_keeps_what_is_there(tmp_path):
    started(tmp_path / "a")
    RunFolder.claim(tmp_path / "a", "kind: rl\n", resume=True)
    assert (tmp_path / "a" / "metrics.jsonl").exists()


def test_a_run_that_failed_before_its_first_step_may_be_started_again(tmp_path):
    RunFolder.claim(tmp_path / "a", "kind: rl\n").release()
    RunFolder.claim(tmp_path / "a", "kind: sft\n").release()
    assert (tmp_path / "a" / "recipe.yaml").read_text() == "kind: sft\n"


@pytest.mark.parametrize(("steps", "is_kept"), [(0, False), (1, True)])
def test_of_runs_that_failed_only_one_that_took_a_step_holds_its_name(tmp_path, steps, is_kept):
    RunFolder.claim(tmp_path / "a", "kind: rl\n").release()
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"outcome": "failed", "steps": steps}))
    assert (conflict(tmp_path / "a") is not None) is is_kept


def test_foreign_files_are_never_deleted(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert conflict(tmp_path, overwrite=True) is not None
    with pytest.raises(RecipeError, match="holds no run"):
        RunFolder.claim(tmp_path, "kind: rl\n", overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_a_folder_is_held_by_one_run_even_against_overwriting(tmp_path):
    held = RunFolder.claim(tmp_path / "a", "kind: rl\n")
    assert read_status(tmp_path / "a").is_running
    with pytest.raises(RecipeError, match="going on in another process"):
        RunFolder.claim(tmp_path / "a", "kind: rl\n", overwrite=True)
    held.release()
    assert not read_status(tmp_path / "a").is_running


def test_a_killed_process_no_longer_holds_its_folder(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from areal_ray.run_folder import RunFolder\n"
        "RunFolder.claim(Path(sys.argv[1]), 'kind: rl')\n"
        "print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    assert read_status(tmp_path / "a").is_running
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not read_status(tmp_path / "a").is_running


def test_asking_for_the_status_changes_nothing(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "recipe.yaml").write_text("kind: rl\n")
    assert not read_status(tmp_path / "a").is_running
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["recipe.yaml"]


def test_a_folder_is_claimed_while_others_ask_for_its_status(tmp_path):
    RunFolder.claim(tmp_path / "a", "kind: rl\n").release()
    asked = os.open(tmp_path / "a" / ".lock", os.O_RDONLY)
    fcntl.flock(asked, fcntl.LOCK_SH)  # one that asks, slowly
    threading.Timer(0.1, os.close, [asked]).start()
    held = RunFolder.claim(tmp_path / "a", "kind: rl\n")
    assert all(read_status(tmp_path / "a").is_running for _ in range(3))
    held.release()


def test_a_run_is_found_by_folder_and_by_name(tmp_path):
    started(tmp_path / "a")
    assert find_run(str(tmp_path / "a")) == tmp_path / "a"
    assert find_run("a", tmp_path) == tmp_path / "a"
    assert run_folders(tmp_path) == [tmp_path / "a"]
    with pytest.raises(RecipeError, match="There are: a"):
        find_run("b", tmp_path)


def test_status_is_read_whole_or_not_at_all(tmp_path):
    folder = RunFolder.claim(tmp_path / "a", "kind: rl\n")
    assert read_status(tmp_path / "a").status == {}
    folder.write_status({"step": 3})
    assert read_status(tmp_path / "a").status["step"] == 3
    (tmp_path / "a" / "status.json").write_text('{"step": ')
    assert read_status(tmp_path / "a").status == {}


def test_a_resumed_run_has_no_summary_until_it_ends_again(tmp_path):
    RunFolder.claim(tmp_path / "a", "kind: rl\n").release()
    (tmp_path / "a" / "summary.json").write_text("{}")
    RunFolder.claim(tmp_path / "a", "kind: rl\n", resume=True).release()
    assert not (tmp_path / "a" / "summary.json").exists()
