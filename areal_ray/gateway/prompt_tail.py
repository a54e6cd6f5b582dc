"""The ids that lead from a recorded turn to the next prompt."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.gateway.messages import reply_message
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.turn_matching import conversation_key
from areal_ray.gateway.turn_record import ReplyReader
from areal_ray.gateway.turn_tree import Turn

TEMPLATE_REWROTE_PAST = "the template rewrote earlier turns"
TEMPLATE_REWROTE_TURN = "the template rewrote the assistant turn"
TOOLS_CHANGED = "the tools offered changed"
TOKENS_MERGE = "the tokenizer merges across the turn border"

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


def text_digest(text: str) -> bytes:
    """What a text is known by, in this process and in any other.

    Raises:
        ValueError: It holds half a character, which no tokenizer takes.
    """
    try:
        return blake2b(text.encode(), digest_size=16).digest()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"messages: hold {text[error.start]!r}, half a character; must be whole Unicode text"
        ) from error


class PromptTail:
    """Finds what the template writes after a sampled turn."""

    def __init__(self, template: ChatTemplate, reader: ReplyReader) -> None:
        self._template = template
        self._reader = reader

    def ids(
        self, parent: Turn, messages: Messages, rendered: str, tools: Tools
    ) -> NDArray[np.int32] | str:
        """Ids to append to the parent's prompt and samples, or why they cannot be extended.

        Args:
            parent: The turn whose reply the conversation holds last.
            messages: The conversation.
            rendered: It, as the template writes it.
            tools: What it was rendered with.
        """
        body = _after_prompt(parent, rendered)
        if body is None:
            return TEMPLATE_REWROTE_PAST
        length = self._length_as_rendered(parent, messages, body, tools)
        if length is None:
            return TEMPLATE_REWROTE_TURN
        closing = body[length:]
        if parent.has_end:
            end = self._template.token_text(int(parent.token_ids[-1]))
            closing = closing.removeprefix(end)
        elif self._merges(parent.sampled_text, closing):
            return TOKENS_MERGE
        return self._template.encode_array(closing)

    def _length_as_rendered(
        self, parent: Turn, messages: Messages, body: str, tools: Tools
    ) -> int | None:
        """Characters that the parent's reply takes at the start of `body`; None if rewritten."""
        for spelling in (parent.text, parent.text.strip()):
            if body.startswith(spelling + self._template.turn_close):
                return len(spelling)
        # Not as sampled: find where the template ends the turn, and see whether it says the same.
        assert parent.reply is not None
        upto = messages[: parent.reply.depth]
        whole = self._template.render(upto, tools, add_generation_prompt=False)
        close = self._template.turn_close
        said = _after_prompt(parent, whole)
        if said is None:
            return None
        said = said.removesuffix(close)
        if not body.startswith(said + close):
            return None
        again = self._reader.read(said, tools, parent.prompt_ids(), parent.handle)
        same = conversation_key(reply_message(again)) == parent.reply.key
        return len(said) if same else None

    def _merges(self, said: str, closing: str) -> bool:
        """Whether encoding both at once differs from one after the other at the border."""
        if not said or not closing or self._template.starts_with_special(closing):
            return False
        encode = self._template.encode
        return encode(said + closing) != encode(said) + encode(closing)


def _after_prompt(turn: Turn, rendered: str) -> str | None:
    """What follows the prompt of `turn` in a text; None if the text begins otherwise."""
    length = turn.rendered_length
    if len(rendered) < length or text_digest(rendered[:length]) != turn.rendered_digest:
        return None
    return rendered[length:]
