"""The documents say what is: commands parse, links resolve, examples load, tables are complete."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from areal_ray.agents.episode import check_agent
from areal_ray.agents.task_stream import load_tasks
from areal_ray.cli import app
from areal_ray.core.imports import resolve
from areal_ray.core.typed_yaml import all_keys
from areal_ray.recipe import Recipe, load_recipe
from areal_ray.rewards.reward import check_reward
from docs.recipe_page import recipe_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "cluster").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
RUN_OF_A_LESSON = "mine.yaml"
"""A recipe that the reader has just written."""


def blocks(page: Path, language: str) -> list[str]:
    return [
        text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language
    ]


def commands(program: str) -> Iterator[tuple[Path, list[str]]]:
    """Words after `program` on every shell line of every page, `ray job submit --` seen through."""
    for page in PAGES:
        for line in "".join(blocks(page, "sh")).splitlines():
            words = shlex.split(line, comments=True)
            if "--" in words:
                words = words[words.index("--") + 1 :]
            if words[:1] == [program]:
                yield page, words[1:]


def ids(case: tuple[Path, list[str]]) -> str:
    return f"{case[0].name}: {' '.join(case[1])}"


@pytest.mark.parametrize("case", list(commands("areal-ray")), ids=ids)
def test_a_documented_command_line_parses_and_its_recipe_takes_the_overrides(case):
    _, words = case
    group = typer.main.get_command(app)
    with group.context_class(group) as above:
        name, command, rest = group.resolve_command(above, list(words))
        assert command is not None
        given = command.make_context(name, rest, parent=above).params
    recipe = given.get("recipe") or given.get("target")
    if recipe is not None and Path(recipe).suffix == ".yaml" and str(recipe) != RUN_OF_A_LESSON:
        load_recipe(ROOT / recipe, given.get("overrides") or ())


def test_documented_make_targets_and_modules_exist():
    rules = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    used = {words[0] for _, words in commands("make")}
    assert {"demo", "test", "lint", "bench"} <= used
    assert used <= targets
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    modules = set(re.findall(r"python -m ((?:benchmarks|docs|areal_ray)\.[\w.]+)", text))
    places = {name: ROOT / name.replace(".", "/") for name in modules}
    missing = [
        name
        for name, place in places.items()
        if not (place.with_suffix(".py").is_file() or (place / "__main__.py").is_file())
    ]
    assert modules
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_link_between_pages_leads_somewhere(page):
    text = page.read_text(encoding="utf-8")
    broken = []
    for target in LINK.findall(FENCE.sub("", text)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings as code forges make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_source_file_that_a_page_names_exists():
    missing = []
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for name in re.findall(r"`([\w/]+/[\w/]*\w+\.(?:py|yaml|md))[`:]", text):
            places = (ROOT / name, ROOT / "areal_ray" / name)
            if not any(place.is_file() for place in places):
                missing.append(f"{page.name}: {name}")
    assert not missing


def test_every_key_of_a_recipe_stands_in_the_page_made_from_the_schema():
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    assert page == recipe_page(), "python -m docs.recipe_page docs/recipes.md"
    for key in all_keys(Recipe):
        assert f"`{key.rsplit('.', 1)[-1]}`" in page or f"## {key}" in page, key


def test_the_first_recipe_of_the_readme_is_complete(tmp_path):
    python, yaml = blocks(ROOT / "README.md", "python"), blocks(ROOT / "README.md", "yaml")
    (tmp_path / "mine.py").write_text(next(text for text in python if "def tasks" in text))
    (tmp_path / "mine.yaml").write_text(yaml[0])
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert recipe.tasks is not None
    assert recipe.reward is not None
    roots = recipe.import_roots
    assert len(load_tasks(recipe.tasks, roots)) >= recipe.admission.groups_per_step
    check_agent(resolve(recipe.agent.run, roots), recipe.agent)
    check_reward(resolve(recipe.reward.score, roots), recipe.reward)
    assert len(yaml[0].splitlines()) <= 12


def test_the_examples_for_authors_load(tmp_path):
    page = ROOT / "docs/agents_and_rewards.md"
    for number, text in enumerate(blocks(page, "python")):
        compile(text, f"{page.name} {number}", "exec")
    demonstrations = next(t for t in blocks(page, "python") if "def demonstrations" in t)
    (tmp_path / "counting.py").write_text(demonstrations)
    (tmp_path / "counting.yaml").write_text(blocks(page, "yaml")[0])
    recipe = load_recipe(tmp_path / "counting.yaml")
    phase = recipe.sft.phases[0]
    examples = list(resolve(phase.source, recipe.import_roots)(**phase.args))
    assert len(examples) == 512
    assert [message["role"] for message in examples[0]] == ["user", "assistant"]
    (tmp_path / "after.py").write_text(next(t for t in blocks(page, "python") if "def pairs" in t))
    (tmp_path / "after.yaml").write_text(blocks(page, "yaml")[1])
    given = load_recipe(tmp_path / "after.yaml").preference
    pairs = list(resolve(given.source, recipe.import_roots)(**given.args))
    assert pairs[0] == ([{"role": "user", "content": "What comes after 0?"}], "1", "-1")
    assert len(pairs) == 512


def test_pages_spell_behaviour_one_way_and_name_no_place_of_ours():
    wrong = []
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"behavior|/work/|/home/|/root/|/tmp/", line, re.IGNORECASE):
                wrong.append(f"{page.name}:{number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_the_architecture_page_places_every_module_and_the_readme_every_recipe():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    package = ROOT / "areal_ray"
    modules = [p.stem for p in package.glob("*.py") if p.stem != "__init__"]
    folders = [f"{p.parent.name}/" for p in package.glob("*/__init__.py")]
    assert not [name for name in (*modules, *folders) if f"`{name}`" not in page]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    recipes = [p.relative_to(ROOT).as_posix() for p in (ROOT / "recipes").rglob("*.yaml")]
    assert not [name for name in recipes if name not in readme]
