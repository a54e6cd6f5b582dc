"""vLLM's tool parsers as formats of ours: `agent.tool_parser: vllm:NAME`.

A parser of vLLM's reads a whole turn: what follows the first mark of a call is told when the turn
ends, and of a parser that names no mark all that is said where tools were offered.
"""

import logging
import re
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from areal_ray.errors import RecipeError
from areal_ray.gateway.json_text import value_at
from areal_ray.gateway.pieces import BegunCall, Block, FoundCall, Tools
from areal_ray.gateway.tool_formats import first_of

_log = logging.getLogger(__name__)
_OPENS = re.compile(r"(^|_)(start|begin|bot|open)(_|$)")


class VllmToolFormat:
    """A `ToolFormat` by the parser that vLLM registers under a name.

    Args:
        name: As vLLM's `--tool-call-parser` takes it.
        tokenizer: A Hugging Face tokenizer; vLLM's parsers look their marks up in it.

    Raises:
        RecipeError: vLLM has no such parser, or it refuses the tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        try:
            self._parser = ToolParserManager.get_tool_parser(name)
            asked = self._parser(tokenizer)
        except KeyError as error:
            known = ", ".join(ToolParserManager.list_registered())
            raise RecipeError(
                f"agent.tool_parser: is vllm:{name}; vLLM has no parser of that name. "
                f"Use one of {known}."
            ) from error
        except (RuntimeError, ValueError, TypeError) as error:
            raise RecipeError(
                f"agent.tool_parser: is vllm:{name}, which does not fit the model's tokenizer: "
                f"{error}. Use another."
            ) from error
        self._tokenizer = tokenizer
        marks = _texts_of(asked)
        special = {token.content for token in tokenizer.added_tokens_decoder.values()}
        self._openers = tuple({text for key, text in marks.items() if _OPENS.search(key)})
        self.markers = tuple(special.intersection(marks.values()) if self._openers else special)

    def begins(self, text: str, *, is_start: bool) -> int:
        """See `ToolFormat`."""
        return first_of(text, self._openers) if self._openers else 0

    def begun(self, text: str, tools: Tools) -> BegunCall | None:
        """None: vLLM's parsers that stream take token ids, and some say otherwise at the end."""
        return None

    def read(self, text: str, tools: Tools, *, is_whole: bool) -> Block | None:
        """See `ToolFormat`."""
        if not is_whole:
            return None
        try:
            offered = [dict(tool) for tool in tools]
            request = ChatCompletionRequest(messages=[], model="", tools=offered)
            found = self._parser(self._tokenizer, request.tools).extract_tool_calls(text, request)
            functions = [call.function for call in found.tool_calls if found.tools_called]
            calls = tuple(FoundCall(one.name, _checked(one.arguments)) for one in functions)
        except Exception as error:
            _log.debug("vLLM's tool parser: %s: %s", type(error).__name__, error)
            return Block(len(text))
        return Block(len(text), calls, found.content or "" if calls else "")


def _texts_of(parser: Any) -> dict[str, str]:
    """The marks that a parser is written with, by the names of its attributes."""
    named = {name: getattr(parser, name, None) for name in dir(parser) if name[0] != "_"}
    return {name: text for name, text in named.items() if isinstance(text, str) and text.strip()}


def _checked(arguments: str) -> str:
    value, end = value_at(arguments, 0)
    if not isinstance(value, dict) or arguments[end:].strip():
        raise ValueError("arguments that are no JSON object")
    return arguments
