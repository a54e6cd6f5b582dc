"""Writing grammars in llguidance's Lark: rules, JSON schemas, marks that may be tokens."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

TokenId = Callable[[str], int | None]
"""The id of a text that is a token of its own, added to the vocabulary; None if it is none."""

# Blanks where json.dumps puts them or none: with any allowed, models have been seen to write
# nothing else to their last token.
_BLANKS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NESTING = ("$schema", "$id", "x-guidance")
"""Keys of a whole schema, which mean something else within another."""


class GrammarText:
    """Rules of one grammar, named as they come.

    Args:
        token_id: Of the tokenizer whose tokens the text is made of.
        head: Name of the rule that the others make up, and the beginning of theirs.
    """

    def __init__(self, token_id: TokenId, head: str = "reply") -> None:
        self._token_id = token_id
        self._head = head
        self._rules: list[str] = []

    def rule(self, body: str, options: str = "", *, is_terminal: bool = False) -> str:
        """Add a rule; its name. Options such as `lazy`; a terminal is matched as one regex."""
        name = f"{self._head.upper() if is_terminal else self._head}{len(self._rules)}"
        self._rules.append(f"{name}{f'[{options}]' if options else ''}: {body}")
        return name

    def json(self, schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
        """Add a rule for JSON of a schema; lenient: keywords that cannot be kept are passed over.

        Of `x-guidance`, llguidance's options in a schema, those of the client hold nothing.
        """
        whole = {**schema, "x-guidance": {**_BLANKS, "lenient": is_lenient}}
        return self.rule(f"%json {json.dumps(whole)}")

    def has_token(self, text: str) -> bool:
        """Whether a text is a token of its own."""
        return self._token_id(text) is not None

    def mark(self, text: str) -> str:
        """A text that the model writes as its token where it is one."""
        number = self._token_id(text)
        return json.dumps(text) if number is None else f"<[{number}]>"

    def up_to(self, mark: str) -> str:
        """Add a rule for any text up to a mark, the mark included."""
        if self._token_id(mark) is None:
            return self.rule(f"/(?s:.*){escaped(mark)}/", "lazy")
        return self.rule(f"{self.any_text()}? {self.mark(mark)}")

    def any_text(self) -> str:
        """Add a rule for text of at least one character."""
        return self.rule("/(?s:.+)/", is_terminal=True)

    def written(self, start: str) -> str:
        """All rules; the head's is what `start` says. Whole grammars have a rule `start` too."""
        return "\n".join([f"{self._head}: {start}", *self._rules])


def escaped(text: str) -> str:
    """A text within a regex of the grammar."""
    return re.sub(r"([^\w\s<>])", r"\\\1", text).replace("\n", r"\n")


def object_schema(schema: Any) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object whatever it says; none is any."""
    if not isinstance(schema, Mapping) or not schema:
        return {"type": "object"}
    return {"type": "object", **schema} if "$ref" not in schema else dict(schema)


def nested(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A schema as part of another, its references to itself adapted.

    Args:
        schema: A whole one.
        place: JSON pointer of where it will stand, such as `#/$defs/a`.
    """
    inner = {key: value for key, value in schema.items() if key not in _NESTING}
    moved: dict[str, Any] = _moved(inner, place)
    return moved


def _moved(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return [_moved(item, place) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: _moved(item, place) for key, item in value.items()}
    reference = kept.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        kept["$ref"] = place + reference[1:]
    return kept
