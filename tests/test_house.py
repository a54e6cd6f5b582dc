"""The house rules, checked on the source itself: docs/architecture.md says why each exists."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from areal_ray.core.typed_yaml import all_keys
from areal_ray.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "areal_ray"
SOURCES = sorted(PACKAGE.rglob("*.py"))
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))

FLOORS = [
    {"errors", "core", "telemetry"},
    {"gateway", "algorithms", "rewards", "agents", "checkpoint", "run_folder"},
    {"engines"},
    {"runtime"},
    {
        *("driver", "recipe", "run", "records", "handle", "assembly", "prepare"),
        *("preflight", "plan", "run_listing", "actors", "session", "ending", "kinds", "smoke"),
        *("model_function", "model_check", "gateway_access", "agent_check", "row_check", "control"),
        *("scaling", "following", "serving", "beginning", "header"),
    },
    {"cli"},
]
FLOOR_OF = {unit: number for number, floor in enumerate(FLOORS, 1) for unit in floor}
FREE_FLOORS = {1, 5}
"""Floors whose units may import each other, as long as there is no cycle."""

HOMES = {
    "ray": ("runtime/",),
    "torch": ("algorithms/", "engines/", "runtime/collective.py"),
    "transformers": ("engines/", "gateway/template.py"),
    "vllm": ("engines/",),
    "deepspeed": ("engines/",),
    "peft": ("engines/",),
    "aiohttp": ("engines/", "gateway/"),
    "fastapi": ("gateway/",),
    "uvicorn": ("gateway/",),
    "typer": ("cli.py",),
    "rich": ("telemetry/",),
    "llguidance": ("core/grammars.py",),
}
ENVIRONMENT_HOMES = (
    *("cli.py", "runtime/cluster.py"),
    *("engines/vllm_environment.py", "engines/deepspeed.py", "engines/deepspeed_device.py"),
    *("gateway_access.py",),
)
PRINT_HOMES = ("telemetry/terminal.py",)
BROAD_EXCEPTS = {
    "agents/episode.py": "the agent",
    "rewards/worker.py": "the reward",
    "engines/engine_loop.py": "the loop's end: every turn it held comes back with the cause",
    "engines/vllm_generation.py": "vLLM, which raises what it likes: told as ours, with the cause",
    "engines/vllm_serving.py": "vLLM, which raises what it likes: the turn comes back with it",
    "engines/vllm_tool_format.py": "vLLM's parser, which raises what it likes: it stays text",
    "gateway/app.py": "the edge: a defect of ours is logged, and the client told to try again",
    "preflight.py": "code that a recipe names",
    "model_function.py": "the function of model.create",
    "agents/hub.py": "the hub's client and its transports, which raise what they like",
    "smoke.py": "a recipe's data sources, which may be out of reach here",
    "session.py": "the run's own end: any failure is told, and the report still written",
    "runtime/supervisor.py": "the supervisor",
    "runtime/cluster.py": "Ray, which raises a bare Exception where it does not start",
}
BANNED_WORDS = {"Manager", "Handler", "Helper", "Helpers", "Utils", "Util", "Base", "Impl"}
BANNED_WORDS |= {"Wrapper", "V2"}
BANNED_NAMES = {"data", "info", "process"}
BANNED_MODULES = {"utils", "util", "helpers", "helper", "common", "misc", "base"}
MAX_COPIED_LINES = 11


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """The part of the package that a module belongs to: `core`, `cli`; "" = the root."""
    return [*module.split("."), ""][1]


def is_under(path: Path, homes: tuple[str, ...]) -> bool:
    return name_of(path).startswith(homes)


def imports_of(path: Path, *, for_types: bool = True) -> Iterator[tuple[str, int]]:
    """Imported modules with their lines; without those under `if TYPE_CHECKING` if asked."""
    hidden = set()
    if not for_types:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                hidden |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree_of(path)):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                is_module = (ROOT / Path(*inner.split("."))).with_suffix(".py").exists()
                yield (inner if is_module else module), node.lineno


def definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node


def length(node: ast.AST) -> int:
    assert isinstance(node, ast.stmt)
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def told(lines: list[str]) -> str:
    return "\n" + "\n".join(lines)


def test_imports_run_down_the_floors_and_never_between_siblings():
    wrong = []
    for path in SOURCES:
        unit = unit_of(module_of(path))
        if not unit:
            continue  # the package itself: names are loaded when they are asked for
        assert unit in FLOOR_OF, f"{unit}: not on any floor; add it to FLOORS"
        for module, line in imports_of(path):
            other = unit_of(module) if module.split(".")[0] == "areal_ray" else unit
            if other in ("", unit):
                continue
            here, there = FLOOR_OF[unit], FLOOR_OF[other]
            if there > here or (there == here and here not in FREE_FLOORS):
                wrong.append(f"{name_of(path)}:{line}: {unit} must not import {other}")
    assert not wrong, told(wrong)


def test_core_knows_no_telemetry():
    wrong = [
        f"{name_of(path)}:{line}"
        for path in SOURCES
        if is_under(path, ("core/",))
        for module, line in imports_of(path)
        if module.startswith("areal_ray.telemetry")
    ]
    assert not wrong, told(wrong)


def test_no_module_imports_itself_through_others():
    graph = defaultdict(set)
    known = {module_of(path) for path in SOURCES}
    for path in SOURCES:
        if path.name != "__init__.py":
            found = {module for module, _ in imports_of(path, for_types=False)}
            graph[module_of(path)] = found & known
    done: set[str] = set()

    def walk(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module in done:
            return
        for other in sorted(graph[module]):
            walk(other, (*above, module))
        done.add(module)

    for module in sorted(graph):
        walk(module, ())


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_library_is_imported_only_in_its_home(library):
    wrong = [
        f"{name_of(path)}:{line}: imports {module}"
        for path in SOURCES
        if not is_under(path, HOMES[library])
        for module, line in imports_of(path, for_types=False)
        if module.split(".")[0] == library
    ]
    assert not wrong, told(wrong)


def test_the_environment_is_touched_in_few_places_only():
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if not is_under(path, ENVIRONMENT_HOMES)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
    ]
    assert not wrong, told(wrong)


def test_what_is_printed_goes_through_the_one_place_that_takes_controls_out():
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if not is_under(path, PRINT_HOMES)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert not wrong, told(wrong)


def test_actors_are_plain_classes_made_remote_in_one_place():
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if name_of(path) != "runtime/fleet.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "ray.remote"
    ]
    assert not wrong, told(wrong)


def test_every_failure_is_caught_only_where_it_is_turned_into_something_told():
    wrong = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = "" if node.type is None else ast.unparse(node.type)
            is_broad = node.type is None or re.search(r"\b(Base)?Exception\b", caught) is not None
            raises = any(isinstance(n, ast.Raise) and n.exc is None for n in ast.walk(node))
            if is_broad and not raises and name_of(path) not in BROAD_EXCEPTS:
                wrong.append(f"{name_of(path)}:{node.lineno}: except {caught}")
    assert not wrong, told(wrong)


def test_files_functions_and_classes_stay_small():
    wrong = []
    for path in SOURCES:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > 400:
            wrong.append(f"{name_of(path)}: {lines} lines, at most 400")
        for node in definitions(path):
            where = f"{name_of(path)}:{node.lineno}: {node.name}"
            if isinstance(node, ast.ClassDef):
                public = [
                    n
                    for n in node.body
                    if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
                    and not n.name.startswith("_")
                ]
                if length(node) > 250:
                    wrong.append(f"{where}: {length(node)} lines, at most 250")
                if len(public) > 15:
                    wrong.append(f"{where}: {len(public)} public methods, at most 15")
            elif length(node) > 60:
                wrong.append(f"{where}: {length(node)} lines, at most 60")
    assert not wrong, told(wrong)


def test_functions_take_at_most_seven_parameters():
    wrong = []
    for path in SOURCES:
        for node in definitions(path):
            if isinstance(node, ast.ClassDef) or name_of(path) == "algorithms/losses.py":
                continue
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in every)
            # Actors and services are built once, by keyword: a dataclass would say it twice.
            is_built_once = node.name == "__init__" and len(node.args.args) <= 3 and count <= 10
            # The parameters of a command are the options of its command line.
            is_command = name_of(path) == "cli.py" and bool(node.decorator_list)
            if count > 7 and not is_built_once and not is_command:
                wrong.append(f"{name_of(path)}:{node.lineno}: {node.name} takes {count}")
    assert not wrong, told(wrong)


def test_no_twelve_lines_stand_in_two_places():
    seen: dict[tuple[str, ...], str] = {}
    wrong = []
    for path in SOURCES:
        imported = {
            line
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        lines = [
            (number, text.strip())
            for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
            if text.strip() and number not in imported
        ]
        for start in range(len(lines) - MAX_COPIED_LINES):
            window = tuple(text for _, text in lines[start : start + MAX_COPIED_LINES + 1])
            where = f"{name_of(path)}:{lines[start][0]}"
            first = seen.setdefault(window, where)
            if first != where:
                wrong.append(f"{where} repeats {first}")
    assert not wrong, told(wrong)


def test_names_say_what_a_thing_is():
    wrong = []
    for path in SOURCES:
        if set(path.relative_to(PACKAGE).with_suffix("").parts) & BANNED_MODULES:
            wrong.append(f"{name_of(path)}: a file name that says nothing")
        for node in ast.walk(tree_of(path)):
            names: list[str] = []
            if isinstance(node, ast.ClassDef):
                words = set(re.findall(r"V2|[A-Z][a-z0-9]*", node.name)) & BANNED_WORDS
                wrong += [f"{name_of(path)}:{node.lineno}: class {node.name}"] if words else []
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = [node.name.strip("_"), *(argument.arg for argument in every)]
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names = [node.id.strip("_")]
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names = [node.attr.strip("_")] if ast.unparse(node.value) == "self" else []
            wrong += [
                f"{name_of(path)}:{getattr(node, 'lineno', 0)}: {name}"
                for name in names
                if name in BANNED_NAMES
            ]
    assert not wrong, told(wrong)


def test_no_variant_is_built_by_inheriting_twice():
    bases = {
        node.name: [ast.unparse(base).split("[")[0] for base in node.bases]
        for path in SOURCES
        for node in definitions(path)
        if isinstance(node, ast.ClassDef)
    }
    roots = {"Config", "ArealRayError"}  # what every section and every error is
    ours = {
        name: [b for b in above if b in bases and b not in roots] for name, above in bases.items()
    }
    wrong = [name for name, above in ours.items() if any(ours[base] for base in above)]
    assert not wrong, told(wrong)


def test_everything_public_says_what_it_is():
    wrong = []
    for path in SOURCES:
        if ast.get_docstring(tree_of(path)) is None and path.read_text(encoding="utf-8").strip():
            wrong.append(f"{name_of(path)}: no docstring")
        for node in _public(tree_of(path)):
            if ast.get_docstring(node) is None:
                wrong.append(f"{name_of(path)}:{node.lineno}: {node.name} has no docstring")
    assert not wrong, told(wrong)


def _public(
    above: ast.Module | ast.ClassDef,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in above.body:
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_definition and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node)


def test_sources_are_ascii_and_spell_behaviour_one_way():
    wrong = []
    for path in [*SOURCES, *sorted((ROOT / "recipes").rglob("*.py")), *RECIPES]:
        text = path.read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            if not line.isascii():
                wrong.append(f"{where}: not ASCII")
            if re.search(r"behavior(?!=)", line, re.IGNORECASE):  # a library's keyword may
                wrong.append(f"{where}: behaviour is spelled with a u here")
            if re.search(r"\b(TODO|FIXME|XXX)\b(?!.*#\d)", line):
                wrong.append(f"{where}: a TODO needs the number of its issue")
    assert not wrong, told(wrong)


def test_every_key_of_a_recipe_is_documented():
    documented = list(_undocumented(Recipe.model_json_schema()))
    assert not documented, told(documented)
    assert "rollout.engine.max_slots" in set(all_keys(Recipe))


def _undocumented(schema: dict[str, object]) -> Iterator[str]:
    sections = {"Recipe": schema, **schema["$defs"]}  # type: ignore[dict-item]
    for name, section in sections.items():
        for key, field in section.get("properties", {}).items():
            if not field.get("description") and "$ref" not in field:
                yield f"{name}.{key}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_recipe_fits_one_screen_and_loads(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
    recipe = load_recipe(path)
    assert recipe.steps > 0 or recipe.kind != "rl"


@pytest.mark.parametrize(
    "code",
    [
        "import areal_ray.cli",
        "from areal_ray.recipe import load_recipe, recipe_schema; recipe_schema()",
        "import areal_ray; areal_ray.load_recipe",
    ],
)
def test_help_and_recipe_checks_import_nothing_heavy(code):
    heavy = "{'torch', 'ray', 'transformers', 'vllm', 'tensorboard', 'huggingface_hub'}"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print(sorted({heavy} & set(sys.modules)))"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.strip() == "[]"
