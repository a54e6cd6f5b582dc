"""The command line: exit codes, short errors, and that what is printed is what runs."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import areal_ray
from areal_ray.cli import main
from areal_ray.recipe import load_recipe
from areal_ray.run_folder import RunFolder

RECIPES = Path(__file__).parents[2] / "recipes"

RECIPE = """\
kind: rl
name: sums
steps: 4
model: {path: gone/for/ever}
tasks: {source: "nowhere.tasks:train"}
reward: {score: "nowhere.reward:score"}
admission: {groups_per_step: 4}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return "r.yaml"


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.mark.parametrize(
    "words",
    [
        ["train", "r.yaml", "steps=7.5"],
        ["train", "r.yaml", "admission.max_stalness=3"],
        ["train", "r.yaml", "objective.kind=unknown"],
        ["train", "gone.yaml"],
        ["resume", "gone"],
        ["eval", "gone"],
        ["train", "r.yaml"],
        ["train", "r.yaml", "--overwrit"],
        ["trian", "r.yaml"],
        ["train", "."],
        ["train", "r.yaml", "steps"],
        ["train", "r.yaml", "=3"],
        ["plan", "gone.yaml"],
        ["report", "gone"],
        ["status", "gone"],
        ["eval", "gone.yaml"],
        ["schema", "--output", "gone/schema.json"],
    ],
)
def test_a_mistake_of_the_user_is_a_few_lines_and_exit_code_2(recipe, words, capsys):
    assert run(*words) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert 1 <= len(told) <= 5
    assert not any("Traceback" in line for line in told)


def test_the_whole_trace_is_shown_on_demand(recipe):
    with pytest.raises(Exception, match="must be a whole number"):
        main(["train", recipe, "steps=x", "--trace"])


def test_plan_tells_everything_wrong_at_once_and_starts_nothing(recipe, capsys):
    code = run("plan", recipe, "cluster.fileroot=/proc/runs", "cluster.num_cpus=2",
               "rollout.num_cpus=8")  # fmt: skip
    assert code == 2
    told = capsys.readouterr().err.splitlines()
    keys = [line.split(": ")[1] for line in told]
    assert keys == [
        "cluster.fileroot", "model.path", "reward.score", "tasks.source", "layout",
    ]  # fmt: skip
    assert "rollout 1 x 8" in told[-1]


def test_plan_shows_which_actor_goes_where(recipe, capsys):
    run("plan", recipe, "cluster.num_cpus=2", "rollout.replicas=2")
    out = capsys.readouterr().out
    for actor in ("rollout-0", "rollout-1", "learner-0", "agent-0", "reward-0", "param-sync"):
        assert f"\n{actor} " in out
    assert "1 node with 2 CPUs and 0 GPUs" in out or "GPUs" in out


@pytest.mark.parametrize(
    ("name", "command"),
    [("calculator/openai_agent.yaml", "train"), ("online/calculator.yaml", "serve")],
)
def test_plan_ends_with_the_command_that_runs_it(name, command, capsys, monkeypatch):
    monkeypatch.chdir(RECIPES.parent)
    assert run("plan", f"recipes/{name}", "cluster.num_cpus=2") == 0
    assert f"\nready: areal-ray {command} recipes/{name} cluster.num_cpus=2\n" in (
        capsys.readouterr().out
    )


def test_a_package_without_the_repository_says_where_the_demo_is(tmp_path):
    package = Path(areal_ray.__file__).parent
    shutil.copytree(package, tmp_path / "areal_ray", ignore=shutil.ignore_patterns("__pycache__"))
    told = subprocess.run(
        [sys.executable, "-m", "areal_ray.cli", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 2
    assert told.stderr.startswith("demo: there is no recipes/calculator/grpo.yaml here")
    assert "Run it in a clone" in told.stderr


def test_a_printed_recipe_is_the_recipe_that_runs(recipe, capsys, tmp_path):
    overrides = ["seed=3", "learner.optimizer.lr=1e-5", "name=007"]
    assert run("train", recipe, *overrides, "--print-config") == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    assert load_recipe("printed.yaml").digest == load_recipe(recipe, overrides).digest


def test_a_shortened_option_is_not_taken_for_another(recipe, capsys):
    assert run("train", recipe, "--print-conf") == 2
    assert "No such option" in capsys.readouterr().err


def test_plan_tells_what_may_work_and_rarely_does(recipe, capsys):
    run("plan", recipe, "objective={kind: reinforce, behaviour_weight: full}")
    assert "caution: objective: loss 'reinforce'" in capsys.readouterr().err


def test_a_secret_of_the_environment_is_in_no_message(recipe, capsys, monkeypatch):
    monkeypatch.setenv("TRACKER_KEY", "hf_abcdef")
    assert run("train", recipe, "model.path=hf_abcdef/gone/x") == 2
    told = capsys.readouterr().err
    assert "hf_abcdef" not in told
    assert "[redacted]/gone/x" in told


GOES_ON = """
import signal
from types import SimpleNamespace
from areal_ray.cli import _complain
from areal_ray.following import STOPS, follow

class Handle:
    gateway = None
    recipe = SimpleNamespace(
        telemetry=SimpleNamespace(console="off"), parts=SimpleNamespace(serves=False)
    )
    def stop(self):
        print("asked", flush=True)
    def wait(self, timeout_s):
        raise TimeoutError

signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
print("ready", flush=True)
follow(Handle(), tell=print, complain=_complain)
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)],
)
def test_a_second_signal_ends_a_run_that_does_not_stop_at_once(first, second):
    child = subprocess.Popen(
        [sys.executable, "-c", GOES_ON],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(first)
        assert child.stdout.readline() == "asked\n"
        assert child.poll() is None
        child.send_signal(second)
        _, told = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == 128 + second
    assert told == "stopping; once more to end at once\n"


def test_the_schema_is_valid_json(capsys, tmp_path, monkeypatch):
    assert run("schema") == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Recipe"
    monkeypatch.chdir(tmp_path)
    assert run("schema", "--output", "s.json") == 0
    assert json.loads((tmp_path / "s.json").read_text())["title"] == "Recipe"


def test_status_lists_runs_and_tells_what_a_running_one_waits_for(recipe, capsys):
    assert run("status") == 0
    assert "no runs" in capsys.readouterr().out
    folder = RunFolder.claim(Path("runs/sums"), load_recipe(recipe).to_yaml())
    folder.write_status({"step": 3, "version": 3, "waits": {"learner": "3 of 16 groups"}})
    assert run("status", "sums") == 0
    out = capsys.readouterr().out
    assert "sums: running" in out
    assert "3 of 16 groups" in out
    assert run("status") == 0
    assert re.search(r"sums +running +3 +3 ", capsys.readouterr().out)
    folder.release()
    assert run("status") == 0
    assert "ended without a summary" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["train"], ["train", "--overwrite"], ["train", "--resume"]])
def test_a_run_that_is_going_on_is_said_to_be(recipe, capsys, words):
    held = RunFolder.claim(Path("runs/sums"), load_recipe(recipe).to_yaml())
    Path("runs/sums/metrics.jsonl").write_text("{}\n")
    assert run(*words, recipe) == 2
    assert "is going on in another process" in capsys.readouterr().err
    held.release()


def test_a_run_name_that_is_taken_is_refused_before_anything_starts(recipe, capsys):
    RunFolder.claim(Path("runs/sums"), load_recipe(recipe).to_yaml()).release()
    Path("runs/sums/metrics.jsonl").write_text("{}\n")
    assert run("train", recipe) == 2
    assert "holds another run" in capsys.readouterr().err


def test_a_run_folder_that_was_renamed_is_resumed_in_place(recipe, tmp_path, capsys):
    moved = tmp_path / "moved/other"
    held = RunFolder.claim(moved, RECIPE)  # so that the command tells which folder it wants
    assert run("resume", str(moved)) == 2
    held.release()
    assert f"the run in {moved} is going on" in capsys.readouterr().err
    assert not (tmp_path / "moved/sums").exists()


def test_a_run_without_held_out_tasks_is_not_scored_but_told_how(tmp_path, capsys):
    recipe = (RECIPES / "online/calculator.yaml").read_text(encoding="utf-8")
    RunFolder.claim(tmp_path / "runs" / "served", recipe).release()
    with pytest.raises(SystemExit) as ended:
        main(["eval", "served", "--fileroot", str(tmp_path / "runs")])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "was trained without held-out tasks (kind: online, no evaluation)" in told
    assert f"areal-ray eval RECIPE model.path={tmp_path / 'runs' / 'served' / 'model'}" in told
