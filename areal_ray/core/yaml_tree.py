"""YAML and `key=value` texts as a tree whose scalars are still the text the user wrote.

YAML 1.1 would turn `on` into true, `12:30:45` into 45045 and `1e-5` into a string before anybody
knows what the key wants. Here nothing is converted: `typed_yaml` does, by the schema.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

OVERRIDE = "override"
"""Where a node of the command line comes from, in messages."""

_NULL_WORDS = frozenset({"", "~", "null", "Null", "NULL", "none", "None", "NONE"})
_PLAIN_TEXT = re.compile(r"[A-Za-z_./{][\w./:{}+-]*")
_KEY = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, slots=True)
class Scalar:
    """One word or text, not yet converted."""

    text: str
    is_quoted: bool
    where: str
    fault: str = ""
    """Why an override that looks like a list or a mapping is neither."""

    @property
    def is_null(self) -> bool:
        """Whether the user wrote nothing, null or none, unquoted."""
        return not self.is_quoted and self.text in _NULL_WORDS


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list, and for an override the text it was read from."""

    items: tuple["Node", ...]
    where: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys with values, and for an override the text it was read from."""

    items: dict[str, "Node"]
    where: str
    source: str = ""


Node = Scalar | Sequence | Mapping


def read_tree(text: str, where: str) -> Mapping:
    """The tree of a whole YAML document.

    Raises:
        ValueError: not YAML, not a mapping, a key given twice; the message names the line.
    """
    node = _compose(text, where)
    if node is None:
        return Mapping({}, where)
    if not isinstance(node, Mapping):
        raise ValueError(f"{where}: is not a mapping; must hold keys such as 'kind: rl'.")
    return node


def read_override(text: str) -> tuple[list[str], Node]:
    """Key path and value of one `a.b=value` of the command line.

    Raises:
        ValueError: no `=`, or no key before it.
    """
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key) or "" in key.split("."):
        raise ValueError(
            f"{OVERRIDE} {text!r}: is not of the form key=value. "
            "Write for example 'rollout.replicas=2'."
        )
    value = value.strip()
    try:
        node = _compose(value, OVERRIDE)
    except ValueError as error:  # such as '@a' or 'a: b: c'
        fault = str(error).removeprefix(f"{OVERRIDE}: ").strip() if value[:1] in "[{" else ""
        node = Scalar(value, is_quoted=False, where=OVERRIDE, fault=fault)
    if node is None or isinstance(node, Scalar):
        # YAML would cut ' #...' as a comment; a shell word has none.
        node = node or Scalar(value, is_quoted=False, where=OVERRIDE)
        node = node if node.is_quoted else replace(node, text=value)
    else:
        node = replace(node, source=value)
    return key.split("."), node


def set_at(tree: Node, path: list[str], value: Node) -> Node:
    """The tree with `value` in place of what is at `path`; sections on the way are made.

    Raises:
        ValueError: the path goes through a plain value or beyond a list.
    """
    if not path:
        return value
    head, *rest = path
    if isinstance(tree, Sequence):
        if not head.isdecimal() or int(head) >= len(tree.items):
            raise ValueError(f"{head}: is no item of a list of {len(tree.items)}; items are 0, 1..")
        items = list(tree.items)
        items[int(head)] = set_at(items[int(head)], rest, value)
        return replace(tree, items=tuple(items))
    if isinstance(tree, Scalar):
        if not tree.is_null:
            raise ValueError(f"{head}: lies below the plain value {tree.text!r}")
        tree = Mapping({}, OVERRIDE)
    below = tree.items.get(head, Mapping({}, OVERRIDE))
    return replace(tree, items={**tree.items, head: set_at(below, rest, value)}, source="")


def untyped(node: Node) -> Any:
    """The plain Python value of a node that no schema describes (YAML 1.2 words and numbers)."""
    if isinstance(node, Mapping):
        return {key: untyped(item) for key, item in node.items.items()}
    if isinstance(node, Sequence):
        return [untyped(item) for item in node.items]
    if node.is_quoted:
        return node.text
    if node.is_null:
        return None
    for parse in (parse_bool, parse_int, parse_float):
        value = parse(node.text)
        if value is not None:
            return value
    return node.text


def parse_bool(text: str) -> bool | None:
    """True or False; None where the text is neither word."""
    return {"true": True, "false": False}.get(text.lower())


def parse_int(text: str) -> int | None:
    """A whole number, `1_000` too; None for anything else, `010` (8 or 10?) and 8.0 too."""
    if re.fullmatch(r"[+-]?(0|[1-9]\d*(_\d+)*)", text):
        return int(text)
    return None


def parse_float(text: str) -> float | None:
    """A number, `1e-5` and `.inf` too; None for anything else."""
    if re.fullmatch(r"[+-]?((0|[1-9]\d*(_\d+)*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?", text):
        return float(text)
    if re.fullmatch(r"[+-]?\.?inf", text.lower()):
        return float(text.lower().replace(".", ""))
    return None


def write_yaml(value: Any) -> str:
    """YAML that `read_tree` and the schema read back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that could be read as anything else."""

    def ignore_aliases(self, value: Any) -> bool:
        """Write a repeated value twice: a reader should not have to look for an anchor."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN_TEXT.fullmatch(text) and isinstance(
        untyped(Scalar(text, is_quoted=False, where="")), str
    )
    style = None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value).replace("inf", ".inf")
    if "." not in text:
        text = text.replace("e", ".0e")  # YAML 1.1 takes 1e-05 for a text
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(float, _represent_float)


def _compose(text: str, where: str) -> Node | None:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise ValueError(f"{where}: is nested too deep.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ValueError(f"{where}:{line} is not valid YAML: {problem}.") from error
    return None if node is None else _convert(node, where, ())


def _convert(node: yaml.Node, where: str, above: tuple[int, ...]) -> Node:
    if id(node) in above:
        raise ValueError(f"{where}: line {node.start_mark.line + 1}: an anchor contains itself.")
    above = (*above, id(node))
    if isinstance(node, yaml.ScalarNode):
        return Scalar(node.value, is_quoted=node.style is not None, where=where)
    if isinstance(node, yaml.SequenceNode):
        return Sequence(tuple(_convert(item, where, above) for item in node.value), where)
    assert isinstance(node, yaml.MappingNode)
    items: dict[str, Node] = {}
    for key, line, value in _pairs(node, where):
        if key in items:
            raise ValueError(f"{where}: line {line}: '{key}' is given twice. Remove one of them.")
        items[key] = _convert(value, where, above)
    return Mapping(items, where)


def _pairs(node: yaml.MappingNode, where: str) -> Iterator[tuple[str, int, yaml.Node]]:
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"{where}: line {line}: a key must be a word.")
        yield key.value, line, value
