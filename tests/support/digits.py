"""Tasks, agents and rewards of the small runs; actors and scoring processes import them."""

import asyncio
import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any

from areal_ray.agents import Task

_CALLS: Counter[str] = Counter()


def tasks(num_tasks: int = 64) -> list[Task]:
    """Short questions."""
    return [
        Task(f"t{n}", ({"role": "user", "content": f"Say {n % 10}"},), answer=str(n % 10))
        for n in range(num_tasks)
    ]


def conversations() -> list[list[dict[str, str]]]:
    """The ten different questions with their answers."""
    return [[*task.messages, {"role": "assistant", "content": task.answer}] for task in tasks(10)]


def held_out() -> list[Task]:
    """Others than those to train on."""
    return [replace(task, id=f"held-{task.id}") for task in tasks(4)]


# Agents


async def slow_tool(
    task: Task, client: Any, longest_s: float = 0.6, shortest_s: float = 0.0
) -> None:
    """A turn, a tool that takes a while, a turn."""
    messages: list[Any] = list(task.messages)
    reply = await client.chat.completions.create(messages=messages)
    await asyncio.sleep(random.uniform(shortest_s, longest_s))
    messages += [reply.choices[0].message, {"role": "tool", "content": "4"}]
    await client.chat.completions.create(messages=messages)


async def often_raises(task: Task, client: Any, share: float = 0.2) -> None:
    """Raises after its turn, by chance."""
    await client.chat.completions.create(messages=list(task.messages))
    if random.random() < share:
        raise RuntimeError("the tool broke")


async def scripted(task: Task, client: Any) -> float:
    """One token, and scores itself by chance: as cheap as an episode can be."""
    await client.chat.completions.create(messages=list(task.messages), max_tokens=1)
    return float(random.random() < 0.5)


async def sleeps_after(task: Task, client: Any, calls: int = 0, seconds: float = 600.0) -> None:
    """The first `calls` episodes of its actor go well, later ones take `seconds`."""
    _CALLS["episodes"] += 1
    number = _CALLS["episodes"]
    await client.chat.completions.create(messages=list(task.messages))
    if number > calls:
        await asyncio.sleep(seconds)


async def prompts_too_long(task: Task, client: Any, task_id: str = "t3") -> None:
    """Of one task, the agent writes a prompt that no context window holds."""
    text = "so " * 5000 if task.id == task_id else str(task.messages[0]["content"])
    await client.chat.completions.create(messages=[{"role": "user", "content": text}])


async def kills_its_actor(task: Task, client: Any, task_id: str = "t3") -> None:
    """Of one task, or of "all", the whole process ends, as by a fault in a C library."""
    await client.chat.completions.create(messages=list(task.messages))
    if task_id in ("all", task.id):
        os._exit(1)


# Rewards


def parity(task: Task, trajectory: Any) -> float:
    """1 for replies of an odd sum of token ids: half of them, whatever the policy."""
    return float(trajectory.token_ids[trajectory.loss_mask].sum() % 2)


def falls(task: Task, trajectory: Any, versions: tuple[int, ...] = ()) -> float:
    """Of held-out tasks 1, and 0 for what these versions say; of others as `parity`."""
    if not task.id.startswith("held-"):
        return parity(task, trajectory)
    return float(not set(versions) & set(trajectory.versions[trajectory.loss_mask].tolist()))


def sometimes(task: Task, trajectory: Any) -> float | None:
    """As `parity`, or no verdict: by the first token, about half of them."""
    first = int(trajectory.token_ids[trajectory.loss_mask][0])
    return parity(task, trajectory) if first % 2 else None


def exact(task: Task, trajectory: Any) -> float:
    """1 for the digit that was asked for."""
    return float(trajectory.final_text.strip() == task.answer)


def always_raises(task: Task, trajectory: Any) -> float:
    """Never scores."""
    raise RuntimeError("judge unreachable")


class OddVerdict(Exception):
    """Not made from one text, so it does not survive pickling."""

    def __init__(self, sample: int, *, reason: str) -> None:
        self.sample, self.reason = sample, reason

    def __str__(self) -> str:
        return f"sample {self.sample}: {self.reason}"


def raises_oddly(task: Task, trajectory: Any) -> float:
    """Never scores, and says so with a class of its own."""
    raise OddVerdict(5, reason="no judge")


def always_equal(task: Task, trajectory: Any) -> float:
    """Teaches nothing."""
    return 1.0
