"""Rows reach every sink once, in order, as strict JSON; logs and files keep no secret."""

import asyncio
import json
import logging
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from areal_ray.telemetry.log import LOG_FILE, redact, run_log, secret_values
from areal_ray.telemetry.rows import Row, read_rows
from areal_ray.telemetry.sinks import (
    METRICS_FILE,
    TENSORBOARD_FOLDER,
    MetricLog,
    TelemetryConfig,
    open_metric_log,
)
from areal_ray.telemetry.strict_json import dumps_strict

PLAIN = TelemetryConfig(tensorboard=False, ray_metrics=False)


class KeptRows:
    """A sink of the test's own."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def write(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        pass


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_every_line_of_metrics_jsonl_is_strict_json(tmp_path: Path):
    log = open_metric_log(tmp_path, PLAIN)
    torch_like = np.array(0.25, dtype=np.float32)
    values = {
        "reward/mean": np.float32(0.5),
        "learner/trained_tokens": np.int64(12),
        "learner/loss": math.nan,
        "learner/ratio_max": math.inf,
        "learner/lr": torch_like,
        "queue/depth_groups": None,
    }
    log.log(1, 1, values)
    log.close()
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    row = json.loads(line, parse_constant=refuse_constant)
    assert (row["kind"], row["step"], row["version"]) == ("step", 1, 1)
    assert row["reward/mean"] == 0.5
    assert row["learner/trained_tokens"] == 12
    assert row["learner/lr"] == 0.25
    assert row["learner/loss"] is row["learner/ratio_max"] is row["queue/depth_groups"] is None


def test_a_torch_number_is_a_number_and_what_is_not_finite_is_null():
    import torch

    values = {
        "scalar": torch.tensor(0.5),
        "one": torch.tensor([2]),
        "half": torch.tensor(0.25, dtype=torch.bfloat16),
        "nan": torch.tensor(math.nan),
        "inf": np.float32(-np.inf),
        "yes": np.bool_(True),
        "deep": [{"a": math.inf}],
    }
    assert json.loads(dumps_strict(values), parse_constant=refuse_constant) == {
        "scalar": 0.5, "one": [2], "half": 0.25, "nan": None, "inf": None, "yes": True,
        "deep": [{"a": None}],
    }  # fmt: skip


def test_a_value_without_a_json_form_is_refused_by_name():
    with pytest.raises(TypeError, match="object"):
        dumps_strict({"a": object()})


def test_an_undeclared_name_never_reaches_the_file(tmp_path: Path):
    log = open_metric_log(tmp_path, PLAIN)
    with pytest.raises(KeyError, match=r"reward/meen is not declared. Did you mean reward/mean"):
        log.log(1, 1, {"reward/meen": 1.0})
    log.close()
    assert read_rows(tmp_path / METRICS_FILE) == []


def test_a_step_is_logged_once_and_in_order(tmp_path: Path):
    log = open_metric_log(tmp_path, PLAIN)
    log.log(2, 2, {"reward/mean": 1.0})
    for step in (1, 2):
        with pytest.raises(ValueError, match="step 2 was logged already"):
            log.log(step, step, {"reward/mean": 1.0})
    log.close()


def test_an_evaluation_has_a_row_of_its_own_even_when_it_ends_late(tmp_path: Path):
    log = open_metric_log(tmp_path, PLAIN)
    log.log(0, 0, {"eval/accuracy_fraction": 0.4}, kind="eval")
    log.log(1, 1, {"reward/mean": 0.5})
    log.log(2, 2, {"reward/mean": 0.6})
    log.log(1, 1, {"eval/accuracy_fraction": 0.5}, kind="eval")
    log.close()
    rows = [(row["kind"], row["step"]) for row in read_rows(tmp_path / METRICS_FILE)]
    assert rows == [("eval", 0), ("step", 1), ("step", 2), ("eval", 1)]


def test_a_resumed_run_goes_on_after_its_checkpoint_without_a_step_twice(tmp_path: Path):
    first = open_metric_log(tmp_path, PLAIN)
    for step in range(1, 6):
        first.log(step, step, {"reward/mean": step / 10})
    first.close()
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"kind":"step","step":6,"ver')  # torn by the crash
    resumed = open_metric_log(tmp_path, PLAIN, resume_step=3)
    resumed.log(4, 4, {"reward/mean": 0.9})
    resumed.close()
    rows = read_rows(tmp_path / METRICS_FILE)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["reward/mean"] == 0.9
    assert rows[-1]["wall_s"] >= rows[-2]["wall_s"]


def test_a_new_run_in_the_folder_of_an_old_one_starts_with_no_rows(tmp_path: Path):
    for reward in (0.1, 0.2):
        log = open_metric_log(tmp_path, PLAIN)
        log.log(1, 1, {"reward/mean": reward})
        log.close()
    assert [row["reward/mean"] for row in read_rows(tmp_path / METRICS_FILE)] == [0.2]


def test_a_reader_beside_the_run_sees_whole_lines_only(tmp_path: Path):
    log = open_metric_log(tmp_path, PLAIN)
    log.log(1, 1, {"reward/mean": 0.5})
    assert len(read_rows(tmp_path / METRICS_FILE)) == 1
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"kind":"st')
    assert len(read_rows(tmp_path / METRICS_FILE)) == 1
    log.close()


def test_a_sink_of_the_runtime_gets_the_same_rows():
    kept = KeptRows()
    log = MetricLog([kept])
    row = log.log(1, 1, {"reward/mean": 0.5})
    assert kept.rows == [row]


def test_tensorboard_shows_each_metric_once_a_step_after_a_resumption(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TelemetryConfig(ray_metrics=False)
    first = open_metric_log(tmp_path, config)
    for step in (1, 2, 3):
        first.log(step, step, {"reward/mean": 0.1 * step, "learner/loss": math.nan})
    first.close()
    resumed = open_metric_log(tmp_path, config, resume_step=2)
    resumed.log(3, 3, {"reward/mean": 0.9})
    resumed.close()
    read = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER))
    read.Reload()
    points = [(p.step, round(p.value, 3)) for p in read.Scalars("reward/mean")]
    assert points == [(1, 0.1), (2, 0.2), (3, 0.9)]


def test_telemetry_loads_neither_torch_nor_ray_nor_rich():
    code = (
        "import sys, areal_ray.telemetry.sinks, areal_ray.telemetry.report, "
        "areal_ray.telemetry.progress, areal_ray.telemetry.log\n"
        "heavy = {'torch', 'ray', 'rich', 'tensorboard', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_secrets_are_found_by_the_name_of_their_variable_and_in_urls():
    environment = {
        "HF_TOKEN": "hf_abcdef",
        "WANDB_API_KEY": "0123456789",
        "MY_SECRET": "hunter22",
        "DB_PASS": "correct horse",
        "SLACK_WEBHOOK_URL": "https://hooks.example/T0/B0",
        "USE_KEY": "1",
        "HOME": "/home/someone",
        "RAY_AUTH_MODE": "disabled",
        "HTTPS_PROXY": "http://ada:battery-staple@proxy:3128",
        "REDIS_URL": "redis://:staple@cache",
        "HOMEPAGE": "http://host:8080/~ada@work",
    }
    named = {"hf_abcdef", "0123456789", "hunter22", "correct horse", "https://hooks.example/T0/B0"}
    assert secret_values(environment) == named | {"battery-staple", "staple"}
    assert redact("a hf_abcdef b", secret_values(environment)) == "a [redacted] b"


def test_a_secret_is_in_no_line_of_the_log_not_even_in_a_traceback(tmp_path: Path, capsys):
    logger = logging.getLogger("areal_ray.example")
    with run_log(tmp_path, run="demo", secrets={"hf_abcdef"}):
        logger.info("token is %s", "hf_abcdef")
        try:
            raise RuntimeError("refused: hf_abcdef")
        except RuntimeError:
            logger.exception("call failed")
    written = (tmp_path / LOG_FILE).read_text()
    shown = capsys.readouterr().err
    assert "hf_abcdef" not in written + shown
    assert "demo driver" in written
    assert "Traceback" in written
    assert "token is" in written
    assert "token is" not in shown  # the console has warnings and errors alone
    assert "call failed" in shown


def test_runs_of_one_process_log_to_their_own_folders(tmp_path: Path):
    logger = logging.getLogger("areal_ray.example")
    turn = threading.Barrier(2)

    async def work(name: str) -> None:
        for _ in range(2):
            turn.wait(10)  # both logs are open now
            await asyncio.create_task(asyncio.to_thread(logger.info, "of %s", name))

    def run(name: str) -> None:
        with run_log(tmp_path / name, run=name):
            asyncio.run(work(name))
            if name == "b":
                with run_log(tmp_path / "inner", run="inner"):
                    logger.info("of inner")
            turn.wait(10)
            logger.info("of %s", name)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with run_log(tmp_path / "later", run="later"):
        logger.info("of later")
    for name, count in {"a": 3, "b": 3, "inner": 1, "later": 1}.items():
        lines = (tmp_path / name / LOG_FILE).read_text().splitlines()
        assert [line.rsplit(": of ")[1] for line in lines] == [name] * count
    handlers = logging.getLogger("areal_ray").handlers
    assert not [handler for handler in handlers if isinstance(handler, logging.FileHandler)]
