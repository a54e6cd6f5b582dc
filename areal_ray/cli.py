"""The command line: each command parses, calls and prints; its help is its docstring.

Exit codes: 0 done, 1 the run failed, 2 the recipe or the placement is wrong and nothing was
started, 130 stopped by Ctrl-C (143 by SIGTERM). Nothing heavy is imported before a command needs
it.
"""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from areal_ray.errors import ArealRayError, RecipeError
from areal_ray.telemetry.log import redact, secret_values
from areal_ray.telemetry.terminal import say

if TYPE_CHECKING:
    from areal_ray.recipe import Recipe

DEMO_RECIPE = Path("recipes/calculator/grpo.yaml")

_TRACE = "--trace"

app = typer.Typer(
    name="areal-ray",
    help="Asynchronous reinforcement learning for LLM agents as a Ray actor graph.",
    epilog=f"{_TRACE} anywhere on the line shows the whole trace of an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Recipe keys to change, as rollout.replicas=2."),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or name of a run.")]
Fileroot = Annotated[str, typer.Option(help="Folder of the run folders, to find RUN by its name.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run of this name.")]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the whole recipe as it would run, and stop.")
]


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    overwrite: Overwrite = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the run folder.")
    ] = False,
    print_config: PrintConfig = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try it out: tiny random model, a few rows, two steps.")
    ] = False,
) -> None:
    """Run a recipe to its end: a table while it goes, then a summary and a report."""
    from areal_ray.recipe import load_recipe

    if smoke:
        from areal_ray.smoke import load_to_smoke, smoke_recipe

        loaded = load_to_smoke(recipe, overrides or ())
        loaded = smoke_recipe(loaded, overrides or (), tell=_complain)
        overwrite = not resume  # nobody misses the one before
    else:
        loaded = load_recipe(recipe, overrides or ())
    _go(loaded, overwrite=overwrite, resume=resume, print_config=print_config)


@app.command()
def serve(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|inference", help="Recipe file, or that word.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL_PATH] KEY=VALUE",
            help="After inference the model; then recipe keys to change, as rollout.replicas=2.",
        ),
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="Answer without a key (inference, loopback alone).")
    ] = False,
    overwrite: Overwrite = False,
    print_config: PrintConfig = False,
) -> None:
    """Serve a model over the APIs of OpenAI and Anthropic; print once where and with which key.

    `serve RECIPE` of kind online trains it from the agents that call; AREAL_RAY_ADMIN_KEY may give
    the key. `serve inference MODEL_PATH`, or a recipe of that kind, only answers; AREAL_RAY_API_KEY
    may give the key.
    """
    from areal_ray.serving import served_recipe

    recipe = served_recipe(target, [*(words or ()), *(["gateway.no_key=true"] if no_key else [])])
    # A run that only answers leaves nothing that somebody would miss.
    overwrite = overwrite or not recipe.parts.trains
    _go(recipe, overwrite=overwrite, resume=False, print_config=print_config)


@app.command(name="eval")
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RECIPE|RUN", help="Recipe file, or a run to score.")
    ],
    overrides: Overrides = None,
    fileroot: Fileroot = "runs",
    print_config: PrintConfig = False,
) -> None:
    """Score a recipe's model, or the last weights of a run, on the held-out tasks."""
    from areal_ray.recipe import evaluation_of, load_recipe
    from areal_ray.run_folder import RECIPE_FILE, find_run

    if target.endswith((".yaml", ".yml")):
        recipe = evaluation_of(load_recipe(target), None, overrides or ())
    else:
        folder = find_run(target, fileroot)
        trained = load_recipe(folder / RECIPE_FILE)
        if trained.evaluation is None and not overrides:
            raise RecipeError(
                f"{folder}: was trained without held-out tasks (kind: {trained.kind}, no "
                "evaluation), so there is nothing to score it on. Name a recipe that has "
                f"evaluation and reward: areal-ray eval RECIPE model.path={folder / 'model'}"
            )
        recipe = evaluation_of(trained, folder, overrides or ())
    _go(recipe, overwrite=True, resume=False, print_config=print_config)


@app.command()
def resume(run: Run, overrides: Overrides = None, fileroot: Fileroot = "runs") -> None:
    """Go on with a run from its last checkpoint, or from its beginning where it has none."""
    from areal_ray.recipe import load_recipe
    from areal_ray.run_folder import RECIPE_FILE, find_run

    folder = find_run(run, fileroot)
    if folder.name in ("", ".."):
        folder = folder.resolve()
    changes = [f"cluster.fileroot={folder.parent}", *(overrides or ())]
    recipe = load_recipe(folder / RECIPE_FILE, changes)
    if recipe.folder.resolve() != folder.resolve():  # renamed or copied since
        recipe = load_recipe(folder / RECIPE_FILE, [*changes, f"name={folder.name}"])
    _go(recipe, overwrite=False, resume=True, print_config=False)


@app.command()
def demo(
    overrides: Overrides = None,
    recipe: Annotated[Path, typer.Option(help="Recipe to show.")] = DEMO_RECIPE,
) -> None:
    """Warm up a small model and let it learn to use a calculator, in a minute or two."""
    from areal_ray.recipe import load_recipe

    clone = Path(__file__).resolve().parents[1]
    here = recipe if recipe.exists() else clone / recipe
    if recipe == DEMO_RECIPE and not here.exists():
        raise RecipeError(
            f"demo: there is no {recipe} here; it comes with the repository, not with the package. "
            "Run it in a clone"
        )
    _go(load_recipe(here, overrides or ()), overwrite=True, resume=False, print_config=False)


@app.command()
def plan(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Show which actor goes where and all that is wrong; start nothing."""
    from areal_ray.plan import plan_run
    from areal_ray.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    planned = plan_run(loaded)
    for caution in loaded.cautions:
        _complain(f"caution: {caution}")
    if planned.table:
        say(planned.table)
    if planned.problems:
        _complain("\n".join(planned.problems))
        raise typer.Exit(2)
    for line in planned.held:
        _complain(f"taken now: {line}")
    ready = "ready once that is free" if planned.held else "ready"
    verb = "serve" if loaded.parts.serves else "train"
    say(f"{ready}: areal-ray {verb} " + shlex.join([str(recipe), *(overrides or ())]))


@app.command()
def status(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="One run; else all.")] = None,
    fileroot: Fileroot = "runs",
) -> None:
    """Tell what a run does now and what it waits for, or list all runs."""
    from areal_ray.run_folder import find_run, run_folders
    from areal_ray.run_listing import describe_run, list_runs

    if run is not None:
        say(describe_run(find_run(run, fileroot)))
    else:
        say(list_runs(run_folders(fileroot)) or f"no runs in {fileroot}/")


@app.command()
def scale(
    run: Run,
    sizes: Annotated[list[str], typer.Argument(metavar="ROLE=COUNT", help="As agent=8.")],
    fileroot: Fileroot = "runs",
    patience_s: Annotated[float, typer.Option(help="How long to wait for it.")] = 600.0,
) -> None:
    """Change how many agent, gateway, reward or rollout actors a run has, while it goes on."""
    from areal_ray.control import ask_to_scale, read_sizes
    from areal_ray.run_folder import find_run

    asked = read_sizes(sizes)
    say(ask_to_scale(find_run(run, fileroot), asked, patience_s=patience_s))


@app.command()
def report(run: Run, fileroot: Fileroot = "runs") -> None:
    """Write report.html anew from the records of a run, and print its summary."""
    from areal_ray.run_folder import find_run
    from areal_ray.run_listing import describe_run
    from areal_ray.telemetry.report import write_report

    folder = find_run(run, fileroot)
    path = write_report(folder)
    say(describe_run(folder))
    say(f"report   {path}")


@app.command()
def lineage(
    version: Annotated[int, typer.Argument(metavar="VERSION", min=0, help="0 = as it began.")],
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Default: the newest.")] = None,
    fileroot: Fileroot = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Tell which groups, and which sessions of agents, shaped a version of the weights."""
    from dataclasses import asdict

    from areal_ray.run_folder import find_run, run_folders
    from areal_ray.run_listing import describe_lineage, read_lineage

    newest = [] if run else run_folders(fileroot)[:1]
    folder = newest[0] if newest else find_run(run or "newest", fileroot)
    found = read_lineage(folder, version)
    told = json.dumps({"run": folder.name, **asdict(found)}, indent=2)
    say(told if as_json else describe_lineage(folder, found))


@app.command()
def schema(
    output: Annotated[Path | None, typer.Option(help="File to write; else printed.")] = None,
) -> None:
    """Print the JSON schema of a recipe, for editors that complete and check YAML."""
    from areal_ray.recipe import recipe_schema

    text = json.dumps(recipe_schema(), indent=2)
    if output is None:
        say(text)
        return
    _write(output, text, "--output")
    say(f"written: {output}")


@app.command()
def load(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Of the server, as agents are given it.")
    ],
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at a time.")] = 64,
    requests: Annotated[int | None, typer.Option(min=1, help="In all [10 x concurrency].")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Send for so long.")] = None,
    dialect: Annotated[
        Literal["chat", "responses", "messages"], typer.Option(help="Whose API to call.")
    ] = "chat",
    stream: Annotated[bool, typer.Option("--stream/--no-stream")] = True,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a reply.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, about.")] = 32,
    model: Annotated[str, typer.Option(help="Default: the first that the server lists.")] = "",
    api_key_env: Annotated[str, typer.Option(help="Variable that holds the server's key.")] = "",
    ask_api_key: Annotated[bool, typer.Option("--ask-api-key", help="Ask for the key.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to write the figures to.")
    ] = None,
) -> None:
    """Put load on a model server, this gateway or any, and tell how it bears it."""
    import asyncio
    from dataclasses import asdict

    from areal_ray.gateway.load import LoadPlan, load_table, measure_load
    from areal_ray.telemetry.load_table import print_load

    if requests is None and seconds is None:
        requests = 10 * concurrency
    if api_key_env and api_key_env not in os.environ:
        raise RecipeError(f"--api-key-env: {api_key_env} is not set. Set it to the server's key")
    key = os.environ[api_key_env] if api_key_env else ""
    if ask_api_key:
        key = typer.prompt("key", hide_input=True)
    asked = LoadPlan(
        url=url,
        dialect=dialect,
        concurrency=concurrency,
        num_requests=requests,
        seconds=seconds,
        is_streamed=stream,
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        model=model,
    )
    found = asyncio.run(measure_load(asked, key))
    print_load(load_table(asked, found), sys.stdout)
    if json_file is not None:
        _write(json_file, json.dumps({"plan": asdict(asked), **asdict(found)}, indent=2), "--json")
    if not found.num_answered:
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    from areal_ray import __version__

    say(f"areal-ray {__version__}")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends the process with the exit code of the outcome."""
    words = list(sys.argv[1:] if argv is None else argv)
    has_trace = _TRACE in words
    # A console script has its own folder on the path, and `python -m` has this one: recipes name
    # code beside the working directory either way.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not has_trace:
        sys.excepthook = _tell_defect
    try:
        # Not app() itself, which would put an excepthook of its own in place.
        run = typer.main.get_command(app)
        run(args=[word for word in words if word != _TRACE], prog_name="areal-ray")
    except ArealRayError as error:
        if has_trace:
            raise
        _complain(str(error))
        sys.exit(error.exit_code)


def _go(recipe: "Recipe", *, overwrite: bool, resume: bool, print_config: bool) -> None:
    if print_config:
        say(recipe.to_yaml().removesuffix("\n"))
        return
    from areal_ray.preflight import preflight

    preflight(recipe, resume=resume, overwrite=overwrite)  # tells before the heavy imports

    from areal_ray.following import follow, stops_pending
    from areal_ray.handle import launch

    with stops_pending():
        handle = launch(recipe, resume=resume, overwrite=overwrite, is_checked=True)
        raise typer.Exit(follow(handle, tell=say, complain=_complain))


def _tell_defect(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """What is not an error of the user is one of ours: say so, and how to see more."""
    _complain(f"{kind.__name__}: {error}")
    _complain(f"This is a defect of areal-ray. The same command with {_TRACE} shows where.")


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RecipeError(
            f"{option}: {path} cannot be written ({error.strerror}). Choose another file."
        ) from error


def _complain(text: str) -> None:
    say(redact(text, secret_values(os.environ)), sys.stderr)


if __name__ == "__main__":
    main()
