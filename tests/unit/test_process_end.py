"""How the end of an engine's process is told."""

from pathlib import Path

import pytest

from areal_ray.engines.process_end import OomWatch, ended_how, last_lines, words_from


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (0, "ended with code 0"),
        (2, "ended with code 2"),
        (-9, "ended with code -9 (SIGKILL)"),
        (137, "ended with code 137 (SIGKILL)"),
        (139, "ended with code 139 (SIGSEGV)"),
        (255, "ended with code 255"),
        (None, "ended"),
    ],
)
def test_an_exit_code_is_told_with_the_signal_that_it_stands_for(
    code: int | None, told: str
) -> None:
    assert ended_how(code) == told


def test_the_last_lines_are_those_after_the_start_without_colours_and_blanks(
    tmp_path: Path,
) -> None:
    log = tmp_path / "out.log"
    log.write_text("of the process before\n")
    before = log.stat().st_size
    with log.open("a") as file:
        file.writelines(f"\x1b[31mline {i}\x1b[0m\n\n" for i in range(40))
        file.write("x" * 1000)
    lines = last_lines(log, before).splitlines()
    assert lines[:2] == ["line 29", "line 30"]
    assert len(lines) == 12
    assert len(lines[-1]) == 300
    assert last_lines(log, log.stat().st_size) == ""
    assert last_lines(tmp_path / "none") == ""


def test_each_file_is_named_over_what_it_says(tmp_path: Path) -> None:
    said, silent = tmp_path / "said", tmp_path / "silent"
    said.write_text("out of memory\n")
    silent.touch()
    told = words_from({said: 0, silent: 0})
    assert told == f"The last lines of {said}:\n  out of memory"
    assert words_from({silent: 0}) == f"Nothing stands in {silent}."


def test_nothing_is_said_of_the_kernel_where_it_killed_nothing() -> None:
    assert OomWatch().told() == ""
