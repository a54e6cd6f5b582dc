"""Which task comes next: epochs in a seeded order, failed tasks first, resumable.

The stream is finite state over a fixed list, so a cursor of a few numbers restores it exactly.
"""

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from areal_ray.core.buckets import digest
from areal_ray.core.config import Config
from areal_ray.core.imports import resolve
from areal_ray.core.task import Task
from areal_ray.errors import DataError

_MOST_TASKS = 1_000_000
"""That a source may give unasked: one without an end would fill the memory."""

CountTokens = Callable[[Sequence[Mapping[str, Any]]], int]
"""Messages -> length of the prompt they render to."""


class TasksConfig(Config):
    """Where the tasks come from and in which order."""

    source: str
    """`package.module:name` of a function that returns an iterable of `Task`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""
    shuffle: bool = True
    """Another order each epoch, fixed by the run's seed."""
    limit: int | None = Field(None, ge=1)
    """Use the first so many tasks only; null = all."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest rendered prompt; null = whatever the context window holds beside one token."""
    overlong: Literal["error", "filter", "left", "right"] = "error"
    """A longer prompt stops the run, is left out, or loses words from the left or the right end of
    its last user message."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One task as handed out."""

    task: Task
    epoch: int
    attempt: int
    """0 = first time in this epoch; counts retries."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What the length limit left of a task list."""

    tasks: tuple[Task, ...]
    num_dropped: int = 0
    num_cut: int = 0


def load_tasks(
    config: TasksConfig, search: Sequence[Path | str] = (), *, where: str = "tasks"
) -> list[Task]:
    """Call the source and check what it gives.

    Raises:
        RecipeError: The source cannot be found.
        DataError: It cannot be called so, gives something else than tasks, none, without end, or an
            id twice.
    """
    source = resolve(config.source, search, where=f"{where}.source")
    try:
        made = source(**config.args) if callable(source) else source
    except TypeError as error:
        raise DataError(f"{where}.args: {config.source} cannot be called: {error}") from error
    if inspect.iscoroutine(made):
        made.close()  # nobody will await it
    if not isinstance(made, Iterable) or isinstance(made, str | bytes):
        raise DataError(
            f"{where}.source: {config.source} gave a {type(made).__name__}; must be tasks. Write "
            "an ordinary function that returns or yields them"
        )
    tasks: list[Task] = []
    seen: set[str] = set()
    for row, task in enumerate(made):
        if config.limit is not None and row >= config.limit:
            break
        if config.limit is None and row >= _MOST_TASKS:
            raise DataError(
                f"{where}.source: {config.source} gave {_MOST_TASKS:,} tasks and goes on. Set "
                f"{where}.limit, to the number you mean if it has an end"
            )
        _check(task, row, seen, f"{where}.source: {config.source}")
        tasks.append(task)
    if not tasks:
        raise DataError(f"{where}.source: {config.source} gave no tasks; at least one is needed")
    return tasks


@dataclass(frozen=True, slots=True)
class _Limit:
    """Longest prompt, and who says so."""

    tokens: int
    told: str
    is_exact: bool = True
    """Whether every prompt is counted; else those alone that may be too long."""


def fit_prompts(
    tasks: Sequence[Task],
    config: TasksConfig,
    count: CountTokens,
    *,
    window_tokens: int = 0,
    where: str = "tasks",
) -> Kept:
    """Apply `max_prompt_tokens` as `overlong` says.

    Args:
        tasks: As loaded.
        config: Their section.
        count: Not called for prompts that cannot fill the window.
        window_tokens: Prompt and sampled tokens that an engine holds; 0 = not known.
        where: Key of the section.

    Raises:
        DataError: A prompt is too long under `error` (its row is named), or nothing is left.
    """
    limit = _limit(config, window_tokens, where)
    if limit is None:
        return Kept(tuple(tasks))
    kept: list[Task] = []
    num_dropped = num_cut = 0
    for row, task in enumerate(tasks):
        if not limit.is_exact and _num_bytes(task) <= limit.tokens // 2:
            kept.append(task)  # the other half is for the template's own words
            continue
        length = count(task.messages)
        if length <= limit.tokens:
            kept.append(task)
        elif config.overlong == "error":
            raise DataError(
                f"{where} row {row} ('{task.id}'): prompt of {length} tokens; {limit.told} = "
                f"{limit.tokens}. Raise it, or set {where}.overlong to filter, left or right"
            )
        elif config.overlong == "filter":
            num_dropped += 1
        else:
            kept.append(_cut(task, f"{where} row {row} ('{task.id}')", limit, config, count))
            num_cut += 1
    if not kept:
        raise DataError(
            f"{where}: 0 of {len(tasks)} left, {num_dropped} dropped: all prompts are longer than "
            f"{limit.told} = {limit.tokens}"
        )
    return Kept(tuple(kept), num_dropped, num_cut)


def _limit(config: TasksConfig, window_tokens: int, where: str) -> _Limit | None:
    said, room = config.max_prompt_tokens, window_tokens - 1
    if said is not None and (said <= room or not window_tokens):
        return _Limit(said, f"{where}.max_prompt_tokens")
    if not window_tokens:
        return None
    told = "what the context window (rollout.engine.max_context_tokens) leaves a prompt"
    return _Limit(room, told, is_exact=False)


def _num_bytes(task: Task) -> int:
    """Of the prompt's text; a token stands for at least one."""
    return sum(len(str(part).encode()) for m in task.messages for part in m.values())


class TaskStream:
    """Endless, seeded, resumable order over a list of tasks.

    Args:
        tasks: At least one.
        seed: Of the order.
        shuffle: Whether each epoch has an order of its own.
    """

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0, shuffle: bool = True) -> None:
        if not tasks:
            raise DataError("tasks: the list is empty; at least one task is needed")
        self._tasks = tuple(tasks)
        self._row_of = {task.id: row for row, task in enumerate(self._tasks)}
        self._ids = digest("\n".join(self._row_of).encode())
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._retries: deque[tuple[int, int, int]] = deque()  # epoch, row, attempt
        self._order = self._order_of(0)

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Draw]:
        while True:
            yield self.next()

    @property
    def epoch(self) -> int:
        """Epoch of the next fresh task."""
        return self._epoch

    def next(self) -> Draw:
        """The next task: one that failed if there is any, else the next of the epoch."""
        if self._retries:
            epoch, row, attempt = self._retries.popleft()
            return Draw(self._tasks[row], epoch, attempt)
        if self._position == len(self._tasks):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        row = self._order[self._position]
        self._position += 1
        return Draw(self._tasks[row], self._epoch, 0)

    def retry(self, task_id: str, epoch: int, attempt: int) -> None:
        """Hand this task out again, before any fresh one, as attempt + 1.

        Raises:
            DataError: No task has this id: the list is another than when it was handed out.
        """
        if task_id not in self._row_of:
            raise DataError(
                f"resume: the checkpoint knows task '{task_id}', the task source does not. Resume "
                "with the tasks it was started with"
            )
        self._retries.append((epoch, self._row_of[task_id], attempt + 1))

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON values."""
        retries = [[epoch, self._tasks[row].id, attempt] for epoch, row, attempt in self._retries]
        return {
            "epoch": self._epoch,
            "position": self._position,
            "retries": retries,
            "num_tasks": len(self._tasks),
            "seed": self._seed,
            "ids": self._ids,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state_dict` was taken.

        Raises:
            DataError: It belongs to another task list or seed: the order would differ.
        """
        for name, ours in (("num_tasks", len(self._tasks)), ("seed", self._seed)):
            if state[name] != ours:
                raise DataError(
                    f"resume: the checkpoint's task stream has {name} = {state[name]}, this run "
                    f"{ours}. Resume with the tasks and seed it was started with"
                )
        if state["ids"] != self._ids:
            raise DataError(
                "resume: the task source gives other ids than when the run was started, or the "
                "same in another order, so that some tasks would be skipped and others taken "
                "twice. Resume with the tasks it was started with"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)
        self._retries = deque(
            (int(epoch), self._row_of[task_id], int(attempt))
            for epoch, task_id, attempt in state["retries"]
        )

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self._tasks)))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _check(task: Any, row: int, seen: set[str], where: str) -> None:
    if not isinstance(task, Task):
        raise DataError(f"{where}: row {row} is a {type(task).__name__}; must be a Task")
    if not isinstance(task.id, str) or not task.id.isprintable() or not task.id:
        raise DataError(
            f"{where}: row {row}: id is {task.id!r}; must be text of printable characters"
        )
    if not isinstance(task.messages, list | tuple):
        raise DataError(
            f"{where}: row {row} ('{task.id}'): messages is a {type(task.messages).__name__}; must "
            "be a tuple of messages such as {'role': 'user', 'content': '...'}"
        )
    if not task.messages:
        raise DataError(f"{where}: row {row} ('{task.id}') has no messages")
    if task.id in seen:
        raise DataError(f"{where}: row {row}: id '{task.id}' appears twice; ids must be unique")
    seen.add(task.id)


def _cut(task: Task, where: str, limit: _Limit, config: TasksConfig, count: CountTokens) -> Task:
    """The task with as many words of its last user message as fit, by bisection."""
    exceeds = f"{where}: its prompt exceeds {limit.told} = {limit.tokens}"
    asked = [i for i, message in enumerate(task.messages) if message["role"] == "user"]
    last = asked[-1] if asked else 0
    text = task.messages[last]["content"]
    if not asked or not isinstance(text, str):
        raise DataError(
            f"{exceeds} and cannot be cut, since it has no user message of plain text. Set "
            "overlong to filter"
        )

    def with_characters(length: int) -> Task:
        is_left = config.overlong == "left"
        part = (text[len(text) - length :] if is_left else text[:length]) if length else ""
        messages = list(task.messages)
        messages[last] = {**messages[last], "content": part}
        return replace(task, messages=tuple(messages))

    if count(with_characters(0).messages) > limit.tokens:
        raise DataError(f"{exceeds} even with an empty question")
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if count(with_characters(middle).messages) <= limit.tokens:
            low = middle
        else:
            high = middle - 1
    return with_characters(low)
