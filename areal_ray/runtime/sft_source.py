"""SftSource: the tokenized conversations of each phase, and which of them a step takes."""

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from areal_ray.engines.sft import SftConfig, SftExample
from areal_ray.errors import DataError
from areal_ray.gateway.messages import conversation as read_conversation
from areal_ray.gateway.template import ChatTemplate
from areal_ray.runtime.row_source import RowSource, TokenLimit

_log = logging.getLogger(__name__)
Conversation = Sequence[Mapping[str, Any]]


class SftSource:
    """Batches by phase and first row, the same whenever they are asked for."""

    def __init__(self, config: SftConfig, model_path: str, **share: Any) -> None:
        """Load the tokenizer.

        Args:
            config: The phases.
            model_path: Of the tokenizer.
            share: Import roots, seed and rank, as of `RowSource`.
        """
        self._phases = config.phases
        template = ChatTemplate.from_folder(model_path)
        limits = [
            TokenLimit.of(f"sft.phases.{i}.max_tokens", phase.max_tokens, model_path)
            for i, phase in enumerate(config.phases)
        ]
        self._rows = [
            RowSource(functools.partial(_examples, template, lim), **share) for lim in limits
        ]

    def batch(self, phase: int, first: int) -> list[SftExample]:
        """This rank's slice of the batch of `phase` that begins at row `first` of its epochs."""
        config, where = self._phases[phase], f"sft.phases.{phase}"
        size = config.batch_size
        return self._rows[phase].batch(
            where, config.source, config.args, first=first, size=size, order=str(phase)
        )

    def held_out(self, phase: int) -> list[SftExample]:
        """This rank's slice of what the phase's `until` looks at."""
        config = self._phases[phase]
        assert config.until is not None, "a phase without `until` is not looked at"
        until = config.until
        source = until.source or config.source
        return self._rows[phase].first(
            f"sft.phases.{phase}.until", source, until.args, until.num_examples
        )


def _examples(
    template: ChatTemplate, limit: TokenLimit, rows: Iterable[Any], where: str
) -> list[SftExample]:
    """Conversations that are short enough."""
    kept: list[SftExample] = []
    count = 0
    for count, said in enumerate(rows, start=1):
        place = f"{where} row {count - 1}"
        example = tokenize(template, said, place)
        if limit.keeps(len(example.token_ids), place):
            kept.append(example)
    if not count:
        raise DataError(f"{where} gave no conversations; at least one is needed")
    if not kept:
        raise DataError(
            f"{where}: gave {count} conversations, none of at most {limit.key} = {limit.most} "
            "tokens; at least one is needed"
        )
    if len(kept) < count:
        _log.warning("%s: %d of %d left out: too long", where, count - len(kept), count)
    return kept


def tokenize(template: ChatTemplate, conversation: Conversation, where: str) -> SftExample:
    """Token ids of a conversation; what the assistant says, its end included, is to be learned.

    Raises:
        DataError: No assistant turn, a message that cannot be read or that the template refuses, or
            the template does not extend its own prefix: then no mask would be true to what the
            model sees when it samples.
    """
    with naming(where):
        return _tokenize(template, read_conversation(conversation), where)


def _tokenize(template: ChatTemplate, messages: list[dict[str, Any]], where: str) -> SftExample:
    ids: list[int] = []
    mask: list[bool] = []
    text = ""
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages[:turn], add_generation_prompt=True)
        said = template.render(messages[: turn + 1], add_generation_prompt=False)
        if not prompt.startswith(text) or not said.startswith(prompt):
            raise DataError(
                f"{where}: the chat template rewrites earlier turns at message {turn}, so its "
                "tokens cannot be marked. Use one example for each assistant turn"
            )
        _extend(ids, mask, template.encode(prompt[len(text) :]), learned=False)
        learned, rest = said_ids(template, said[len(prompt) :])
        _extend(ids, mask, learned, learned=True)
        _extend(ids, mask, rest, learned=False)
        text = said
    if not any(mask):
        raise DataError(f"{where}: has no assistant message; there is nothing to learn from it")
    return SftExample(np.array(ids, np.int32), np.array(mask, bool))


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Turns what is wrong with a conversation into a DataError that names its row."""
    try:
        yield
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def said_ids(template: ChatTemplate, text: str) -> tuple[list[int], list[int]]:
    """Ids of an assistant turn with its end, and of what the template puts after that."""
    closed = template.encode(text)
    end = max((i for i, token in enumerate(closed) if token in template.end_ids), default=None)
    cut = len(closed) if end is None else end + 1
    return closed[:cut], closed[cut:]


def _extend(ids: list[int], mask: list[bool], tokens: Sequence[int], *, learned: bool) -> None:
    ids.extend(tokens)
    mask.extend([learned] * len(tokens))
