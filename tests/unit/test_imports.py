"""Names in a recipe become what stands in the files now, run after run in one process."""

import os
from pathlib import Path

import pytest

from areal_ray.core.imports import resolve
from areal_ray.errors import RecipeError


def write(folder: Path, answer: int, helper: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "imports_helper.py").write_text(f"VALUE = {helper}\n")
    file = folder / "imports_mine.py"
    file.write_text(
        f"from imports_helper import VALUE\ndef answer():\n    return {answer}, VALUE\n"
    )
    for path in folder.glob("*.py"):  # as an editor would: later than what was there
        os.utime(path, ns=(0, 10**9 * (1 + answer + helper)))
    return folder


def answer(folder: Path) -> tuple[int, int]:
    said: tuple[int, int] = resolve("imports_mine:answer", [folder])()
    return said


def test_two_folders_with_a_module_of_one_name_are_two_modules(tmp_path):
    one, other = write(tmp_path / "one", 1, 10), write(tmp_path / "other", 2, 20)
    assert [answer(folder) for folder in (one, other, one)] == [(1, 10), (2, 20), (1, 10)]


def test_a_file_that_was_edited_is_read_again_and_so_is_one_beside_it(tmp_path):
    folder = write(tmp_path / "edited", 3)
    assert answer(folder) == (3, 0)
    assert answer(write(folder, 4)) == (4, 0)
    assert answer(write(folder, 4, 5)) == (4, 5)


def test_neighbours_of_one_name_are_two_too(tmp_path):
    one, other = write(tmp_path / "one", 1, 10), write(tmp_path / "other", 2, 20)
    (other / "imports_mine.py").rename(other / "imports_theirs.py")
    assert answer(one) == (1, 10)
    assert resolve("imports_theirs:answer", [other])() == (2, 20)


def test_a_file_that_was_not_changed_is_imported_once(tmp_path):
    folder = write(tmp_path / "same", 6)
    first = resolve("imports_mine:answer", [folder])
    assert resolve("imports_mine:answer", [folder]) is first


@pytest.mark.parametrize("raised", ["KeyError('a')", "OSError('no disk')", "SystemExit(2)"])
def test_a_module_that_cannot_be_imported_is_told_with_the_reason(tmp_path, raised):
    name = f"imports_raises_{raised[:3].lower()}"
    (tmp_path / f"{name}.py").write_text(f"raise {raised}\n")
    with pytest.raises(RecipeError, match=f"importing {name} failed: "):
        resolve(f"{name}:x", [tmp_path], where="tasks.source")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import json\nfrom pathlib import Path\ndef solve(): ...\nLIMIT = 3", "It has: solve."),
        ("from json import dumps", "It has: dumps."),
        ("from json import dumps as nimes", "Did you mean 'nimes'?"),
        ("", "It has: nothing."),
    ],
)
def test_a_name_that_a_module_lacks_is_told_with_those_that_it_defines(tmp_path, text, told):
    (tmp_path / "lacks_names.py").write_text(text)
    with pytest.raises(RecipeError) as caught:
        resolve("lacks_names:nimed", [tmp_path])
    assert told in str(caught.value)
