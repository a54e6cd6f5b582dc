"""Task: one problem statement with what its reward needs."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

UNSENDABLE = (pickle.PickleError, TypeError, AttributeError, ValueError, RuntimeError)
"""What pickling raises of values that cannot travel, and what their own classes raise then."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem an agent attempts, the same for all episodes of a group."""

    id: str
    """Unique in its task source and stable between runs: the ledger is keyed by it."""
    messages: tuple[dict[str, Any], ...]
    """The opening conversation, in OpenAI chat form."""
    answer: Any = None
    """What the reward compares with; never shown to the model."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Anything else the agent or the reward wants."""


def sending_problem(
    tasks: Iterable[Task], dumps: Callable[[Any], Any] = pickle.dumps
) -> str | None:
    """The first task that cannot travel to another process, and what of it; None if all can.

    Args:
        tasks: To be sent.
        dumps: What writes them on the way.
    """
    for task in tasks:
        if _refusal(task, dumps) is None:
            continue
        for name, value in _parts(task):
            told = _refusal(value, dumps)
            if told is not None:
                return (
                    f"task '{task.id}': {name} is a {type(value).__name__} that cannot be pickled "
                    f"({told}); must hold values that can, since agents and rewards are other "
                    "processes. Use numbers, text, lists and dicts, and make the rest of them there"
                )
    return None


def _parts(task: Task) -> Iterator[tuple[str, Any]]:
    yield "answer", task.answer
    for name, value in task.fields.items():
        yield f"fields[{name!r}]", value
    yield "fields", task.fields
    yield "messages", task.messages


def _refusal(value: Any, dumps: Callable[[Any], Any]) -> str | None:
    try:
        dumps(value)
    except UNSENDABLE as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None
