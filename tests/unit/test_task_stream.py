"""Which task comes next, and which tasks there are."""

import json
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.agents.jsonl import read_jsonl
from areal_ray.agents.task_stream import TasksConfig, TaskStream, fit_prompts, load_tasks
from areal_ray.core.task import Task
from areal_ray.errors import DataError, RecipeError


def tasks(count: int) -> list[Task]:
    return [Task(str(i), ({"role": "user", "content": "x" * (i + 1)},)) for i in range(count)]


def drawn(stream: TaskStream, count: int) -> list[tuple[str, int, int]]:
    return [(d.task.id, d.epoch, d.attempt) for d in islice(stream, count)]


@given(count=st.integers(1, 20), seed=st.integers(0, 99), shuffle=st.booleans())
def test_every_epoch_hands_out_each_task_once(count, seed, shuffle):
    stream = TaskStream(tasks(count), seed=seed, shuffle=shuffle)
    for epoch in range(3):
        ids = [i for i, e, _ in drawn(stream, count) if e == epoch]
        assert sorted(ids, key=int) == [str(i) for i in range(count)]


def test_the_order_is_the_seeds_and_differs_between_epochs_and_seeds():
    one, same, other = (TaskStream(tasks(50), seed=seed) for seed in (1, 1, 2))
    first = drawn(one, 50)
    assert first == drawn(same, 50)
    assert first != drawn(other, 50)
    assert [i for i, _, _ in first] != [i for i, _, _ in drawn(one, 50)]


def test_without_shuffling_tasks_come_in_their_own_order():
    assert [i for i, _, _ in drawn(TaskStream(tasks(3), shuffle=False), 4)] == ["0", "1", "2", "0"]


def test_a_failed_task_comes_back_before_any_fresh_one_with_its_attempt_counted():
    stream = TaskStream(tasks(4), shuffle=False)
    drawn(stream, 2)
    stream.retry("0", 0, 0)
    assert drawn(stream, 2) == [("0", 0, 1), ("2", 0, 0)]


@given(count=st.integers(1, 12), before=st.integers(0, 30), retried=st.booleans())
def test_a_restored_stream_goes_on_as_the_uninterrupted_one(count, before, retried):
    straight = TaskStream(tasks(count), seed=3)
    drawn(straight, before)
    if retried:
        straight.retry("0", 0, 1)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = TaskStream(tasks(count), seed=3)
    resumed.load_state_dict(state)
    assert drawn(resumed, 2 * count + 1) == drawn(straight, 2 * count + 1)


def test_a_cursor_of_another_task_list_is_refused():
    state = TaskStream(tasks(4)).state_dict()
    with pytest.raises(DataError, match="num_tasks = 4"):
        TaskStream(tasks(5)).load_state_dict(state)


@pytest.mark.parametrize("change", ["other", "reordered"])
def test_a_cursor_of_as_many_other_tasks_or_of_another_order_is_refused(change):
    state = TaskStream(tasks(4)).state_dict()
    first, *rest = tasks(4)
    other = [*rest, first] if change == "reordered" else [Task("new", first.messages), *rest]
    with pytest.raises(DataError, match=r"other ids .* or the same in another order"):
        TaskStream(other).load_state_dict(state)


def count_characters(messages) -> int:
    return sum(len(message["content"]) for message in messages)


def rows(*lengths: int) -> list[Task]:
    text = "".join(chr(33 + i) for i in range(max(lengths)))
    return [
        Task(f"r{i}", ({"role": "user", "content": text[:length]},))
        for i, length in enumerate(lengths)
    ]


def limited(action: str, limit: int = 64) -> TasksConfig:
    return TasksConfig(source="m:f", max_prompt_tokens=limit, overlong=action)


def test_overlong_prompts_are_filtered_and_counted():
    kept = fit_prompts(rows(10, 64, 65), limited("filter"), count_characters)
    assert [task.id for task in kept.tasks] == ["r0", "r1"]
    assert (kept.num_dropped, kept.num_cut) == (1, 0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_overlong_prompts_are_cut_on_the_proper_side_and_no_more_than_needed(side):
    made = rows(10, 64, 65)
    kept = fit_prompts(made, limited(side), count_characters)
    whole, cut = (t[2].messages[0]["content"] for t in (made, kept.tasks))
    assert cut == (whole[1:] if side == "left" else whole[:64])
    assert kept.tasks[:2] == tuple(made[:2])
    assert kept.num_cut == 1


def test_an_overlong_prompt_is_an_error_that_names_its_row_and_the_way_out():
    with pytest.raises(DataError, match=r"row 2 \('r2'\): prompt of 65 tokens.*= 64.*overlong"):
        fit_prompts(rows(10, 64, 65), limited("error"), count_characters)


def test_without_a_limit_of_its_own_a_prompt_must_leave_room_in_the_context_window():
    config = TasksConfig(source="m:f", overlong="filter")
    made = rows(10, 63, 64, 65)
    kept = fit_prompts(made, config, count_characters, window_tokens=65)
    assert [task.id for task in kept.tasks] == ["r0", "r1", "r2"]
    assert fit_prompts(made, config, count_characters).tasks == tuple(made)  # not known
    wide = limited("filter", 1000)
    assert fit_prompts(made, wide, count_characters, window_tokens=65).num_dropped == 1


def test_prompts_that_cannot_fill_the_window_are_not_even_counted():
    counted = []

    def count(messages):
        counted.append(messages)
        return count_characters(messages)

    made = rows(10, 20, 60)
    fit_prompts(made, TasksConfig(source="m:f"), count, window_tokens=65)
    assert counted == [made[2].messages]


def test_a_filter_that_leaves_nothing_is_an_error_with_counts():
    with pytest.raises(DataError, match="0 of 2 left, 2 dropped"):
        fit_prompts(rows(65, 66), limited("filter"), count_characters)


def test_a_source_of_a_recipe_is_found_from_the_folders_above_it(tmp_path):
    package = tmp_path / "found_recipes" / "sums"
    package.mkdir(parents=True)
    (package / "tasks.py").write_text(
        "from areal_ray.agents import Task\n"
        "def train(count):\n"
        "    return [Task(str(i), ({'role': 'user', 'content': 'x'},)) for i in range(count)]\n"
        "def twice():\n    return train(1) + train(1)\n"
        "def wrong():\n    return ['x']\n"
        "def none():\n    return []\n"
    )
    source = "found_recipes.sums.tasks:"
    search = [package, package.parent, tmp_path]
    config = TasksConfig(source=source + "train", args={"count": 5}, limit=3)
    assert [task.id for task in load_tasks(config, search)] == ["0", "1", "2"]
    for name, told in (
        ("twice", "'0' appears twice"),
        ("wrong", "row 0 is a str"),
        ("none", "gave no tasks"),
    ):
        with pytest.raises(DataError, match=told):
            load_tasks(TasksConfig(source=source + name), search)
    with pytest.raises(DataError, match="cannot be called"):
        load_tasks(TasksConfig(source=source + "train"), search)
    with pytest.raises(RecipeError, match=r"no 'trian'. Did you mean 'train'"):
        load_tasks(TasksConfig(source=source + "trian"), search)


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("no_colon", "must read 'package.module:name'"),
        ("no_such_package.tasks:train", "no module 'no_such_package.tasks'"),
        ("areal_ray.core.task:Taks", "Did you mean 'Task'"),
    ],
)
def test_a_source_that_cannot_be_found_is_one_clear_error(reference, told):
    with pytest.raises(RecipeError, match=told):
        load_tasks(TasksConfig(source=reference))


def test_jsonl_is_split_at_line_feeds_alone(tmp_path):
    path = tmp_path / "x.jsonl"
    first, second = "a\u2028b", "c\u0085d"
    lines = [json.dumps({"t": t}, ensure_ascii=False) for t in (first, second)]
    path.write_bytes((lines[0] + "\r\n" + lines[1]).encode())
    assert [row["t"] for row in read_jsonl(path)] == [first, second]


def test_a_byte_order_mark_and_every_escape_are_read(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"t": "a\\u2028b\\n"}\r\n \r\n{"t": "\xc3\xa9"}')
    assert [row["t"] for row in read_jsonl(path)] == ["a\u2028b\n", "\u00e9"]


@pytest.mark.parametrize(
    "line", [b"\xff\xfe{\x00}\x00", b"[1]", b"3", b'{"t": ' + b"[" * 10**5, b"{'t': 1}"]
)
def test_a_line_that_is_no_json_object_is_named_with_its_file(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"t": 1}\n\n' + line)
    with pytest.raises(DataError, match=r"x\.jsonl:3: "):
        read_jsonl(path)


def test_a_broken_jsonl_line_is_named_with_its_file(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"t": 1}\n{"t": \n')
    with pytest.raises(DataError, match=r"x\.jsonl:2: not JSON"):
        read_jsonl(path)


@pytest.mark.parametrize("content", ["", "\n\n  \n", "\ufeff", "\ufeff\r\n\t\r\n"])
def test_a_jsonl_file_without_rows_is_an_error(tmp_path, content):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="has no rows"):
        read_jsonl(path)


def test_a_missing_jsonl_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match=r"gone\.jsonl"):
        read_jsonl(tmp_path / "gone.jsonl")


@pytest.mark.parametrize(
    "messages",
    [
        ({"role": "system", "content": "x" * 50},),
        ({"role": "user", "content": [{"type": "text", "text": "x" * 50}]},),
    ],
)
def test_a_prompt_that_cannot_be_cut_is_told_by_row(messages):
    config = TasksConfig(source="x:y", max_prompt_tokens=10, overlong="left")
    with pytest.raises(DataError, match=r"tasks row 0 \('t'\): .* cannot be cut"):
        fit_prompts([Task("t", messages)], config, lambda messages: 50)


def test_a_task_that_the_source_no_longer_has_is_told_on_resuming():
    with pytest.raises(DataError, match="resume: the checkpoint knows task 'gone'"):
        TaskStream(tasks(3)).retry("gone", 0, 0)
