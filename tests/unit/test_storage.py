"""What the disk refuses is one line that names the file, and takes nothing else along."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_ray.core.journal import LedgerJournal, SegmentWriter
from areal_ray.core.storage import replace_text
from areal_ray.engines.model_export import saving
from areal_ray.errors import StorageError
from areal_ray.run_folder import RunFolder
from areal_ray.telemetry.log import run_log
from areal_ray.telemetry.sinks import TelemetryConfig, open_metric_log
from areal_ray.telemetry.summary import RunEnd, summarize, write_summary
from tests.support.disk import no_more_than

END = RunEnd(
    name="demo", kind="rl", outcome="finished", planned_steps=4, version=4, wall_s=1.0, seed=0
)


def add_row(folder: Path) -> Any:
    log = open_metric_log(folder, TelemetryConfig(tensorboard=False, ray_metrics=False))
    return lambda: log.log(1, 1, {"learner/loss": 0.5})


def add_event(folder: Path) -> Any:
    journal = LedgerJournal(folder)
    return lambda: journal.append({"event": "reserved"})


def add_group(folder: Path) -> Any:
    writer = SegmentWriter(folder, "reward-0")
    return lambda: writer.append(b"x" * 100)


def add_status(folder: Path) -> Any:
    held = RunFolder.claim(folder / "run", "kind: rl")
    return lambda: held.write_status({"step": 1})


def add_summary(folder: Path) -> Any:
    return lambda: write_summary(folder, summarize(folder, END))


def add_recipe(folder: Path) -> Any:
    return lambda: RunFolder.claim(folder / "run", "kind: rl")


def add_tensors(folder: Path) -> Any:
    def save() -> None:
        with saving(folder):
            torch.save({"a": torch.zeros(1000)}, folder / "trainer_state.pt")

    return save


def add_weights(folder: Path) -> Any:
    from safetensors.torch import save_file

    def save() -> None:
        with saving(folder):
            save_file({"a": torch.zeros(1000)}, folder / "model.safetensors")

    return save


@pytest.mark.parametrize(
    ("made", "file"),
    [
        (add_row, "metrics.jsonl"),
        (add_event, "ledger.jsonl"),
        (add_group, "groups-reward-0-000000.seg"),
        (add_status, "run/status.json"),
        (add_summary, "summary.json"),
        (add_recipe, "run/recipe.yaml"),
        (add_tensors, ""),
        (add_weights, ""),
    ],
)
def test_a_file_that_cannot_be_written_is_named(tmp_path, made, file):
    write = made(tmp_path)
    with no_more_than(0), pytest.raises(StorageError) as told:
        write()
    assert str(told.value).startswith(f"{tmp_path / file}: cannot be written: ")
    assert "Make room" in str(told.value)
    assert len(str(told.value).splitlines()) == 1


def test_what_was_there_before_a_write_that_failed_still_is(tmp_path):
    replace_text(tmp_path / "status.json", "{}")
    with no_more_than(10), pytest.raises(StorageError):
        replace_text(tmp_path / "status.json", "x" * 100)
    assert (tmp_path / "status.json").read_text() == "{}"


def test_a_log_line_that_the_disk_did_not_take_is_left_out_in_silence(tmp_path, capsys):
    with run_log(tmp_path, run="demo"), no_more_than(0):
        logging.getLogger("areal_ray.driver").info("hello")
    assert capsys.readouterr().err == ""


def test_other_faults_while_saving_stay_what_they_are(tmp_path):
    with pytest.raises(RuntimeError, match="device lost"), saving(tmp_path):
        raise RuntimeError("device lost")
