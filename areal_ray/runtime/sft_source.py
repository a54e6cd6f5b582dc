"""SftSource: the tokenized conversations of each phase, and which of them a step takes.

Lives in the learner actors, so that no example passes through the driver. Each rank draws the same
order from the same seed and keeps its own slice.
"""

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_ray.core.imports import resolve
from areal_ray.engines.sft import SftConfig, SftExample
from areal_ray.errors import DataError
from areal_ray.gateway.template import ChatTemplate

Conversation = Sequence[Mapping[str, Any]]


class SftSource:
    """Batches by (phase, step), the same whenever they are asked for."""

    def __init__(
        self,
        config: SftConfig,
        model_path: str,
        *,
        roots: Sequence[str] = (),
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._phases = config.phases
        self._template = ChatTemplate.from_folder(model_path)
        self._roots = roots
        self._seed = seed
        self._rank = rank
        self._num_ranks = num_ranks
        self._loaded: dict[str, list[SftExample]] = {}

    def batch(self, phase: int, step: int) -> list[SftExample]:
        """This rank's slice of the batch that `step` (from 0) of `phase` takes."""
        config = self._phases[phase]
        examples = self._examples(f"sft.phases.{phase}", config.source, config.args)
        picked = picked_rows(len(examples), step, config.batch_size, f"{self._seed}/{phase}")
        return [examples[i] for i in picked[self._rank :: self._num_ranks]]

    def held_out(self, phase: int) -> list[SftExample]:
        """This rank's slice of what the phase's `until` looks at."""
        config = self._phases[phase]
        assert config.until is not None, "a phase without `until` is not looked at"
        until = config.until
        source = until.source or config.source
        examples = self._examples(f"sft.phases.{phase}.until", source, until.args)
        return examples[: until.num_examples][self._rank :: self._num_ranks]

    def _examples(self, where: str, source: str, args: Mapping[str, Any]) -> list[SftExample]:
        if where not in self._loaded:
            conversations = resolve(source, self._roots, where=f"{where}.source")(**args)
            self._loaded[where] = [
                tokenize(self._template, conversation, f"{where}: {source} row {row}")
                for row, conversation in enumerate(conversations)
            ]
            if not self._loaded[where]:
                raise DataError(f"{where}: {source} gave no conversations; at least one is needed")
        return self._loaded[where]


def tokenize(template: ChatTemplate, conversation: Conversation, where: str) -> SftExample:
    """Token ids of a conversation; what the assistant says, its end included, is to be learned.

    Raises:
        DataError: No assistant turn, or the template does not extend its own prefix: then no mask
            would be true to what the model sees when it samples.
    """
    ids: list[int] = []
    mask: list[bool] = []
    text = ""
    for turn, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = template.render(list(conversation[:turn]), add_generation_prompt=True)
        said = template.render(list(conversation[: turn + 1]), add_generation_prompt=False)
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


def said_ids(template: ChatTemplate, text: str) -> tuple[list[int], list[int]]:
    """Ids of an assistant turn with its end, and of what the template puts after that."""
    closed = template.encode(text)
    end = max((i for i, token in enumerate(closed) if token in template.end_ids), default=None)
    cut = len(closed) if end is None else end + 1
    return closed[:cut], closed[cut:]


def _extend(ids: list[int], mask: list[bool], tokens: Sequence[int], *, learned: bool) -> None:
    ids.extend(tokens)
    mask.extend([learned] * len(tokens))


def picked_rows(count: int, step: int, batch_size: int, seed: str) -> list[int]:
    """Indices of one batch out of an endless sequence of shuffled epochs."""
    picked: list[int] = []
    while len(picked) < batch_size:
        epoch, start = divmod(step * batch_size + len(picked), count)
        order = _order(count, f"{seed}/{epoch}")
        picked += order[start : start + batch_size - len(picked)]
    return picked


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: str) -> tuple[int, ...]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)
