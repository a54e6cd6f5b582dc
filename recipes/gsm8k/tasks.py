"""GSM8K (grade-school mathematics): JSONL rows of question and worked answer.

A row's gold is what follows `####` in its answer.
"""

import re
from typing import Any

from areal_ray.agents import Task
from areal_ray.agents.jsonl import read_jsonl
from areal_ray.errors import DataError

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."
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
    rows = read_jsonl(path) if path is not None else _from_hub(hub, split)
    where = path if path is not None else f"{hub} ({split})"
    return [
        _task(row, f"{where} row {i}", f"{split}-{i}", instruction) for i, row in enumerate(rows)
    ]


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


def _from_hub(hub: str, split: str) -> list[dict[str, Any]]:
    try:
        from datasets import load_dataset
        from huggingface_hub import dataset_info
    except ImportError as error:
        raise DataError(
            f"tasks.args: loading '{hub}' needs the package 'datasets', which is not installed. "
            "pip install datasets, or give path: a JSONL file"
        ) from error
    if not _is_cached(hub):
        try:  # told in seconds: `datasets` itself tries for a minute
            dataset_info(hub, timeout=3.0)
        except Exception as error:  # whatever the hub client and its transports raise
            raise DataError(
                f"tasks.args: the hub does not answer for '{hub}' ({type(error).__name__}). "
                "Give path: a JSONL file, or go online once to fill the cache"
            ) from error
    return [dict(row) for row in load_dataset(hub, "main", split=split)]


def _is_cached(hub: str) -> bool:
    from datasets.config import HF_DATASETS_CACHE

    return (HF_DATASETS_CACHE / hub.replace("/", "___")).is_dir()
