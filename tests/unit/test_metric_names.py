"""The table of metric names against the code that logs them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import areal_ray
from areal_ray.telemetry.names import METRICS

PACKAGE = Path(areal_ray.__file__).parent
READERS = ("telemetry",)
"""Folders that read rows; a name that occurs only there is looked for and never found."""


def is_read(node: ast.AST) -> bool:
    """row.get("name") and row["name"]."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "get"
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)


def written(tree: ast.AST) -> Iterator[str]:
    """Patterns of all texts in the source but for those that look a value up."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.escape(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else None for p in node.values]
            yield "".join("[a-z_]+" if part is None else re.escape(part) for part in parts)
        elif not is_read(node):
            todo += ast.iter_child_nodes(node)


def test_a_lookup_is_no_logging_and_a_family_of_names_is():
    code = 'row.get("a/read"); row["b/read"]; add(f"agent/{outcome}_episodes"); add("c/one")'
    assert set(written(ast.parse(code))) == {"agent/[a-z_]+_episodes", "c/one"}


def test_every_declared_metric_is_logged_by_something_in_the_package():
    patterns = {
        pattern
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in READERS
        for pattern in written(ast.parse(path.read_text(encoding="utf-8")))
        if re.match("[a-z]+/", pattern)
    }
    logs = re.compile("|".join(sorted(patterns)))
    assert [spec.name for spec in METRICS if not logs.fullmatch(spec.name)] == []
