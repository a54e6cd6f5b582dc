"""DeepSpeed in a process as Ray starts it: one device, no launcher, nothing to compile with."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.needs import needs_deepspeed
from tests.support.whole_runs import ROOT
from tests.support.zero_alone import HOW

pytestmark = needs_deepspeed


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    environment = {
        **{name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "HOME")},
        "PATH": "/nowhere",  # no compiler
        "TORCH_EXTENSIONS_DIR": str(folder / "compiled"),
        "LOCAL_RANK": "1",  # of a process that sees one device
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.zero_alone"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(folder.iterdir())
    return json.loads(done.stdout.splitlines()[-1])


def test_the_only_device_is_the_first(told):
    assert told["local_rank"] == "0"


@pytest.mark.parametrize("name", HOW)
def test_a_gradient_that_is_not_finite_changes_nothing(told, name):
    first, skipped, last = told["found"][name]["steps"]
    assert [first["taken"], skipped["taken"], last["taken"]] == [True, False, True]
    assert skipped["weights"] == first["weights"]
    assert last["weights"] != first["weights"]
    assert last["loss"] < first["loss"]
    assert last["weights"] == told["found"]["stage 0"]["steps"][2]["weights"]


def test_what_is_offloaded_is_what_was_asked_for(told):
    found = {name: told["found"][name]["offloads"] for name in HOW}
    assert found["stage 2, offloaded"] == ["offload_optimizer"]
    assert found["stage 3, offloaded"] == ["offload_optimizer", "offload_param"]
    assert not any(found[f"stage {stage}"] for stage in range(4))
