"""What can be known to be wrong with the rows of a recipe's sources before an actor starts.

Conversations of `sft` and pairs of `preference` are read by the learner actors, once the model is
there; here they are read for their form alone, without a tokenizer.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from areal_ray.core.imports import resolve
from areal_ray.errors import DataError, RecipeError
from areal_ray.gateway.messages import conversation

_MOST_ROWS = 100_000
"""Looked at of each source; whoever has more waits for no more."""
_PAIR = "(prompt messages, better answer, worse answer)"

Check = Callable[[Any], None]
"""Raises ValueError for a row that cannot be trained on."""


def check_rows(
    where: str, source: str, args: Mapping[str, Any], roots: Sequence[Path | str], check: Check
) -> None:
    """Refuse a source that cannot be called so, gives no rows, or one of another form.

    Args:
        where: Key of its section.
        source: `module:function`.
        args: Keyword arguments for it.
        roots: Import roots for its code.
        check: Of one row.

    Raises:
        RecipeError: It cannot be found, or called with these arguments.
        DataError: No rows, or one that cannot be trained on; it is named.
    """
    told = f"{where}.source: {source}"
    for row, given in enumerate(_rows(where, source, args, roots)):
        try:
            check(given)
        except ValueError as error:
            raise DataError(f"{told}: row {row}: {error}") from error


def check_conversation(row: Any) -> None:
    """Whether the assistant says something in it.

    Raises:
        ValueError: It does not, or it is no conversation.
    """
    if not any(message["role"] == "assistant" for message in _readable(row)):
        raise ValueError("has no assistant message; there is nothing to learn from it")


def check_pair(row: Any) -> None:
    """Whether it is a prompt with two answers.

    Raises:
        ValueError: It has another form.
    """
    if not isinstance(row, tuple | list) or len(row) != len(_PAIR.split(",")):
        raise ValueError(f"is a {type(row).__name__}; must be {_PAIR}")
    prompt, *answers = row
    if not prompt or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"must be {_PAIR}: a list of messages and two texts, none of them missing")
    _readable([*prompt, *({"role": "assistant", "content": answer} for answer in answers)])


def _readable(messages: Any) -> list[dict[str, Any]]:
    read = conversation(messages)
    for message in read:
        message["content"].encode()  # half a surrogate pair is in no vocabulary
    return read


def _rows(
    where: str, source: str, args: Mapping[str, Any], roots: Sequence[Path | str]
) -> Iterator[Any]:
    function = resolve(source, roots, where=f"{where}.source")
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise RecipeError(f"{where}.args: {source} cannot be called: {error}.") from error
    made = function(**args)
    if inspect.iscoroutine(made):
        made.close()  # nobody will await it
    if not isinstance(made, Iterable) or isinstance(made, str | bytes | Mapping):
        raise DataError(
            f"{where}.source: {source} gave a {type(made).__name__}; must be rows. Write an "
            "ordinary function that returns or yields them"
        )
    is_empty = True
    for row in islice(made, _MOST_ROWS):
        is_empty = False
        yield row
    if is_empty:
        raise DataError(f"{where}.source: {source} gave no rows; at least one is needed")
