"""An agent with a calculator: it may ask for one sum, then has to answer.

user       Tom has 17 apples and buys 25 more. How many apples now?
assistant  <tool>17+25</tool>
tool       42
assistant  42
"""

import asyncio
import math
import random
import re

from areal_ray.agents import Task
from areal_ray.agents.chat_client import ChatClient
from areal_ray.core.trajectory import Trajectory

_CALL = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)
_TOKEN = re.compile(r"\s*(\d+|[-+*()])")
_LONGEST_EXPRESSION = 64


async def solve(
    task: Task,
    client: ChatClient,
    tool_latency_median_s: float = 0.0,
    tool_latency_sigma: float = 0.0,
) -> None:
    """Ask, run the calculator if it is called, ask again. The reward reads the last reply.

    Args:
        task: The question.
        client: The policy.
        tool_latency_median_s: A slow tool for benchmarks: median of a log-normal delay.
        tool_latency_sigma: Its sigma; the larger, the longer the tail.
    """
    messages: list[object] = list(task.messages)
    reply = (await client.chat.completions.create(messages=messages)).choices[0].message
    call = _CALL.search(reply.content)
    if call is None:
        return
    if tool_latency_median_s > 0:
        await asyncio.sleep(
            random.lognormvariate(math.log(tool_latency_median_s), tool_latency_sigma)
        )
    messages += [reply, {"role": "tool", "content": calculate(call[1])}]
    await client.chat.completions.create(messages=messages)


def exact(task: Task, trajectory: Trajectory) -> float:
    """1 if the last reply is the number and nothing else, else 0."""
    return float(trajectory.final_text.strip() == task.answer)


def calculate(expression: str) -> str:
    """Value of a sum or product of whole numbers as text; 'error' for anything else.

    A parser of its own: what a model writes is never evaluated as Python.
    """
    try:
        tokens = _tokens(expression)
        value, rest = _sum(tokens, 0)
    except (ValueError, IndexError, RecursionError):
        return "error"
    return str(value) if rest == len(tokens) else "error"


def _tokens(expression: str) -> list[str]:
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError("too long")
    tokens, position = [], 0
    while position < len(expression.rstrip()):
        found = _TOKEN.match(expression, position)
        if found is None:
            raise ValueError(f"'{expression[position]}' is no part of a sum")
        tokens.append(found[1])
        position = found.end()
    return tokens


def _sum(tokens: list[str], at: int) -> tuple[int, int]:
    value, at = _product(tokens, at)
    while at < len(tokens) and tokens[at] in "+-":
        term, after = _product(tokens, at + 1)
        value, at = (value + term if tokens[at] == "+" else value - term), after
    return value, at


def _product(tokens: list[str], at: int) -> tuple[int, int]:
    value, at = _factor(tokens, at)
    while at < len(tokens) and tokens[at] == "*":
        factor, at = _factor(tokens, at + 1)
        value *= factor
    return value, at


def _factor(tokens: list[str], at: int) -> tuple[int, int]:
    if tokens[at] == "-":
        value, at = _factor(tokens, at + 1)
        return -value, at
    if tokens[at] == "(":
        value, at = _sum(tokens, at + 1)
        if tokens[at] != ")":
            raise ValueError("a bracket stays open")
        return value, at + 1
    return int(tokens[at]), at + 1
