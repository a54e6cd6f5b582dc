"""Agents with the manners of agents in the wild; agent actors import them."""

import asyncio
from collections import Counter
from typing import Any

from areal_ray.agents import EnvError, Task

_ATTEMPTS: Counter[str] = Counter()


async def two_turns(task: Task, client: Any) -> None:
    """Speaks, hears a tool, speaks again."""
    messages: list[Any] = list(task.messages)
    reply = await client.chat.completions.create(messages=messages)
    messages += [reply.choices[0].message, {"role": "tool", "content": "42"}]
    await client.chat.completions.create(messages=messages)


async def stops_at_a_vowel(task: Task, client: Any) -> None:
    """Two turns, each ended by the first vowel."""
    messages: list[Any] = list(task.messages)
    for _ in range(2):
        reply = await client.chat.completions.create(messages=messages, stop=list("aeiou"))
        messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]


async def many_turns(task: Task, client: Any, turns: int = 6) -> None:
    """A longer conversation."""
    messages: list[Any] = list(task.messages)
    for _ in range(turns):
        reply = await client.chat.completions.create(messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]


async def fails_at_first(task: Task, client: Any, times: int = 1) -> None:
    """The first episodes of a task fail after a turn, later ones go well."""
    await client.chat.completions.create(messages=list(task.messages))
    _ATTEMPTS[task.id] += 1
    if _ATTEMPTS[task.id] <= times:
        raise EnvError("world is down")


async def always_fails(task: Task, client: Any) -> None:
    """Never gets anywhere."""
    raise RuntimeError("no\nway")


async def one_sleeps(task: Task, client: Any) -> None:
    """The first episode of a task sleeps for ever while a turn of its is under way."""
    _ATTEMPTS[task.id] += 1
    if _ATTEMPTS[task.id] == 1:
        await asyncio.gather(
            client.chat.completions.create(messages=list(task.messages)), asyncio.sleep(600)
        )
    await client.chat.completions.create(messages=list(task.messages), max_tokens=4)


async def silent(task: Task, client: Any) -> None:
    """Never asks the model."""
