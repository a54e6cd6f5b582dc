"""Story problems with two-digit numbers, and demonstrations of how to answer them.

A tenth of all (a, b, operator) triples is held out: they never occur in training tasks or
demonstrations, whatever the seed, so held-out accuracy is about sums never seen.
"""

import hashlib
import random
from collections.abc import Iterator

from areal_ray.agents import Task

NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Mia", "Leo", "Zoe", "Sam", "Ida")
ITEMS = (
    *("apples", "coins", "books", "cards", "shells"),
    *("stamps", "marbles", "pens", "plums", "stones"),
)
TEMPLATES = {
    "+": (
        "{name} has {a} {item} and buys {b} more. How many {item} now?",
        "{name} finds {a} {item}, then {b} more. How many {item} in all?",
        "There are {a} {item} in a box. {name} adds {b}. How many {item} are in it?",
        "{name} got {a} {item} on Monday and {b} on Friday. How many {item} together?",
    ),
    "-": (
        "{name} has {a} {item} and gives away {b}. How many {item} are left?",
        "{name} had {a} {item} but lost {b}. How many {item} remain?",
        "There are {a} {item} in a box. {name} takes {b}. How many {item} stay?",
        "Of {a} {item}, {name} sells {b}. How many {item} are not sold?",
    ),
}
HELD_OUT_SHARE = 10
"""One triple in so many."""

Sum = tuple[int, int, str]
Message = dict[str, str]


def train(num_tasks: int = 4096, seed: int = 0) -> list[Task]:
    """Tasks over the triples that are not held out."""
    return _tasks(num_tasks, f"train/{seed}", held_out=False)


def held_out(num_tasks: int = 300) -> list[Task]:
    """Tasks over held-out triples; the same ones for every run."""
    return _tasks(num_tasks, "held-out", held_out=True)


def demonstrations(num_examples: int, tool_share: float, seed: int = 0) -> Iterator[list[Message]]:
    """Conversations to imitate: with the tool in `tool_share` of them, else a direct answer."""
    draw = random.Random(f"demonstrations/{seed}/{tool_share}")
    for _ in range(num_examples):
        a, b, op = _sum(draw, held_out=False)
        question = _question(draw, a, b, op)
        uses_tool = draw.random() < tool_share
        yield _with_tool(question, a, b, op) if uses_tool else _direct(question, a, b, op)


def held_out_calls(num_examples: int = 128) -> Iterator[list[Message]]:
    """Conversations with the tool over held-out triples: can the model copy the numbers?"""
    draw = random.Random("held-out calls")
    for _ in range(num_examples):
        a, b, op = _sum(draw, held_out=True)
        yield _with_tool(_question(draw, a, b, op), a, b, op)


def text_corpus() -> Iterator[str]:
    """What a tokenizer for these conversations is trained on."""
    for conversation in demonstrations(2000, 0.5, seed=-1):
        for message in conversation:
            yield message["role"]
            yield message["content"]


def is_held_out(a: int, b: int, op: str) -> bool:
    """Whether a triple is kept out of training; a property of the triple alone."""
    digest = hashlib.blake2b(f"{a}{op}{b}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def result(a: int, b: int, op: str) -> int:
    """The number asked for."""
    return a + b if op == "+" else a - b


def _tasks(count: int, seed: str, *, held_out: bool) -> list[Task]:
    draw = random.Random(seed)
    kind = "held-out" if held_out else "train"
    tasks: dict[str, Task] = {}  # by question: none is asked twice
    while len(tasks) < count:
        a, b, op = _sum(draw, held_out=held_out)
        question = _question(draw, a, b, op)
        if question in tasks:
            continue
        tasks[question] = Task(
            id=f"{kind}-{len(tasks)}",
            messages=({"role": "user", "content": question},),
            answer=str(result(a, b, op)),
            fields={"expression": f"{a}{op}{b}"},
        )
    return list(tasks.values())


def _sum(draw: random.Random, *, held_out: bool) -> Sum:
    while True:
        a, b, op = draw.randint(10, 99), draw.randint(10, 99), draw.choice("+-")
        if (op == "+" or a >= b) and is_held_out(a, b, op) == held_out:
            return a, b, op


def _question(draw: random.Random, a: int, b: int, op: str) -> str:
    template = draw.choice(TEMPLATES[op])
    return template.format(name=draw.choice(NAMES), item=draw.choice(ITEMS), a=a, b=b)


def _with_tool(question: str, a: int, b: int, op: str) -> list[Message]:
    answer = str(result(a, b, op))
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"<tool>{a}{op}{b}</tool>"},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer},
    ]


def _direct(question: str, a: int, b: int, op: str) -> list[Message]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": str(result(a, b, op))},
    ]
