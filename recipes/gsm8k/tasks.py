"""GSM8K (grade-school mathematics): JSONL rows of question and worked answer.

A row's gold is what follows `####` in its answer.
"""

import re
from collections.abc import Iterator
from typing import Any

from areal_ray.agents import Task
from areal_ray.agents.hub import read_hub
from areal_ray.agents.jsonl import read_jsonl
from areal_ray.errors import DataError

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
_CALCULATION = re.compile(r"<<[^<>]*>>")
_GOLD = re.compile(r"####\s*(.+?)\s*$")


def load(
    path: str | None = None,
    hub: str = "openai/gsm8k",
    split: str = "train",
    instruction: str = INSTRUCTION,
) -> list[Task]:
    """The tasks of a JSONL file, or of a data set on the Hugging Face hub where no path is given.

    Args:
        path: File with a JSON object {"question": ..., "answer": ...} on each line.
        hub: Data set name; needs the `datasets` package.
        split: Of the hub's data set.
        instruction: System message; empty for none.

    Raises:
        DataError: A file, line or row that cannot be used; it is named.
    """
    rows = read_jsonl(path) if path is not None else read_hub(hub, split, "main")
    where = path if path is not None else f"{hub} ({split})"
    return [
        _task(row, f"{where} row {i}", f"{split}-{i}", instruction) for i, row in enumerate(rows)
    ]


def worked(
    path: str | None = None,
    hub: str = "openai/gsm8k",
    split: str = "train",
    instruction: str = INSTRUCTION,
) -> Iterator[list[dict[str, Any]]]:
    """The same rows as conversations with their worked answers, the number in a box at the end."""
    rows = read_jsonl(path) if path is not None else read_hub(hub, split, "main")
    for task, row in zip(load(path, hub, split, instruction), rows, strict=True):
        steps = _GOLD.sub("", _CALCULATION.sub("", row["answer"])).strip()
        reply = f"{steps}\nThe answer is \\boxed{{{task.answer}}}."
        yield [*task.messages, {"role": "assistant", "content": reply}]


def _task(row: dict[str, Any], where: str, task_id: str, instruction: str) -> Task:
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: 'question' is {question!r}; must be text")
    gold = _GOLD.search(answer) if isinstance(answer, str) else None
    if gold is None:
        raise DataError(f"{where}: 'answer' has no '#### <number>' at its end")
    system = [{"role": "system", "content": instruction}] if instruction else []
    messages = (*system, {"role": "user", "content": question})
    return Task(id=task_id, messages=messages, answer=gold[1])
