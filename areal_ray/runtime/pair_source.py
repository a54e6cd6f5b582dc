"""PairSource: the tokenized pairs of a preference run, and which of them a step takes.

Lives in the learner actors, so that no pair passes through the driver. Each rank draws the same
order from the same seed and keeps its own slice.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from areal_ray.core.imports import resolve
from areal_ray.engines.preference import PreferenceConfig, PreferencePair
from areal_ray.engines.sft import SftExample
from areal_ray.errors import DataError
from areal_ray.gateway.template import ChatTemplate
from areal_ray.runtime.sft_source import Conversation, picked_rows, said_ids

_PARTS = 3
_log = logging.getLogger(__name__)


class PairSource:
    """Batches by step, the same whenever they are asked for."""

    def __init__(
        self,
        config: PreferenceConfig,
        model_path: str,
        *,
        roots: Sequence[str] = (),
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._config = config
        self._template = ChatTemplate.from_folder(model_path)
        self._roots = roots
        self._seed = seed
        self._rank = rank
        self._num_ranks = num_ranks
        self._loaded: dict[str, list[PreferencePair]] = {}

    def batch(self, step: int) -> list[PreferencePair]:
        """This rank's slice of the batch that `step` (from 0) takes."""
        config = self._config
        pairs = self._pairs("preference", config.source, config.args)
        picked = picked_rows(len(pairs), step, config.batch_size, f"{self._seed}/pairs")
        return [pairs[i] for i in picked[self._rank :: self._num_ranks]]

    def held_out(self) -> list[PreferencePair]:
        """This rank's slice of the held-out pairs."""
        held_out = self._config.held_out
        assert held_out is not None, "looked at only where the section is given"
        source = held_out.source or self._config.source
        pairs = self._pairs("preference.held_out", source, held_out.args)
        return pairs[: held_out.num_pairs][self._rank :: self._num_ranks]

    def _pairs(self, where: str, source: str, args: Mapping[str, Any]) -> list[PreferencePair]:
        if where not in self._loaded:
            rows = resolve(source, self._roots, where=f"{where}.source")(**args)
            pairs = [
                tokenize_pair(self._template, row, f"{where}: {source} row {number}")
                for number, row in enumerate(rows)
            ]
            self._loaded[where] = self._usable(pairs, f"{where}: {source}")
        return self._loaded[where]

    def _usable(self, pairs: list[PreferencePair], where: str) -> list[PreferencePair]:
        """Pairs that are short enough and have two answers."""
        limit = self._config.max_tokens
        kept = [p for p in pairs if _differ(p) and (limit is None or _longest(p) <= limit)]
        if not kept:
            raise DataError(
                f"{where}: gave {len(pairs)} pairs, none of them with two different answers of at "
                f"most preference.max_tokens = {limit} tokens; at least one is needed"
            )
        if len(kept) < len(pairs):
            left_out = len(pairs) - len(kept)
            _log.warning(
                "%s: %d of %d pairs left out: too long, or twice the same answer",
                where,
                left_out,
                len(pairs),
            )
        return kept


def tokenize_pair(template: ChatTemplate, row: Any, where: str) -> PreferencePair:
    """Token ids of a prompt and its two answers; only an answer and its end are marked.

    Args:
        template: Of the model.
        row: (prompt messages, better answer, worse answer), the answers as text.
        where: Of the row, for messages.

    Raises:
        DataError: The row has another form.
    """
    if not isinstance(row, (tuple, list)) or len(row) != _PARTS:
        raise DataError(
            f"{where}: is a {type(row).__name__}; must be (prompt messages, better answer, worse "
            "answer)"
        )
    prompt, chosen, rejected = row
    if not all(isinstance(answer, str) for answer in (chosen, rejected)) or not prompt:
        raise DataError(f"{where}: must be a list of messages and two texts, none of them missing")
    return PreferencePair(
        tokenize_answer(template, prompt, chosen, where),
        tokenize_answer(template, prompt, rejected, where),
    )


def tokenize_answer(
    template: ChatTemplate, prompt: Conversation, answer: str, where: str
) -> SftExample:
    """Token ids up to the end of the answer, which alone is marked.

    Raises:
        DataError: The chat template changes the prompt when an answer follows.
    """
    asked = template.render(list(prompt), add_generation_prompt=True)
    said = [*prompt, {"role": "assistant", "content": answer}]
    text = template.render(said, add_generation_prompt=False)
    if not text.startswith(asked):
        raise DataError(
            f"{where}: the chat template does not extend its own prompt by the answer, so its "
            "tokens cannot be marked. Use a template that does"
        )
    before, (own, _) = template.encode(asked), said_ids(template, text[len(asked) :])
    mask = np.zeros(len(before) + len(own), bool)
    mask[len(before) :] = True
    return SftExample(np.array([*before, *own], np.int32), mask)


def _differ(pair: PreferencePair) -> bool:
    return not np.array_equal(pair.chosen.token_ids, pair.rejected.token_ids)


def _longest(pair: PreferencePair) -> int:
    return max(len(pair.chosen.token_ids), len(pair.rejected.token_ids))
