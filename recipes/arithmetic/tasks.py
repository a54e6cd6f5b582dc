"""Two-digit sums for a small instruction-tuned model: "What is 17+25?"."""

import random

from areal_ray.agents import Task

INSTRUCTION = "Reply with only the number."


def train(low: int = 10, high: int = 49, num_tasks: int = 1024, seed: int = 0) -> list[Task]:
    """Sums a+b with both in low..high, those that are held out excepted."""
    sums = [pair for pair in _shuffled(low, high, seed) if not is_held_out(*pair)]
    return [_task(a, b) for a, b in sums[:num_tasks]]


def held_out(low: int = 10, high: int = 49, num_tasks: int = 40) -> list[Task]:
    """Sums that never occur in training; the same ones for every seed."""
    sums = [pair for pair in _shuffled(low, high, 0) if is_held_out(*pair)]
    return [_task(a, b) for a, b in sums[:num_tasks]]


def is_held_out(a: int, b: int) -> bool:
    """Every eleventh pair."""
    return (7 * a + 3 * b) % 11 == 0


def _shuffled(low: int, high: int, seed: int) -> list[tuple[int, int]]:
    pairs = [(a, b) for a in range(low, high + 1) for b in range(low, high + 1)]
    random.Random(seed).shuffle(pairs)
    return pairs


def _task(a: int, b: int) -> Task:
    messages = (
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": f"What is {a}+{b}?"},
    )
    return Task(id=f"{a}+{b}", messages=messages, answer=a + b)
