"""summary.json says what the rows of the run add up to."""

import json
import math
from pathlib import Path

import pytest

from areal_ray.errors import DataError
from areal_ray.run_listing import describe_run, list_runs
from areal_ray.telemetry.rows import read_rows
from areal_ray.telemetry.sinks import TelemetryConfig, open_metric_log
from areal_ray.telemetry.summary import (
    SUMMARY_FILE,
    LedgerSummary,
    RunEnd,
    read_summary,
    summarize,
    write_summary,
)

PLAIN = TelemetryConfig(tensorboard=False, ray_metrics=False)
END = RunEnd(
    name="demo",
    kind="rl",
    outcome="finished",
    planned_steps=4,
    version=4,
    wall_s=12.5,
    seed=7,
    staleness_bound=2,
    staleness_histogram={0: 2, 1: 5, 2: 1},
    ledger=LedgerSummary(12, 8, 1, 1, 2, {"too old": 1, "timeout": 1}),
)


def run_folder(folder: Path) -> Path:
    log = open_metric_log(folder, PLAIN)
    log.log(0, 0, {"eval/accuracy_fraction": 0.4, "eval/episodes": 50}, kind="eval")
    for step in range(1, 5):
        values = {
            "reward/mean": step / 4,
            "rollout/sampled_tokens": 100,
            "learner/trained_tokens": 90,
            "publish/count_publishes": 1,
            "publish/wall_s": 0.1 * step,
            "publish/engine_idle_s": 0.01,
            "driver/cpu_s": 0.5,
            "driver/bytes": 800,
            "agent/episodes": 4,
        }
        log.log(step, step, values)
    log.log(4, 4, {"eval/accuracy_fraction": 0.9, "eval/episodes": 50}, kind="eval")
    log.close()
    return folder


def test_the_summary_adds_up_the_rows(tmp_path: Path):
    write_summary(tmp_path, summarize(run_folder(tmp_path), END))
    summary = read_summary(tmp_path)
    assert summary is not None
    assert (summary["outcome"], summary["steps"], summary["version"]) == ("finished", 4, 4)
    assert (summary["wall_s"], summary["seed"]) == (12.5, 7)
    assert summary["eval"]["before"] == 0.4
    assert summary["eval"]["after"] == 0.9
    assert [(p["step"], p["accuracy"]) for p in summary["eval"]["curve"]] == [(0, 0.4), (4, 0.9)]
    assert summary["reward"] == {"first": 0.25, "last": 1.0}
    assert summary["staleness"] == {
        "max": 2, "mean": 7 / 8, "histogram": {"0": 2, "1": 5, "2": 1}, "bound": 2,
    }  # fmt: skip
    ledger = summary["ledger"]
    assert ledger["admitted"] == sum(
        ledger[k] for k in ("trained", "dropped", "failed", "in_flight")
    )
    assert summary["tokens"] == {"sampled": 400, "trained": 360}
    assert summary["publish"] == {
        "count": 4, "differing": 0, "mean_s": pytest.approx(0.25),
        "engine_idle_s": pytest.approx(0.01),
    }  # fmt: skip
    assert summary["driver"] == {"cpu_s": 2.0, "bytes_per_trajectory": 200.0, "trajectories": 16}


def test_a_run_that_ended_before_its_first_step_has_a_summary_with_its_reason(tmp_path: Path):
    end = RunEnd(
        name="demo", kind="rl", outcome="failed", failure="learner-0 raised ValueError('X')",
        planned_steps=4, version=0, wall_s=1.0, seed=0,
    )  # fmt: skip
    write_summary(tmp_path, summarize(tmp_path, end))
    summary = json.loads((tmp_path / SUMMARY_FILE).read_text())
    assert (summary["outcome"], summary["steps"]) == ("failed", 0)
    assert summary["failure"] == "learner-0 raised ValueError('X')"
    assert summary["eval"] == {"before": None, "after": None, "curve": []}
    assert summary["staleness"]["max"] is None


def test_an_evaluation_that_scored_nothing_is_null_and_not_zero(tmp_path: Path):
    log = open_metric_log(tmp_path, PLAIN)
    log.log(0, 0, {"eval/accuracy_fraction": math.nan, "eval/episodes": 0}, kind="eval")
    log.close()
    assert summarize(tmp_path, END).eval.before is None


def test_a_run_without_an_evaluation_before_its_first_step_has_no_before(tmp_path: Path):
    log = open_metric_log(tmp_path, PLAIN)
    log.log(2, 2, {"eval/accuracy_fraction": 0.7, "eval/episodes": 9}, kind="eval")
    log.close()
    evaluation = summarize(tmp_path, END).eval
    assert (evaluation.before, evaluation.after) == (None, 0.7)


def test_a_summary_is_replaced_whole(tmp_path: Path):
    write_summary(tmp_path, summarize(tmp_path, END))
    write_summary(tmp_path, summarize(run_folder(tmp_path), END))
    summary = read_summary(tmp_path)
    assert summary is not None
    assert summary["steps"] == 4
    assert not list(tmp_path.glob("*.partial"))


def test_a_folder_without_a_summary_has_none(tmp_path: Path):
    assert read_summary(tmp_path) is None


@pytest.mark.parametrize("text", ['{"outcome":', "[]", '{"outcome": "finished"}', "\udcff"])
def test_a_broken_summary_is_none_so_that_one_run_does_not_hide_the_others(tmp_path: Path, text):
    (tmp_path / "summary.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    assert read_summary(tmp_path) is None
    (tmp_path / "recipe.yaml").write_text("kind: rl\n", encoding="utf-8")
    assert "ended without a summary" in list_runs([tmp_path])
    assert "ended without a summary" in describe_run(tmp_path)


@pytest.mark.parametrize("line", [b"{\x00\n", b"\xff\xfe\n", b"[]\n", b'{"reward": 1}\n'])
def test_a_broken_row_is_named(tmp_path: Path, line: bytes):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line)
    with pytest.raises(DataError, match="line 2"):
        read_rows(tmp_path / "metrics.jsonl")
