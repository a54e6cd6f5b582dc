"""report.html is one file that needs nothing else, says what the records say and runs no text."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.core.journal import JOURNAL_FOLDER, LedgerJournal, resumption
from areal_ray.core.trajectory import Group, Outcome, StopReason, Trajectory
from areal_ray.telemetry.charts import (
    Series,
    bar_chart,
    line_chart,
    nice_axis,
    stacked_columns,
    thin,
)
from areal_ray.telemetry.episodes import (
    EPISODES_FILE,
    EpisodeLog,
    episode_lines,
    without_secrets,
)
from areal_ray.telemetry.report import write_report
from areal_ray.telemetry.rows import read_rows
from areal_ray.telemetry.sinks import TelemetryConfig, open_metric_log
from areal_ray.telemetry.summary import LedgerSummary, RunEnd, summarize, write_summary

PLAIN = TelemetryConfig(tensorboard=False, ray_metrics=False)
EVIL = "<script>alert('x')</script>&\"'"
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that tags are balanced and notes what the page would load or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.scripts = 0
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.scripts += tag == "script"
        self.loads += [str(value) for name, value in attrs if name in ("src", "href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def decode(ids: list[int]) -> list[str]:
    return [f"<{i}>\n" for i in ids]


def trajectory(episode: str, tokens: list[int], num_prompt: int, **more: object) -> Trajectory:
    count = len(tokens)
    mask = np.arange(count) >= num_prompt
    values = {
        "token_ids": np.array(tokens, np.int32),
        "loss_mask": mask,
        "behaviour_logprobs": np.where(mask, -0.5, 0).astype(np.float32),
        "versions": np.where(mask, 3, -1).astype(np.int32),
        "turn_ids": np.where(mask, 0, -1).astype(np.int16),
        "task_id": "task-1",
        "group_id": "group-1",
        "episode_id": episode,
    }
    return Trajectory(**{**values, **more})


def group() -> Group:
    siblings = (
        trajectory("e-a", [1, 2, 3, 4, 5], 3, reward=1.0, final_text="right"),
        trajectory(
            "e-b", [1, 2, 3, 6, 7, 8, 9], 3, reward=0.0, final_text="cut",
            outcome=Outcome.TRUNCATED, stop_reason=StopReason.LENGTH,
        ),
        trajectory(
            "e-c", [1, 2, 3, 9], 3, reward=None, outcome=Outcome.UNSCORED, failure=EVIL,
        ),
        trajectory("e-b", [1, 2, 6], 2, reward=0.0, branch_id=1),
    )  # fmt: skip
    return Group("group-1", "task-1", siblings)


def full_run(folder: Path, steps: int = 5) -> Path:
    log = open_metric_log(folder, PLAIN)
    log.log(0, 0, {"eval/accuracy_fraction": 0.4, "eval/episodes": 50}, kind="eval")
    for step in range(1, steps + 1):
        values = {
            "reward/mean": step / steps, "learner/loss": 1 / step, "learner/sequences": 8,
            "staleness/mean_versions": 1.0, "staleness/max_versions": 2, "agent/ok_episodes": 8,
            "time/learner_wait_s": 0.2, "time/learner_train_s": 0.3, "time/rollout_busy_s": 0.4,
            "rollout/tokens_per_s": 100.0, "queue/depth_groups": 3, "publish/wall_s": 0.05,
        }  # fmt: skip
        log.log(step, step, values)
    log.log(steps, steps, {"eval/accuracy_fraction": 0.9, "eval/episodes": 50}, kind="eval")
    log.close()
    EpisodeLog(folder).write(episode_lines(group(), decode, 1))
    (folder / "recipe.yaml").write_text(f"kind: rl # {EVIL}\nname: demo\ntext: it's\n")
    end = RunEnd(
        name="demo", kind="rl", outcome="finished", planned_steps=steps, version=steps,
        wall_s=10.0, seed=0, staleness_bound=2, staleness_histogram={0: 1, 1: 8, 2: 1},
        ledger=LedgerSummary(12, 10, 1, 1, 0, {EVIL: 1}), replaced=(EVIL,),
    )  # fmt: skip
    write_summary(folder, summarize(folder, end))
    return folder


def test_the_page_loads_nothing_and_runs_only_its_own_script(tmp_path: Path):
    text = write_report(full_run(tmp_path)).read_text(encoding="utf-8")
    page = Page(text)
    assert page.loads == []
    assert page.scripts == 1
    assert not re.search(r"https?://|@import|url\(", text)
    assert EVIL not in text
    assert text.count("alert(&#x27;x&#x27;)") >= 4  # reason, replaced, failure, recipe


def test_the_page_has_every_part_that_the_records_tell_of(tmp_path: Path):
    text = write_report(full_run(tmp_path)).read_text(encoding="utf-8")
    for part in (
        "Learning", "Held-out accuracy", "Staleness of trained groups", "Time by role",
        "Tokens per second", "Publishing weights", "Ledger", "Episodes by outcome",
        "Sample episodes", "Recipe", "Every metric",
    ):  # fmt: skip
        assert part in text, part
    assert "Held-out accuracy rose from 0.400 before training to 0.900 at step 5." in text


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_a_run_that_was_killed_has_a_report_of_what_it_left(tmp_path: Path, missing):
    names = ["metrics.jsonl", "summary.json", "recipe.yaml", EPISODES_FILE]
    (full_run(tmp_path) / names[missing]).unlink()
    assert Page(write_report(tmp_path).read_text(encoding="utf-8")).text


def test_an_empty_run_folder_has_a_report(tmp_path: Path):
    text = write_report(tmp_path).read_text(encoding="utf-8")
    assert "ended without a summary" in "".join(Page(text).text)


def test_a_dumped_line_pairs_each_reply_with_its_own_reward_and_ids():
    lines = episode_lines(group(), decode, 7)
    told = [
        (x["sample"], x["branch_id"], x["reply"], x["reward"], x["finish_reason"]) for x in lines
    ]
    assert told == [
        (0, 0, "right", 1.0, "stop"),
        (1, 0, "cut", 0.0, "length"),
        (2, 0, "", None, "stop"),
        (1, 1, "", 0.0, "stop"),
    ]
    for line, sibling in zip(lines, group().trajectories, strict=True):
        assert line["step"] == 7
        assert (line["task_id"], line["group_id"]) == ("task-1", "group-1")
        assert line["versions"] == [3, 3]
        assert [t["id"] for t in line["tokens"]] == sibling.token_ids.tolist()
        assert [t["mask"] for t in line["tokens"]] == sibling.loss_mask.tolist()
    first = lines[0]["tokens"][3]
    assert first == {
        "text": "<4>\n", "id": 4, "mask": True, "version": 3, "logprob": -0.5, "turn": 0,
    }  # fmt: skip


def test_a_secret_is_in_no_dumped_line_not_even_spelled_by_tokens_or_their_ids():
    (line, *_) = episode_lines(group(), decode, 7)
    line |= {
        "reply": "key hf_abcdef!",
        "failure": "RuntimeError: 401 for hf_abcdef",
        "details": {"asked": ["hf_abcdef", 1], "deep": {"x": "hf_abcdef"}, "n": 2.0},
    }
    spelled = ["a hf", "_abc", "def", " b", " hf_abcdeg"]
    token = line["tokens"][0]
    line["tokens"] = [{**token, "text": text, "id": 90 + i} for i, text in enumerate(spelled)]
    shown = without_secrets(line, {"hf_abcdef"})
    assert "hf_abcdef" not in json.dumps(shown)
    assert [t["text"] for t in shown["tokens"]] == ["[redacted]"] * 3 + [" b", " hf_abcdeg"]
    assert [t["id"] for t in shown["tokens"]] == [-1, -1, -1, 93, 94]
    assert shown["details"]["n"] == 2.0
    assert (shown["reply"], shown["reward"]) == ("key [redacted]!", line["reward"])
    assert without_secrets(line, {"absent"}) == line


def test_a_dump_that_would_lose_a_token_is_refused():
    with pytest.raises(ValueError, match="zip"):
        episode_lines(group(), lambda ids: ["all in one"], 1)


def test_resumption_forgets_episodes_of_steps_that_are_run_again(tmp_path: Path):
    log = EpisodeLog(tmp_path)
    for step in (1, 2, 3):
        log.write(episode_lines(group(), decode, step))
    EpisodeLog(tmp_path, resume_step=2)
    assert {line["step"] for line in read_rows(tmp_path / EPISODES_FILE)} == {1, 2}


def test_each_token_is_shown_with_its_colour_classes(tmp_path: Path):
    text = write_report(full_run(tmp_path)).read_text(encoding="utf-8")
    assert text.count('<span class="s ') == 2 + 4 + 1 + 1  # sampled tokens of the four lines
    assert '<span data-t="1">&lt;1&gt;' in text
    assert 'class="s v0 p1 t0" data-t="4 -0.5 3 0"' in text  # p = exp(-0.5) = .61


def test_a_curve_goes_through_its_points():
    svg = line_chart([Series("reward", [(0, 0.0), (10, 1.0)])], y_range=(0.0, 1.0))
    assert 'd="M46.0 184.0L506.0 12.0"' in svg


def test_values_that_are_not_finite_leave_a_gap_and_no_text_in_the_drawing():
    svg = line_chart([Series("loss", [(1, 1.0), (2, float("nan")), (3, float("inf")), (4, 2.0)])])
    assert "nan" not in svg
    assert "inf" not in svg
    assert line_chart([Series("loss", [(1, float("nan"))])]) == ""


def test_shares_of_a_histogram_are_of_all_groups():
    svg = bar_chart([("0", 30.0), ("1", 60.0), ("2", 10.0)], x_name="versions")
    assert re.findall(r"(\d+) %", svg) == ["30", "60", "10"]


def test_stacked_parts_end_where_the_next_begin():
    svg = stacked_columns(
        [1, 2], [Series("wait", [(1, 1.0)], "c5"), Series("train", [(1, 3.0), (2, 4.0)], "c1")]
    )
    rects = re.findall(r'class="(c\d)" x="([\d.]+)" y="([\d.]+)" \S+ height="([\d.]+)"', svg)
    (_, x0, top_of_wait, _), (_, x1, y, height) = rects[0], rects[1]
    assert x0 == x1
    assert float(y) + float(height) == pytest.approx(float(top_of_wait), abs=0.02)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_an_axis_covers_its_values_with_few_round_ticks(a, b):
    low, high = min(a, b), max(a, b)
    axis = nice_axis(low, high)
    slack = 1e-6 * max(1.0, high - low)
    assert axis.low <= low + slack
    assert axis.high >= high - slack
    assert 2 <= len(axis.ticks) <= 8


@pytest.mark.parametrize("low", [-1.7e-8, 1e6, 0.0])
def test_values_that_differ_by_rounding_alone_have_an_axis_too(low):
    axis = nice_axis(low, low * (1 + 1e-12))
    assert axis.low < axis.high
    assert axis.low <= low <= axis.high


def test_a_long_run_has_a_page_that_a_browser_opens_at_once(tmp_path: Path):
    text = write_report(full_run(tmp_path, steps=3000)).read_text(encoding="utf-8")
    assert len(text) < 600_000
    assert "3000 of 3000 steps" in text


def test_a_resumption_is_told(tmp_path: Path):
    folder = full_run(tmp_path)
    assert "Resumed" not in write_report(folder).read_text(encoding="utf-8")
    journal = LedgerJournal(folder / JOURNAL_FOLDER)
    journal.append(resumption(4, 4))
    journal.close()
    text = write_report(folder).read_text(encoding="utf-8")
    assert "Resumed from a checkpoint" in text
    assert "<li>after step 4, at version 4, on " in text


def test_a_peak_survives_thinning():
    points = [(float(i), float(i == 777)) for i in range(5000)]
    assert max(y for _, y in thin(points, 400, is_peak=True)) == 1.0
    assert [x for x, _ in thin(points, 400)][-1] == 4999.0
