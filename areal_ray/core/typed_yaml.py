"""From a YAML tree to a frozen `Config`: each value is read as what its field's type says.

A str field keeps `on`, `007` and `12:30:45` as written, an int field refuses 8.0 and true, a
float field reads `1e-5` and 1. All that is wrong is collected, so that one run tells it all.
"""

import difflib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from areal_ray.core import yaml_tree
from areal_ray.core.yaml_tree import Node, Scalar

ConfigT = TypeVar("ConfigT", bound=BaseModel)

_INVALID: Any = object()
_BOUNDS = {
    "greater_than_equal": ("ge", ">="),
    "greater_than": ("gt", ">"),
    "less_than_equal": ("le", "<="),
    "less_than": ("lt", "<"),
}
_KEYS_SHOWN = 8


def read_config(
    tree: yaml_tree.Mapping, schema: type[ConfigT], *, is_checked: bool = True
) -> ConfigT | list[str]:
    """The config that the tree describes, or all that is wrong with it, one line each.

    Args:
        tree: What the user wrote.
        schema: What it must be.
        is_checked: Whether keys must go together, too; else each must only be sound by itself.
    """
    reader = _Reader(schema, is_checked)
    config = reader.read_section(tree, schema, "")
    return reader.problems if reader.problems else config


def untyped_values(value: Any) -> Any:
    """A config as plain dicts, lists, texts and numbers; nothing left out."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {name: untyped_values(getattr(value, name)) for name in fields}
    if isinstance(value, Mapping):
        return {str(key): untyped_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [untyped_values(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def all_keys(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the schema, sections included, as `a.b.c`."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        for section in _sections(field.annotation):
            yield from all_keys(section, f"{prefix}{name}.")


class _Reader:
    """Walks tree and annotations together; `problems` fills up on the way."""

    def __init__(self, root: type[BaseModel], is_checked: bool) -> None:
        self.problems: list[str] = []
        self._root = root
        self._is_checked = is_checked
        self._variants: dict[str, list[type[BaseModel]]] = {}
        """Key of a section that comes in several kinds -> those."""

    def read_section(self, node: Node, schema: type[BaseModel], key: str) -> Any:
        """The section as an instance of `schema`."""
        if not isinstance(node, yaml_tree.Mapping):
            is_empty = isinstance(node, Scalar) and node.is_null
            shown = "is empty" if is_empty else f"is {_show(node)}"
            return self._refuse(node, key, f"{shown}; must be a section with keys.")
        values: dict[str, Any] = {}
        invalid: set[str] = set()
        for name, item in node.items.items():
            field = schema.model_fields.get(name)
            if field is None:
                self._refuse(item, _join(key, name), self._unknown(key, name, schema))
                continue
            value = self.read(item, field.annotation, _join(key, name))
            if value is _INVALID:
                invalid.add(name)
            else:
                values[name] = value
        try:
            section = schema.model_validate(values)
        except ValidationError as error:
            if not self._is_checked and not invalid and _is_cross_check(error):
                return schema.model_construct(**values)
            self._refuse_all(error, node, key, invalid)
            return _INVALID
        return _INVALID if invalid else section

    def read(self, node: Node, annotation: Any, key: str) -> Any:
        """The node's value as the annotation wants it, or _INVALID with a problem added."""
        options = list(_options(annotation))
        if isinstance(node, Scalar):
            value = _read_scalar(node, options)
            if value is not _INVALID:
                return value
        elif str in options and node.source and not _structured(options, node):
            return node.source
        else:
            for option in _structured(options, node):
                return self._read_structured(node, option, options, key)
        return self._refuse(node, key, _wanted(node, options))

    def _read_structured(self, node: Node, option: Any, options: list[Any], key: str) -> Any:
        if option in (Any, object):
            return yaml_tree.untyped(node)
        if isinstance(node, yaml_tree.Sequence):
            return self._read_list(node, option, key)
        assert isinstance(node, yaml_tree.Mapping)
        if _is_section(option):
            return self._read_variant(node, [o for o in options if _is_section(o)], key)
        item_type = (get_args(option) or (str, Any))[1]
        pairs = {
            name: self.read(item, item_type, _join(key, name)) for name, item in node.items.items()
        }
        return _INVALID if any(v is _INVALID for v in pairs.values()) else pairs

    def _read_list(self, node: yaml_tree.Sequence, option: Any, key: str) -> Any:
        container = get_origin(option) or option
        item_types = get_args(option) or (Any,)
        if container is tuple and item_types[-1] is not Ellipsis:
            if len(item_types) != len(node.items):
                told = f"has {len(node.items)} items; must have {len(item_types)}."
                return self._refuse(node, key, told)
        else:
            item_types = (item_types[0],) * len(node.items)
        pairs = zip(node.items, item_types, strict=True)
        items = [self.read(item, kind, _join(key, str(i))) for i, (item, kind) in enumerate(pairs)]
        return _INVALID if any(item is _INVALID for item in items) else container(items)

    def _read_variant(self, node: yaml_tree.Mapping, sections: list[Any], key: str) -> Any:
        """One of several sections, told apart by their `kind`; without it the first."""
        self._variants[key] = sections
        kinds = {kind: section for section in sections for kind in _kinds(section)}
        kind = node.items.get("kind")
        if len(sections) == 1 or kind is None or not kinds:
            return self.read_section(node, sections[0], key)
        if isinstance(kind, Scalar) and kind.text in kinds:
            return self.read_section(node, kinds[kind.text], key)
        options = [Literal[tuple(kinds)]]
        return self._refuse(kind, _join(key, "kind"), _wanted(kind, options))

    def _refuse(self, node: Node, key: str, told: str) -> Any:
        self.problems.append(f"{node.where}: {key or 'recipe'}: {told}")
        return _INVALID

    def _refuse_all(
        self, error: ValidationError, node: yaml_tree.Mapping, key: str, invalid: set[str]
    ) -> None:
        for fault in error.errors(include_url=False):
            name = ".".join(str(part) for part in fault["loc"])
            if fault["loc"] and fault["loc"][0] in invalid:
                continue  # already told, by what the user wrote
            if not fault["loc"] and invalid:
                continue  # a cross-check made without the invalid values means nothing
            for told, inner in _faults_told(dict(fault)):
                self._refuse(_nearest(node, inner or name), _join(key, inner or name), told)

    def _unknown(self, section: str, name: str, schema: type[BaseModel]) -> str:
        former = getattr(schema, "former_keys", {}).get(name)
        if former:
            return f"is no longer a key. {former}"
        fields = list(schema.model_fields)
        others = [s for s in self._variants.get(section, ()) if name in s.model_fields]
        owners = [str(kind) for other in others for kind in _kinds(other)]
        if owners:
            own = "".join(f" with {section}.kind={kind}" for kind in _kinds(schema)[:1])
            has = f"kind {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} it"
            return f"unknown key{own}; {has}. Set {section}.kind={owners[0]}, or take the key out."
        elsewhere = [key for key in all_keys(self._root) if key.rpartition(".")[2] == name]
        below = [key for key in elsewhere if key.startswith(f"{section}.")]
        near = below or [field for field in fields if _is_short_for(name, field)]
        near = near or difflib.get_close_matches(name, fields, n=1)
        if near:
            return f"unknown key. Did you mean '{near[0]}'?"
        if elsewhere:
            return f"unknown key. Did you mean '{elsewhere[0]}'?"
        return f"unknown key. Known keys: {', '.join(fields)}."


def _read_scalar(node: Scalar, options: list[Any]) -> Any:
    """The scalar as the first option that takes it: null, a listed word, a number, a text."""
    for option in options:
        for word in get_args(option) if get_origin(option) is Literal else ():
            if _is_word(node, word):
                return word
    if node.is_null:
        return None if type(None) in options or Any in options or object in options else _INVALID
    parsers: list[tuple[Any, Callable[[str], Any]]] = [
        (bool, yaml_tree.parse_bool),
        (int, yaml_tree.parse_int),
        (float, yaml_tree.parse_float),
    ]
    for kind, parse in [] if node.is_quoted else parsers:
        value = parse(node.text) if kind in options else None
        if value is not None:
            return value
    for option in options:
        if isinstance(option, type) and issubclass(option, Enum):
            for member in option:
                if str(member.value) == node.text:
                    return member
    if str in options:
        return node.text
    if Path in options:
        return Path(node.text)
    return yaml_tree.untyped(node) if Any in options or object in options else _INVALID


def _is_word(node: Scalar, word: Any) -> bool:
    if isinstance(word, bool):
        return not node.is_quoted and yaml_tree.parse_bool(node.text) is word
    if isinstance(word, int):
        return not node.is_quoted and yaml_tree.parse_int(node.text) == word
    return bool(node.text == word)


def _options(annotation: Any) -> Iterator[Any]:
    """The alternatives of an annotation, unions flattened and Annotated taken off."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _options(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for option in get_args(annotation):
            yield from _options(option)
    else:
        yield annotation


def _structured(options: list[Any], node: Node) -> list[Any]:
    """The options that can hold this list or mapping."""
    wanted = (list, tuple) if isinstance(node, yaml_tree.Sequence) else (dict, Mapping)
    return [
        option
        for option in options
        if option in (Any, object)
        or (get_origin(option) or option) in wanted
        or (_is_section(option) and isinstance(node, yaml_tree.Mapping))
    ]


def _is_section(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, BaseModel)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    for option in _options(annotation):
        if _is_section(option):
            yield option
        else:
            for inner in get_args(option) if get_origin(option) in (list, tuple) else ():
                yield from _sections(inner)


def _kinds(section: type[BaseModel]) -> tuple[Any, ...]:
    field = section.model_fields.get("kind")
    is_tagged = field is not None and get_origin(field.annotation) is Literal
    return get_args(field.annotation) if field is not None and is_tagged else ()


def _is_short_for(name: str, field: str) -> bool:
    """Whether each word of a name begins that of a field: adv_norm, agg."""
    words, wholes = name.split("_"), field.split("_")
    begins = (whole.startswith(word) and word for word, whole in zip(words, wholes, strict=False))
    return len(words) == len(wholes) and all(begins)


def _wanted(node: Node, options: list[Any]) -> str:
    """What is, what must be, and the nearest allowed word."""
    words = [w for o in options if get_origin(o) is Literal for w in get_args(o)]
    words += [m.value for o in options if isinstance(o, type) and issubclass(o, Enum) for m in o]
    names = [_NAMES[option] for option in options if option in _NAMES and option is not type(None)]
    names += ["a section" for option in options if _is_section(option)][:1]
    names += ["a list" for o in options if (get_origin(o) or o) in (list, tuple)][:1]
    names += ["a mapping" for o in options if (get_origin(o) or o) in (dict, Mapping)][:1]
    names += [", ".join(str(word) for word in words)] if words else []
    names += ["null"] if type(None) in options else []
    told = f"is {_show(node)}; must be {' or '.join(names)}."
    if isinstance(node, Scalar) and node.fault:
        told += f" It was read as text: {node.fault}"
    elif isinstance(node, Scalar):
        plain = {str(word).lower(): str(word) for word in words}
        near = [plain[w] for w in difflib.get_close_matches(node.text.lower(), list(plain), n=1)]
        if near:
            told += f" Did you mean '{near[0]}'?"
        elif node.is_null and (str in options or Path in options):
            told += " Quote it if the word itself is meant."
        elif node.is_quoted and not words and {int, float, bool} & set(options):
            told += " Take the quotes off."
        elif node.text and {list, tuple} & {get_origin(o) or o for o in options}:
            told += f" Write [{node.text if not node.is_quoted else repr(node.text)}]."
    return told


_NAMES: dict[Any, str] = {
    str: "text",
    Path: "a path",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _show(node: Node) -> str:
    if isinstance(node, yaml_tree.Mapping):
        return f"a section ({', '.join(list(node.items)[:_KEYS_SHOWN])})"
    if isinstance(node, yaml_tree.Sequence):
        return f"a list of {len(node.items)}"
    if node.is_null:
        return node.text or "empty"
    return repr(node.text) if node.is_quoted else node.text


def _is_cross_check(error: ValidationError) -> bool:
    """Whether each key is sound by itself: our own validators alone are not content."""
    told = {fault["type"] for fault in error.errors(include_url=False)}
    return told <= {"value_error", "assertion_error"}


def _faults_told(fault: dict[str, Any]) -> list[tuple[str, str]]:
    """What to say of one pydantic fault, line by line, each with the key that it itself names."""
    context = fault.get("ctx", {})
    if fault["type"] == "missing":
        return [("is missing; must be given.", "")]
    if fault["type"] in _BOUNDS:
        name, sign = _BOUNDS[fault["type"]]
        return [(f"is {fault['input']}; must be {sign} {context[name]}.", "")]
    if fault["type"] == "too_short":
        least, own = context["min_length"], context["actual_length"]
        return [(f"has {own} items; must have at least {least}.", "")]
    if fault["type"] == "value_error":
        lines = str(context["error"]).splitlines()
        named = [(line, re.match(r"([a-z_][\w.]*): ", line)) for line in lines]
        return [(line[m.end() :], m.group(1)) if m else (line, "") for line, m in named]
    shown = fault["input"] if isinstance(fault["input"], str | int | float) else "unsuitable"
    return [(f"is {shown!r}; {fault['msg'][0].lower()}{fault['msg'][1:]}.", "")]


def _nearest(node: Node, key: str) -> Node:
    """The node at a key, or the last one that exists on the way to it."""
    for part in key.split("."):
        if not isinstance(node, yaml_tree.Mapping) or part not in node.items:
            break
        node = node.items[part]
    return node


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key and name else key or name
