"""Sampled text -> reasoning, what is said, and tool calls; whole or as it is sampled."""

from collections.abc import Sequence

from areal_ray.core.turn import Reply
from areal_ray.gateway.pieces import Piece, ToolFormat, Tools
from areal_ray.gateway.template import ChatTemplate


class ReplyFormat:
    """How the model of a template writes its replies.

    Args:
        template: Whose model samples.
        tool_parser: A name of `TOOL_PARSERS`, "auto" (guessed from the template's source), "none",
            or a format of one's own.
        reasoning_parser: A name of `REASONING_PARSERS`, "auto" or "none".
    """

    def __init__(
        self,
        template: ChatTemplate,
        tool_parser: str | ToolFormat = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens but for those that replies are parsed by."""
        raise NotImplementedError

    def parser(
        self,
        tools: Tools | None,
        prompt_ids: Sequence[int],
        key: str = "",
        max_calls: int | None = None,
    ) -> "ReplyParser":
        """For the reply to one prompt.

        Args:
            tools: What was offered (none of them with `tool_choice: none`); without any, nothing
                is a call.
            prompt_ids: [P] where its end opens the reasoning, the reply begins inside it.
            key: Unique for ever; the same key gives the same ids of calls. "" = random ids.
            max_calls: Further calls are read and not told; 1 for `parallel_tool_calls: false`.
        """
        raise NotImplementedError

    def read(
        self, text: str, tools: Tools | None, prompt_ids: Sequence[int], key: str = ""
    ) -> Reply:
        """A whole reply: what `parser` makes of `text` however it is cut."""
        raise NotImplementedError

    def count_reasoning_tokens(self, ids: Sequence[int], prompt_ids: Sequence[int]) -> int:
        """How many of the sampled `ids` [N] belong to the reasoning, its marks included."""
        raise NotImplementedError


class ReplyParser:
    """Reads one reply as it is sampled; never raises for what the model says."""

    def feed(self, text: str) -> list[Piece]:
        """What more sampled text (stop strings cut off) lets be told."""
        raise NotImplementedError

    def finish(self) -> list[Piece]:
        """The rest, once nothing more comes."""
        raise NotImplementedError

    @property
    def reply(self) -> Reply:
        """All that was told."""
        raise NotImplementedError
