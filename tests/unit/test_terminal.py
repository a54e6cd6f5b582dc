"""What others said reaches a terminal as text, and not as something that it obeys."""

import io
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from areal_ray.cli import main
from areal_ray.telemetry.live import LiveProgress
from areal_ray.telemetry.load_table import LoadTable, print_load
from areal_ray.telemetry.log import run_log
from areal_ray.telemetry.progress import LineProgress, Progress
from areal_ray.telemetry.summary import LedgerSummary, Summary
from areal_ray.telemetry.terminal import is_one_line, printable, say
from areal_ray.telemetry.views import EvalView, Header, StatusView, StepView

EVIL = "\x1b]0;owned\x07\x9b2J\r"
SHOWN = "\\x1b]0;owned\\x07\\x9b2J\\x0d"


@given(st.text())
def test_no_control_character_is_left_and_nothing_else_is_changed(text):
    told = printable(text)
    assert all(letter in "\n\t" or ord(letter) >= 32 for letter in told)
    assert not set(told) & set(map(chr, (*range(0x7F, 0xA0), 0x202E, 0x2066)))
    told.encode()
    assert printable(told) == told
    if is_one_line(text):
        assert told == text


@pytest.mark.parametrize("text", ["", "t", "caf\u00e9 \u4f60\u597d \U0001f600", "a\u3000b"])
def test_a_name_in_any_script_is_one_line(text):
    assert is_one_line(text)
    assert printable(text) == text


@pytest.mark.parametrize("text", ["a\nb", "a\tb", "\x1b", "\x7f", "\u202e", "\ud800", "\u2028"])
def test_a_name_that_holds_a_control_character_is_none(text):
    assert not is_one_line(text)


def test_lines_and_tabs_of_a_longer_text_stay(capsys):
    say("one\n\ttwo " + EVIL)
    assert capsys.readouterr().out == f"one\n\ttwo {SHOWN}\n"


def shown_by(progress: Progress) -> None:
    progress.start(Header(name="demo", kind="rl", total_steps=4, facts={"model": EVIL}))
    progress.on_event(f"event {EVIL}")
    progress.on_status(StatusView(waits={"learner": f"wait {EVIL}"}, counts={"groups running": 2}))
    progress.on_step(StepView(step=1, version=1, step_s=1.0))
    progress.on_eval(EvalView(step=1, version=1, accuracy=0.5, episodes=2))


FAILED = Summary(
    name="demo",
    kind="rl",
    outcome="failed",
    failure=f"failure {EVIL}",
    steps=1,
    planned_steps=4,
    version=1,
    wall_s=2.0,
    seed=0,
    ledger=LedgerSummary(admitted=1, failed=1, reasons={f"reason {EVIL}": 1}),
    replaced=(f"agent-0 died: {EVIL}",),
)


def assert_harmless(text: str) -> None:
    assert "\x1b]0;owned" not in text
    assert not set(text) & {"\x07", "\x9b"}
    assert "owned" in text


def test_plain_lines_are_harmless():
    stream, now = io.StringIO(), [0.0]
    progress = LineProgress(stream, heartbeat_s=1.0, clock=lambda: now[0])
    shown_by(progress)
    now[0] = 60.0
    progress.beat()
    progress.stop(FAILED)
    text = stream.getvalue()
    assert_harmless(text)
    assert "\x1b" not in text
    assert "\r" not in text
    for word in ("event", "wait", "failure"):
        assert f"{word} {SHOWN}" in text


def test_the_table_is_harmless():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system=None, width=200)
    progress = LiveProgress(stream, quiet_s=1.0, clock=lambda: 0.0, console=console)
    shown_by(progress)
    page = Console(file=io.StringIO(), color_system=None, width=200)
    page.print(progress._draw())
    assert_harmless(page.file.getvalue())
    progress.stop(replace(FAILED, failure=f"failure {EVIL}"))
    assert_harmless(stream.getvalue())
    for word in ("event", "failure"):
        assert f"{word} {SHOWN}" in stream.getvalue()


def test_the_log_is_harmless(tmp_path, capsys):
    with run_log(tmp_path, run="r"):
        logging.getLogger("areal_ray.test").warning("session %s", EVIL)
    assert SHOWN in (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert SHOWN in capsys.readouterr().err


def test_what_a_measured_server_calls_its_errors_is_neither_obeyed_nor_taken_for_markup():
    stream = io.StringIO()
    print_load(LoadTable(f"load {EVIL}", {}, {"url": EVIL}, {f"told: [bold]{EVIL}": 1}), stream)
    assert_harmless(stream.getvalue())
    assert f"[bold]{SHOWN}" in stream.getvalue()


def command(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        main(words)
    told = capsys.readouterr()
    return told.out + told.err


def test_commands_about_a_run_are_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Whatever its files hold: they may be of a release that let such names in."""
    folder = tmp_path / "r"
    (folder / "journal").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("kind: rl\nname: r\n")
    committed = {"event": "committed", "group": f"0/{EVIL}/0", "rewards": [1.0], "tokens": 3}
    committed |= {"sessions": [f"s-{EVIL}"], "oldest_version": 0, "newest_version": 0}
    trained = {"event": "trained", "step": 1, "groups": [committed["group"]]}
    back = {"event": "rolled_back", "step": 1, "to": 0, "reason": f"refused {EVIL}"}
    lines = [json.dumps(event) + "\n" for event in (committed, trained, back)]
    (folder / "journal" / "ledger.jsonl").write_text("".join(lines))
    summary = {**FAILED.to_json(), "name": "r"}
    (folder / "summary.json").write_text(json.dumps(summary))
    root = ("--fileroot", str(tmp_path))
    for words in (("status", "r"), ("lineage", "1", "--run", "r"), ("report", "r")):
        told = command(capsys, *words, *root)
        assert_harmless(told)
        assert "\x1b" not in told
    assert "\x1b" not in command(capsys, "lineage", "1", "--run", "r", "--json", *root)
    assert "\x1b" not in command(capsys, "status", EVIL, *root)
