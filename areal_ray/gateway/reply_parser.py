"""Sampled text -> reasoning, what is said, and tool calls; whole or as it is sampled."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from areal_ray.core.turn import Reply
from areal_ray.gateway.call_reader import CallReader
from areal_ray.gateway.grammar_text import GrammarText
from areal_ray.gateway.pieces import Ids, Piece, ReasoningPiece, ToolFormat, Tools
from areal_ray.gateway.template import ChatTemplate
from areal_ray.gateway.tool_formats import TOOL_FORMATS, guess_tool_format, len_held
from areal_ray.gateway.tool_grammars import ToolGrammar, tool_grammar

REASONING_MARKS: Mapping[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
}
_TAIL_TOKENS = 16
"""Of a prompt, where it may open the reasoning."""


class ReplyFormat:
    """How the model of a template writes its replies.

    Args:
        template: Whose model samples.
        tool_parser: A name of `TOOL_FORMATS`, "auto" (guessed from the template's source), "none",
            or a format of one's own.
        reasoning_parser: A name of `REASONING_MARKS`, "auto" or "none".

    Raises:
        ValueError: There is no parser of that name.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tool_parser: str | ToolFormat = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self._template = template
        self._tools = _tool_format(tool_parser, template.source)
        self._marks = _reasoning_marks(reasoning_parser, template.source)
        markers = (*(self._tools.markers if self._tools else ()), *(self._marks or ()))
        self._shown = template.special_ids(markers) - template.end_ids - {template.pad_id}

    @property
    def reads_calls(self) -> bool:
        """Whether anything is read as a call."""
        return self._tools is not None

    @property
    def tool_grammar(self) -> ToolGrammar | None:
        """How calls are written; None where there are none, or a parser of others reads them."""
        return tool_grammar(self._tools)

    def whole_grammar(self, reply: str, prompt_ids: Ids) -> str:
        """A grammar for what is sampled after a prompt: the reasoning as it comes, then the reply.

        Args:
            reply: A grammar without `start`, whose rule `reply` is what the client asked for.
            prompt_ids: [P] where its end opens the reasoning, the reply follows it; where it closes
                it, there is none.
        """
        tail = self._tail(prompt_ids)
        if self._marks is None or tail.endswith(self._marks[1]):
            return f"start: reply\n{reply}"
        opener, closer = self._marks
        is_open = tail.endswith(opener)
        text = GrammarText(self._template.added_id, "thought")
        begin = "" if is_open else text.mark(opener)
        blank = text.rule(r"/\n{1,2}/", is_terminal=True)
        thought = text.written(f"{begin} {text.up_to(closer)} {blank}?")
        return f"start: thought{'' if is_open else '?'} reply\n{thought}\n{reply}"

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens but for those that replies are parsed by."""
        return self._template.decode(ids, self._shown)

    def parser(
        self,
        tools: Tools | None,
        prompt_ids: Ids,
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
        marks = self._marks
        is_open = marks is not None and self._opens_reasoning(prompt_ids)
        reasoning = None if marks is None else _ReasoningReader(*marks, is_open=is_open)
        calls = CallReader(self._tools if tools else None, tools or (), key, max_calls)
        return ReplyParser(reasoning, calls)

    def raw_parser(self) -> "ReplyParser":
        """For what follows a raw prompt: all of it is text."""
        return ReplyParser(None, CallReader(None, (), "", None))

    def read(self, text: str, tools: Tools | None, prompt_ids: Ids, key: str = "") -> Reply:
        """A whole reply: what `parser` makes of `text` however it is cut."""
        parser = self.parser(tools, prompt_ids, key)
        parser.feed(text)
        parser.finish()
        return parser.reply

    def count_reasoning_tokens(self, ids: Sequence[int], prompt_ids: Ids) -> int:
        """How many of the sampled `ids` [N] belong to the reasoning, its marks included."""
        if self._marks is None:
            return 0
        opener, closer = self._marks
        text = self.decode(ids)
        if not self._opens_reasoning(prompt_ids) and not text.lstrip().startswith(opener):
            return 0
        if closer not in text:
            return len(ids)
        # The shortest beginning whose text holds the closing mark.
        return bisect_left(range(len(ids)), True, key=lambda n: closer in self.decode(ids[:n]))

    def _opens_reasoning(self, prompt_ids: Ids) -> bool:
        assert self._marks is not None
        return self._tail(prompt_ids).endswith(self._marks[0])

    def _tail(self, prompt_ids: Ids) -> str:
        """The end of a prompt, without blanks after it."""
        return self.decode([int(i) for i in prompt_ids[-_TAIL_TOKENS:]]).rstrip()


class ReplyParser:
    """Reads one reply as it is sampled; never raises for what the model says."""

    def __init__(self, reasoning: "_ReasoningReader | None", calls: "CallReader") -> None:
        self._reasoning = reasoning
        self._calls = calls

    def feed(self, text: str) -> list[Piece]:
        """What more sampled text (stop strings cut off) lets be told."""
        return self._read(text, is_whole=False)

    def finish(self) -> list[Piece]:
        """The rest, once nothing more comes."""
        return self._read("", is_whole=True)

    @property
    def reply(self) -> Reply:
        """All that was told."""
        thought = "".join(self._reasoning.told) if self._reasoning else ""
        return Reply("".join(self._calls.told), tuple(self._calls.calls), thought)

    def _read(self, text: str, *, is_whole: bool) -> list[Piece]:
        pieces: list[Piece] = []
        if self._reasoning is not None:
            has_ended = self._reasoning.has_ended
            thought, text = self._reasoning.read(text, is_whole=is_whole)
            if thought:
                pieces.append(ReasoningPiece(thought))
            if self._reasoning.was_there and self._reasoning.has_ended and not has_ended:
                self._calls.drops_newlines = True
        return pieces + self._calls.read(text, is_whole=is_whole)


class _ReasoningReader:
    """Takes the reasoning off the beginning of a reply, without the newlines around it."""

    def __init__(self, opener: str, closer: str, *, is_open: bool) -> None:
        self._opener, self._closer = opener, closer
        self._text = ""
        """Not yet told; newlines at its end are told once more follows."""
        self._has_begun = False
        """Whether it is decided that there is reasoning, or that there is none."""
        self.has_ended = False
        self.was_there = is_open
        self.told: list[str] = []

    def read(self, text: str, *, is_whole: bool) -> tuple[str, str]:
        """More of the reasoning, and of what follows it."""
        if self.has_ended:
            return "", text
        self._text += text
        if not self._has_begun:
            self._has_begun = self._begin(is_whole=is_whole)
            if not self._has_begun:
                return "", ""
        if not self.was_there:
            self.has_ended = True
            return "", self._text
        before, mark, after = self._text.partition(self._closer)
        self.has_ended = bool(mark)
        if not self.told:
            before = before.lstrip("\n")
        held = 0 if mark or is_whole else len_held(before, self._closer)
        thought = before[: len(before) - held].rstrip("\n")
        self._text = before[len(thought) :]
        if thought:
            self.told.append(thought)
        return thought, after

    def _begin(self, *, is_whole: bool) -> bool:
        text = self._text.lstrip()
        if text.startswith(self._opener):
            self.was_there = True
            self._text = text[len(self._opener) :]
            return True
        return is_whole or not self._opener.startswith(text)


def _tool_format(chosen: str | ToolFormat, source: str) -> ToolFormat | None:
    if not isinstance(chosen, str):
        return chosen
    if chosen == "none":
        return None
    name = guess_tool_format(source) if chosen == "auto" else chosen
    return TOOL_FORMATS[_known(name, TOOL_FORMATS, "agent.tool_parser")]


def _reasoning_marks(chosen: str, source: str) -> tuple[str, str] | None:
    if chosen == "none":
        return None
    if chosen == "auto":
        return next((marks for marks in REASONING_MARKS.values() if marks[1] in source), None)
    return REASONING_MARKS[_known(chosen, REASONING_MARKS, "agent.reasoning_parser")]


def _known(name: str, parsers: Mapping[str, object], where: str) -> str:
    if name not in parsers:
        known = ", ".join(("auto", "none", *parsers))
        raise ValueError(f"{where}: is {name!r}; must be one of {known}")
    return name
