"""What a run says: plain lines, a heartbeat when nothing happens, a live table on a terminal."""

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from areal_ray.telemetry.history import RunHistory
from areal_ray.telemetry.live import LiveProgress
from areal_ray.telemetry.plot import plot, shrink, sparkline
from areal_ray.telemetry.progress import LineProgress, QuietProgress, open_progress
from areal_ray.telemetry.sinks import TelemetryConfig
from areal_ray.telemetry.summary import EvalSummary, RewardSummary, Summary
from areal_ray.telemetry.views import (
    EvalView,
    Header,
    StatusView,
    StepView,
    count_text,
    duration_text,
)

HEADER = Header(name="demo", kind="rl", total_steps=40, facts={"model": "0.13 M parameters"})
SUMMARY = Summary(
    name="demo",
    kind="rl",
    outcome="finished",
    steps=40,
    planned_steps=40,
    version=40,
    wall_s=72.3,
    seed=0,
    eval=EvalSummary(0.46, 0.987),
    reward=RewardSummary(0.41, 0.97),
)


class Clock:
    """Time that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def step(number: int, **more: object) -> StepView:
    values = {
        "step": number,
        "version": number,
        "step_s": 11.2,
        "reward": 0.613,
        "staleness_mean": 0.8,
        "staleness_max": 2,
        "staleness_bound": 2,
        "tokens_per_s": 7400.0,
        "queue_groups": 3,
        "wait_s": 0.3,
    }
    return StepView(**{**values, **more})


def spoken(heartbeat_s: float = 15.0) -> tuple[LineProgress, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return LineProgress(stream, heartbeat_s=heartbeat_s, clock=clock), stream, clock


def test_a_step_is_one_line():
    assert step(41).line() == (
        "step 41  v41  reward 0.613  staleness 0.8 of 2  step 11.2 s  7.4k tokens/s  "
        "waited 0.3 s for rollouts"
    )


def test_a_skipped_step_says_so_and_shows_no_reward_of_another():
    line = step(7, reward=None, skipped=True).line()
    assert "skipped (nothing to train on)" in line
    assert "reward" not in line


def test_no_step_is_beyond_the_last_one():
    assert step(190).line(180).startswith("step 190/190 ")


def test_a_run_that_publishes_nothing_tells_its_steps_and_no_version():
    view = EvalView(step=20, accuracy=0.75, episodes=64, wall_s=1.2, unit="pairs")
    assert view.line() == "held-out accuracy 0.750 at step 20  (64 pairs, 1.2 s)"
    assert "at v3" in EvalView(step=4, version=3, accuracy=0.75, episodes=64).line()
    assert StepView(step=2, step_s=0.1, loss=0.5).line() == "step 2  loss 0.5  step 0.1 s"
    progress, _ = live(Clock())
    progress.start(HEADER)
    progress.on_step(StepView(step=2, step_s=0.1, loss=0.5))
    text = drawn(progress)
    progress.stop()
    assert re.search(r"version +-", text)


def test_a_model_that_is_scored_alone_has_no_version():
    view = EvalView(step=0, version=0, accuracy=0.5, episodes=200, wall_s=2.0, is_alone=True)
    assert view.line() == "held-out accuracy 0.500  (200 tasks, 2.0 s)"


def test_no_bound_is_said_in_words():
    assert "staleness 0.8 of unlimited" in step(1, staleness_bound=None).line()


def test_a_quiet_run_says_what_it_waits_for_and_counts():
    progress, stream, clock = spoken(heartbeat_s=15.0)
    progress.start(HEADER)
    progress.on_step(step(3))
    progress.on_status(
        StatusView(
            waits={"learner": "3 of 16 groups"}, counts={"groups running": 12, "turns": 1084}
        )
    )
    clock.now = 14.0
    progress.beat()
    assert "since step 3" not in stream.getvalue()
    clock.now = 16.0
    progress.beat()
    progress.beat()  # it spoke just now
    clock.now = 32.0
    progress.beat()  # the same again: later
    clock.now = 47.0
    progress.beat()
    progress.stop()
    first, second = [line for line in stream.getvalue().splitlines() if "since" in line]
    assert first.strip() == (
        "16.0 s since step 3: learner waits for 3 of 16 groups; groups running 12, turns 1,084"
    )
    assert second.strip().startswith("47.0 s since step 3: ")


def test_what_is_only_repeated_comes_at_longer_intervals_and_news_at_once():
    progress, stream, clock = spoken(heartbeat_s=15.0)
    progress.start(HEADER)
    for second in range(1, 20_001):
        clock.now = float(second)
        calls = 5 if second > 19_800 else 4
        progress.on_status(StatusView(counts={"calls": calls, "under way": 0}))
        progress.beat()
    progress.stop()
    said = [line.strip() for line in stream.getvalue().splitlines() if "since" in line]
    repeated = [line for line in said if "calls 4, under way 0" in line]
    assert 8 <= len(repeated) <= 14, said  # 15, 30, 60 s and so on to an hour, in five and a half
    news = [line for line in said if "calls 5, under way 0" in line]
    assert said == [*repeated, *news]
    # At once, again after half a minute, then after a whole one: as at the start.
    assert [line.partition(" since")[0] for line in news[:3]] == ["5 h 30 min"] * 2 + ["5 h 31 min"]


def test_a_wait_that_only_grows_older_is_no_news():
    progress, stream, clock = spoken(heartbeat_s=15.0)
    progress.start(HEADER)
    for second in range(1, 3601):
        clock.now = float(second)
        oldest = f"32 of 32 groups (oldest: 0/slot-0/0, gateway-0, {second} s, in wait for clients)"
        progress.on_status(StatusView(waits={"learner": oldest}))
        progress.beat()
    progress.stop()
    said = [line for line in stream.getvalue().splitlines() if "since" in line]
    assert 5 <= len(said) <= 9, said  # 15, 30, 60 s and so on, in one hour
    assert ", 15 s, in wait" in said[0]


def test_the_heartbeat_comes_by_itself():
    stream = io.StringIO()
    progress = LineProgress(stream, heartbeat_s=0.02)
    progress.start(HEADER)
    progress.on_status(StatusView(waits={"learner": "16 of 16 groups"}))
    for _ in range(500):
        if "learner waits for 16 of 16 groups" in stream.getvalue():
            break
        progress._stopped.wait(0.01)
    progress.stop()
    assert "since the start: learner waits for 16 of 16 groups" in stream.getvalue()


def test_a_run_is_told_from_its_header_to_its_outcome():
    progress, stream, clock = spoken()
    progress.start(HEADER)
    progress.on_eval(EvalView(step=0, version=0, accuracy=0.46, episodes=300, wall_s=1.2))
    for number in (1, 2, 3):
        clock.now += 1.0
        progress.on_step(step(number, reward=number / 3))
    progress.on_eval(EvalView(step=3, version=3, accuracy=0.9, episodes=300, wall_s=1.2))
    progress.on_event("rollout-1 died (killed by signal 9); restarted, rejoins at version 3")
    progress.stop(SUMMARY, Path("runs/demo/report.html"))
    progress.stop(SUMMARY)
    text = stream.getvalue()
    assert text.startswith("demo (rl): 40 steps\n  model")
    assert "held-out accuracy 0.460 at v0" in text
    assert "eta 6 min 54 s" in text  # 37 steps of 11.2 s
    assert "rejoins at version 3" in text
    assert text.count("demo finished: 40 of 40 steps in 1 min 12 s") == 1
    assert "held-out  0.460 -> 0.987" in text
    assert "reward, by step" in text
    assert "held-out accuracy, by step" in text
    assert "report    runs/demo/report.html" in text
    assert "\x1b" not in text  # no terminal codes in a pipe


def test_a_stream_without_unicode_gets_ascii():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    progress = LineProgress(stream, heartbeat_s=15.0)
    progress.start(HEADER)
    progress.on_step(step(1))
    progress.on_step(step(2, reward=0.9))
    progress.stop(SUMMARY)
    assert "*" in raw.getvalue().decode("ascii")


def test_a_failed_run_ends_with_its_reason():
    progress, stream, _ = spoken()
    progress.start(HEADER)
    reason = "learner-0 raised ValueError('X')"
    failed = Summary(
        name="demo", kind="rl", outcome="failed", failure=reason, steps=2, planned_steps=40,
        version=2, wall_s=5.0, seed=0,
    )  # fmt: skip
    progress.stop(failed)
    assert f"demo failed after 2 of 40 steps in 5.0 s: {reason}" in stream.getvalue()


def test_auto_is_a_table_on_a_terminal_and_lines_elsewhere():
    auto = TelemetryConfig()
    assert isinstance(open_progress(auto, io.StringIO()), LineProgress)
    assert isinstance(open_progress(auto, Terminal()), LiveProgress)
    assert isinstance(open_progress(TelemetryConfig(console="lines"), Terminal()), LineProgress)
    assert isinstance(open_progress(TelemetryConfig(console="off"), Terminal()), QuietProgress)


def live(clock: Clock, width: int = 100) -> tuple[LiveProgress, Console]:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    return LiveProgress(console.file, quiet_s=15.0, clock=clock, console=console), console


def drawn(progress: LiveProgress, width: int = 100) -> str:
    page = Console(file=io.StringIO(), color_system=None, width=width)
    page.print(progress._draw())
    return page.file.getvalue()


def test_the_table_shows_every_figure_of_the_run_and_what_each_role_waits_for():
    clock = Clock()
    progress, _ = live(clock)
    progress.start(HEADER)
    assert "first step under way" in drawn(progress)
    progress.on_eval(EvalView(step=0, version=0, accuracy=0.46, episodes=300))
    for number in range(1, 11):
        progress.on_step(step(number, reward=number / 10))
    progress.on_eval(EvalView(step=10, version=10, accuracy=0.91, episodes=300))
    progress.on_status(
        StatusView(waits={"learner": "3 of 16 groups"}, counts={"groups running": 12})
    )
    clock.now = 60.0
    text = drawn(progress)
    progress.stop()
    for shown in (
        "demo", "step 10 of 40", "1 min 00 s", "about 5 min 36 s left", "version", "1.000", "0.910",
        "0.8, max 2 of 2", "7.4k", "3 groups", "learner", "waits for 3 of 16 groups",
        "12 groups running", "nothing finished for 1 min 00 s",
    ):  # fmt: skip
        assert shown in text, shown
    assert re.search("\u2581.*\u2588", text)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_table_fits_any_terminal(width):
    progress, _ = live(Clock(), width)
    progress.start(HEADER)
    progress.on_step(step(1))
    progress.on_status(StatusView(waits={"learner": "16 of 16 groups " * 9}))
    lines = drawn(progress, width).splitlines()
    progress.stop()
    assert max(map(len, lines)) <= width


def test_the_summary_takes_the_place_of_the_table():
    progress, console = live(Clock())
    progress.start(HEADER)
    for number in (1, 2):
        progress.on_step(step(number))
    progress.on_event("rollout-1 died; restarted")
    progress.stop(SUMMARY, Path("runs/demo/report.html"))
    progress.stop(SUMMARY)
    text = console.file.getvalue()
    assert text.startswith("model      0.13 M parameters\n")
    assert text.count("demo finished: 40 of 40 steps in 1 min 12 s") == 1
    assert "rollout-1 died; restarted" in text
    assert "runs/demo/report.html" in text
    assert text.endswith("\n")


def test_the_time_left_follows_the_last_ten_steps_alone():
    history = RunHistory(Header(name="d", kind="rl", total_steps=30), Clock())
    assert history.eta_s is None
    for number in range(1, 21):
        history.add_step(step(number, step_s=100.0 if number <= 10 else 2.0))
    assert history.eta_s == pytest.approx(20.0)


def test_the_start_of_everything_in_the_first_step_does_not_count_for_the_time_left():
    history = RunHistory(Header(name="d", kind="rl", total_steps=12), Clock())
    history.add_step(step(1, step_s=50.0))
    history.add_step(step(2, step_s=1.0))
    assert history.eta_s == pytest.approx(10.0)


def test_fast_steps_share_a_line_but_the_last_one_is_always_told():
    progress, stream, clock = spoken()
    progress.start(Header(name="d", kind="sft", total_steps=20))
    for number in range(1, 21):
        clock.now += 0.1
        progress.on_step(StepView(step=number, step_s=0.1, loss=1 / number))
    progress.stop()
    told = re.findall(r"^step +(\d+)/20  loss", stream.getvalue(), re.MULTILINE)
    assert told[0] == "1"
    assert told[-1] == "20"
    assert 4 <= len(told) <= 6


def test_a_resumed_run_counts_from_its_checkpoint():
    history = RunHistory(Header(name="d", kind="rl", total_steps=30, first_step=20), Clock())
    assert history.steps_done == 20


def test_a_straight_line_is_drawn_straight():
    rows = plot([(0, 0.0), (9, 1.0)], width=10, height=10, y_range=(0, 1), ascii_only=True)
    cells = [row.split("|")[1] for row in rows[:10]]
    assert cells == [" " * (9 - i) + "*" for i in range(10)]
    assert rows[0].startswith("1.00 |")
    assert rows[9].startswith("0.00 |")
    assert rows[10].split() == ["0", "9"]


def test_a_sparkline_goes_from_lowest_to_highest_and_leaves_gaps_blank():
    assert sparkline([0.0, None, 1.0], 10) == "\u2581 \u2588"
    assert sparkline([], 10) == sparkline([None], 10) == ""


@given(st.lists(st.floats(-1e3, 1e3) | st.none(), max_size=300), st.integers(1, 60))
def test_shrinking_never_leaves_the_range_nor_the_width(values, width):
    known = [v for v in values if v is not None]
    shrunk = shrink(values, width)
    assert len(shrunk) <= width
    assert all(min(known) - 1e-9 <= v <= max(known) + 1e-9 for v in shrunk if v is not None)
    assert any(v is not None for v in shrunk) == bool(known)


def test_numbers_read_as_people_say_them():
    assert [count_text(n) for n in (940, 7400, 12_345, 1_300_000)] == ["940", "7.4k", "12k", "1.3M"]
    assert [duration_text(s) for s in (8.43, 65, 7620)] == ["8.4 s", "1 min 05 s", "2 h 07 min"]
