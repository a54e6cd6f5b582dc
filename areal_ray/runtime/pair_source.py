"""PairSource: the tokenized pairs of a preference run, and which of them a step takes."""

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from areal_ray.engines.preference import PreferenceConfig, PreferencePair
from areal_ray.engines.sft import SftExample
from areal_ray.errors import DataError
from areal_ray.gateway.messages import conversation as read_conversation
from areal_ray.gateway.template import ChatTemplate
from areal_ray.runtime.row_source import RowSource, TokenLimit
from areal_ray.runtime.sft_source import Conversation, naming, said_ids

_PARTS = 3
_log = logging.getLogger(__name__)


class PairSource:
    """Batches by their first pair, the same whenever they are asked for."""

    def __init__(self, config: PreferenceConfig, model_path: str, **share: Any) -> None:
        """Load the tokenizer.

        Args:
            config: The section preference.
            model_path: Of the tokenizer.
            share: Import roots, seed and rank, as of `RowSource`.
        """
        self._config = config
        self._template = ChatTemplate.from_folder(model_path)
        self._limit = TokenLimit.of("preference.max_tokens", config.max_tokens, model_path)
        self._rows = RowSource(self._usable, **share)

    def batch(self, first: int) -> list[PreferencePair]:
        """This rank's slice of the batch that begins at pair `first` of all epochs."""
        config = self._config
        size = config.batch_size
        return self._rows.batch(
            "preference", config.source, config.args, first=first, size=size, order="pairs"
        )

    def held_out(self) -> list[PreferencePair]:
        """This rank's slice of the held-out pairs."""
        held_out = self._config.held_out
        assert held_out is not None, "looked at only where the section is given"
        source = held_out.source or self._config.source
        return self._rows.first("preference.held_out", source, held_out.args, held_out.num_pairs)

    def _usable(self, rows: Iterable[Any], where: str) -> list[PreferencePair]:
        """Pairs that are short enough and have two answers."""
        pairs = [
            tokenize_pair(self._template, row, f"{where} row {number}")
            for number, row in enumerate(rows)
        ]
        limit = self._config.max_tokens
        kept = [
            pair
            for number, pair in enumerate(pairs)
            if _differ(pair) and self._limit.keeps(_longest(pair), f"{where} row {number}")
        ]
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
        DataError: A message cannot be read, or the chat template refuses the prompt or changes it
            when an answer follows.
    """
    said = {"role": "assistant", "content": answer}
    with naming(where):
        messages = read_conversation(prompt)
        asked = template.render(messages, add_generation_prompt=True)
        text = template.render([*messages, said], add_generation_prompt=False)
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
