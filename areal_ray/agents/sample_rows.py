"""A few rows for trying out a recipe (`areal-ray train RECIPE --smoke`).

`first` takes them from the recipe's own source; where that cannot be reached, the others make
some of the same form. `by_chance` is a reward that gives even a random model something to learn.
"""

import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from areal_ray.core.imports import resolve
from areal_ray.core.task import Task
from areal_ray.core.trajectory import Trajectory

Messages = list[dict[str, str]]

_MOST = 0.5
"""What luck adds to a reward at most."""


def first(
    source: str, args: Mapping[str, Any], roots: Sequence[str], num_rows: int
) -> Iterator[Any]:
    """The first rows of another source, `module:function`."""
    made = resolve(source, roots, where="source")
    return islice(iter(made(**args) if callable(made) else made), num_rows)


def tasks(num_rows: int = 8) -> Iterator[Task]:
    """Sums."""
    for number in range(num_rows):
        question, answer = _sum(number)
        yield Task(f"sum-{number}", ({"role": "user", "content": question},), answer=answer)


def conversations(num_rows: int = 8) -> Iterator[Messages]:
    """Sums with their answers."""
    for number in range(num_rows):
        question, answer = _sum(number)
        yield [*_asked(question), {"role": "assistant", "content": answer}]


def pairs(num_rows: int = 8) -> Iterator[tuple[Messages, str, str]]:
    """Sums with a right and a wrong answer."""
    for number in range(num_rows):
        question, answer = _sum(number)
        yield _asked(question), answer, f"{answer}0"


async def by_chance(
    task: Task,
    trajectory: Trajectory,
    score: str,
    args: Mapping[str, Any],
    roots: Sequence[str] = (),
) -> float | None:
    """The recipe's own reward, and up to a half more by luck.

    Luck hangs on the episode's name alone, and no two have the same: whatever is sampled and in
    whatever order groups arrive, a step has rewards that differ, and so something to learn.

    Args:
        task: For the recipe's reward.
        trajectory: For it; its `episode_id` draws the luck.
        score: The recipe's reward, `module:function`.
        args: Keyword arguments for it.
        roots: Import roots for its code.
    """
    returned = resolve(score, roots, where="reward.score")(task, trajectory, **args)
    if inspect.isawaitable(returned):
        returned = await returned
    reward = returned["reward"] if isinstance(returned, Mapping) else returned
    if reward is None:
        return None
    return float(reward) + _MOST * random.Random(trajectory.episode_id).random()


def _asked(question: str) -> Messages:
    return [{"role": "user", "content": question}]


def _sum(number: int) -> tuple[str, str]:
    a, b = 3 + 7 * number, 2 + 5 * number
    return f"What is {a} plus {b}?", str(a + b)
