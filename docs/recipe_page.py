"""Makes docs/recipes.md from the schema of a recipe: python -m docs.recipe_page docs/recipes.md"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_ray.recipe import recipe_schema

INTRODUCTION = """\
# Recipes: every key

A recipe is one YAML file. Any key can be changed on the command line as `key=value`, read as the
type the key has: `rollout.replicas=2`, `learner.optimizer.lr=1e-5`, `evaluation=null`,
`sft.phases.0.steps=60`. An unknown key is an error that names the nearest known one; what is left
out has its default. `areal-ray train RECIPE --print-config` prints the whole recipe as it would
run, and each run saves it as `recipe.yaml`.

| kind | what it does | sections it needs | actors |
|---|---|---|---|
| `rl` | learns from rewards | `tasks`, `reward`, `admission` | all |
| `sft` | learns from given answers | `sft` | learners |
| `dpo` | learns from pairs of answers | `preference`, `reference` | learners |
| `reward_model` | learns to score answers from pairs | `preference` | learners |
| `distill` | learns from a teacher, on its own answers | `tasks`, `admission`, `teacher` | [1] |
| `distill`, with `sft` | learns from a teacher, on given answers | `sft`, `teacher` | learners |
| `eval` | scores a model | `evaluation`, `reward` | no learner |
| `inference` | serves a model | | rollouts, gateways |

A section that a kind would not read is refused. [1] All but reward actors: it has those only where
`evaluation` is given, for held-out tasks. `areal-ray train RECIPE --smoke` tries any recipe out
with a tiny random model and a few rows.

Code is named `package.module:name` and looked for in the folders above the recipe file and in the
working directory. How to write it: [agents_and_rewards.md](agents_and_rewards.md).

This page is made from the code (`python -m docs.recipe_page docs/recipes.md`) and a test compares
the two. A default of *needed* means that the key has none."""

HEAD = ["| key | value | default | meaning |", "|---|---|---|---|"]


def recipe_page() -> str:
    """The text of docs/recipes.md."""
    schema = recipe_schema()
    sections = {"": schema, **_sections(schema, schema["$defs"])}
    shown: dict[str, str] = {}
    lines = [INTRODUCTION]
    for path, section in sections.items():
        title = section["title"]
        lines += ["", f"## {path}" if path else "## At the top", ""]
        if title in shown:
            lines.append(f"The same keys as [`{shown[title]}`](#{_anchor(shown[title])}).")
            continue
        shown[title] = path
        about = section.get("description", "")
        lines += [_text(about, "\n"), ""] if path else []
        below = {name.removeprefix(f"{path}.").partition(" ")[0] for name in sections if name}
        required = section.get("required", [])
        rows = [
            _row(name, field, name in required)
            for name, field in section["properties"].items()
            if name not in below and f"{name}.N" not in below
        ]
        lines += [*HEAD, *rows] if rows else ["A list of phases, one after the other."]
    return "\n".join(lines) + "\n"


def _sections(
    section: dict[str, Any], known: dict[str, Any], path: str = ""
) -> dict[str, dict[str, Any]]:
    """Dotted path -> schema, of all sections below one."""
    found: dict[str, dict[str, Any]] = {}
    for name, field in section["properties"].items():
        references = list(_references(field))
        for reference, suffix in references:
            inner = known[reference]
            about = field.get("description") or inner["description"]
            kind = ""
            if len(references) > 1:  # told apart by their kind
                kind = f" (kind: {inner['properties']['kind']['const']})"
                about = inner["description"]
            found[f"{path}{name}{suffix}{kind}"] = {**inner, "description": about}
            found |= _sections(inner, known, f"{path}{name}{suffix}.")
    return found


def _references(field: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names of the sections a field may hold, and what their path is called after it."""
    for option in [field, *field.get("anyOf", [])]:
        if "$ref" in option:
            yield option["$ref"].rsplit("/", 1)[1], ""
        if "$ref" in option.get("items", {}):
            yield option["items"]["$ref"].rsplit("/", 1)[1], ".N"


def _row(name: str, field: dict[str, Any], is_required: bool) -> str:
    default = "*needed*" if is_required else f"`{_plain(field.get('default', {}))}`"
    return f"| `{name}` | {_value(field)} | {default} | {_text(field['description'])} |"


def _value(field: dict[str, Any]) -> str:
    options = [o for o in field.get("anyOf", [field]) if o.get("type") != "null"]
    told = " or ".join(_type(option) for option in options)
    return told + (" or `null`" if len(options) < len(field.get("anyOf", [field])) else "")


def _type(option: dict[str, Any]) -> str:
    words = option.get("enum") or ([option["const"]] if "const" in option else [])
    if words:
        return ", ".join(f"`{_plain(word)}`" for word in words)
    kinds = {
        "string": "text",
        "integer": "integer",
        "number": "number",
        "boolean": "`true`, `false`",
        "object": "mapping",
        "array": "list",
    }
    signs = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "exclusiveMaximum": "<",
    }
    bounds = ", ".join(f"{signs[s]} {option[s]:.10g}" for s in signs if s in option)
    return f"{kinds[option['type']]} {bounds}".strip()


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _text(told: str, line_break: str = " ") -> str:
    return line_break.join(told.split("\n")).replace("|", "\\|")


def _anchor(path: str) -> str:
    return re.sub(r"[^a-z0-9_ -]", "", path.lower()).replace(" ", "-")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(recipe_page(), encoding="utf-8")
