"""Making a missing model: by a function in a process of its own, or by another run."""

import signal
import threading
import time
from pathlib import Path

import pytest

from areal_ray.errors import DeadlineExceeded, RecipeError
from areal_ray.model_function import check_function, make_apart
from areal_ray.prepare import make_model
from areal_ray.recipe import Recipe, load_recipe
from areal_ray.run_folder import RunFolder

CODE = """\
import os, signal, subprocess, time
from pathlib import Path

def good(folder, seed):
    (folder / "config.json").write_text(str(seed))

def half(folder, seed):
    (folder / "model.safetensors").write_text("")

def raises(folder, seed):
    raise KeyError("no such tensor")

def dies(folder, seed):
    os.abort()

def starts_a_program(folder, seed):
    subprocess.run(["grep", "SigBlk", "/proc/self/status"], stdout=open(HERE / "mask", "w"))
    good(folder, seed)

def is_overtaken(folder, seed):
    other = HERE / "model"
    other.mkdir()
    (other / "config.json").write_text("the winner's")
    good(folder, seed)

def never_ends(folder, seed):
    program = subprocess.Popen(["sleep", "600"])
    (HERE / "pid").write_text(str(program.pid))
    time.sleep(600)

def one_argument(folder):
    return None

HERE = Path(__file__).parent
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "maker_code.py").write_text(CODE)
    return tmp_path


def make(folder: Path, name: str, check=lambda: None) -> Path:
    model = folder / "model"
    make_apart(f"maker_code:{name}", model, 7, search=[folder], check=check)
    return model


def left_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name not in ("maker_code.py", "mask"))


def test_what_the_function_wrote_is_put_in_place_whole(folder):
    assert (make(folder, "good") / "config.json").read_text() == "7"
    assert left_in(folder) == ["model"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("half", "wrote no Hugging Face checkpoint"),
        ("raises", "KeyError: 'no such tensor'"),
        ("dies", "SIGABRT"),
    ],
)
def test_a_function_that_fails_is_named_with_the_reason_and_leaves_nothing(folder, name, told):
    with pytest.raises(RecipeError, match=f"model.create: maker_code:{name} ") as caught:
        make(folder, name)
    assert told in str(caught.value)
    assert left_in(folder) == []


def test_of_two_that_make_the_same_model_the_later_uses_the_earliers(folder):
    assert (make(folder, "is_overtaken") / "config.json").read_text() == "the winner's"
    assert left_in(folder) == ["model"]


def test_programs_that_it_starts_do_not_inherit_blocked_signals(folder):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        make(folder, "starts_a_program")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    blocked = int((folder / "mask").read_text().split()[1], 16)
    assert not blocked & (1 << (signal.SIGINT - 1) | 1 << (signal.SIGTERM - 1))


def test_a_stop_ends_it_and_what_it_started(folder):
    pid_file = folder / "pid"

    def check() -> None:
        if pid_file.exists() and pid_file.read_text():
            raise InterruptedError("stop")

    with pytest.raises(InterruptedError):
        make(folder, "never_ends", check)
    stat = Path("/proc", pid_file.read_text(), "stat")
    until = time.monotonic() + 30
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until, "the program that it started goes on"
        time.sleep(0.05)
    assert left_in(folder) == ["pid"]


def test_one_that_cannot_be_called_is_refused_before_anything_starts(folder):
    check_function("maker_code:good", [folder])
    with pytest.raises(RecipeError, match=r"must take \(folder, seed\)"):
        check_function("maker_code:one_argument", [folder])


@pytest.fixture
def wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe whose model another recipe makes."""
    monkeypatch.chdir(folder)
    (folder / "warm.yaml").write_text(
        "kind: sft\nname: warm\nmodel: {path: start}\n"
        "sft: {phases: [{source: 'x:y', steps: 1, batch_size: 1}]}\n"
    )
    (folder / "r.yaml").write_text(
        "kind: rl\nname: r\nsteps: 1\nmodel: {path: runs/warm/model, create: warm.yaml}\n"
        "tasks: {source: 'x:y'}\nreward: {score: 'x:y'}\nadmission: {groups_per_step: 1}\n"
        "deadlines: {model_s: 600}\n"
    )
    return load_recipe(folder / "r.yaml")


def finish(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")


def test_a_run_waits_for_the_one_that_makes_its_model_and_uses_that(folder, wanted):
    other = RunFolder.claim(folder / "runs/warm", "kind: sft\n")
    told: list[str] = []

    def end() -> None:
        while not told:
            time.sleep(0.05)
        finish(other.path)
        other.release()

    thread = threading.Thread(target=end)
    thread.start()

    def train_first(maker: Recipe, held: RunFolder) -> None:
        raise AssertionError("it was made already")

    make_model(wanted, train_first, tell=told.append, check=lambda: None)
    thread.join()
    assert told == ["waiting for warm, which another process runs: it makes the model"]
    RunFolder.hold(other.path).release()  # and holds it no longer


def test_one_whose_maker_failed_makes_the_model_itself(folder, wanted):
    made: list[str] = []

    def train_first(maker: Recipe, held: RunFolder) -> None:
        made.append(maker.run_name)
        held.begin("kind: sft\n", overwrite=True)
        finish(held.path)
        held.release()

    RunFolder.claim(folder / "runs/warm", "kind: sft\n").release()
    make_model(wanted, train_first, tell=lambda line: None, check=lambda: None)
    assert made == ["warm"]


def test_the_wait_for_another_run_is_bounded_and_a_stop_ends_it(folder, wanted):
    held = RunFolder.claim(folder / "runs/warm", "kind: sft\n")
    short = load_recipe(folder / "r.yaml", ["deadlines.model_s=0.1"])

    def never(maker: Recipe, held: RunFolder) -> None:
        raise AssertionError("it is going on elsewhere")

    with pytest.raises(DeadlineExceeded, match=r"the run warm in .* deadlines\.model_s = 0\.1 s"):
        make_model(short, never, tell=lambda line: None, check=lambda: None)
    told: list[str] = []

    def check() -> None:
        if told:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        make_model(wanted, never, tell=told.append, check=check)
    held.release()
