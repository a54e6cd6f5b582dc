"""DeepSpeed in a process as Ray starts it: one device, no launcher, nothing to compile with."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.needs import needs_deepspeed
from tests.support.whole_runs import ROOT

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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_changes_nothing(told, stage):
    first, skipped, last = told["stages"][stage]
    assert [first["taken"], skipped["taken"], last["taken"]] == [True, False, True]
    assert skipped["weights"] == first["weights"]
    assert last["weights"] != first["weights"]
    assert last["loss"] < first["loss"]
    assert last["weights"] == told["stages"][0][2]["weights"]
