"""Preflight: all that can be known to be wrong before Ray starts, told at once.

The recipe itself is already checked; here the files, the folders and the code that it names are.
`areal-ray plan` shows the result, and every run begins with it.
"""

import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from areal_ray.agent_check import check_agent_section, unwritable_task
from areal_ray.agents.task_stream import TasksConfig, fit_prompts, load_tasks
from areal_ray.core.context_window import LARGEST_TOKENS
from areal_ray.core.imports import resolve
from areal_ray.core.task import Task, sending_problem
from areal_ray.core.typed_yaml import untyped_values
from areal_ray.engines.deepspeed_settings import deepspeed_problem
from areal_ray.engines.model_files import token_difference
from areal_ray.engines.reward_model import has_score_head
from areal_ray.engines.vllm_arguments import parser_problems, vllm_problems
from areal_ray.errors import ArealRayError, RecipeError
from areal_ray.gateway.messages import canonical
from areal_ray.gateway_access import gateway_problems, taken_address
from areal_ray.model_check import (
    checkpoint_problems,
    lora_problems,
    rank_problems,
    read_model_config,
)
from areal_ray.model_function import check_function
from areal_ray.recipe import REWARD_MODEL, Recipe, model_recipe
from areal_ray.rewards.reward import check_reward
from areal_ray.row_check import check_conversation, check_pair, check_rows
from areal_ray.run_folder import conflict, in_use
from areal_ray.runtime.run_config import is_hub_name
from areal_ray.telemetry.log import REDACTED
from areal_ray.telemetry.summary import read_summary

_HUB_TIMEOUT_S = 3.0
_REWARD_PATH = "reward.args.path"
_NOT_THE_USERS = (
    str(Path(__file__).parent),
    *(path for name, path in sysconfig.get_paths().items() if name.endswith("lib")),
    "<",
)
"""Where code lies that a recipe did not bring: ours, the standard library, what is installed."""


def preflight(recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> None:
    """Check what the recipe names.

    Raises:
        RecipeError: all that is wrong, one line each.
    """
    problems = [*check_files(recipe), *taken_address(recipe)]
    told = in_use(recipe.folder)
    if told is None:
        told = _done(recipe) if resume else conflict(recipe.folder, overwrite=overwrite)
    problems += [] if told is None else [told]
    if problems:
        where = recipe.origin.name if recipe.origin is not None else "recipe"
        raise RecipeError("\n".join(f"{where}: {problem}" for problem in problems))


def _done(recipe: Recipe) -> str | None:
    """Why there is nothing to resume; None where there is."""
    summary = read_summary(recipe.folder) or {}
    steps, key = recipe.steps, "steps"
    if recipe.preference is not None:
        steps, key = recipe.preference.steps, "preference.steps"
    if summary.get("outcome") != "finished" or recipe.parts.loop == "fit":
        return None
    done = summary.get("steps")
    if not isinstance(done, int) or done < steps:
        return None
    return (
        f"{key}: is {steps}; {recipe.folder} is finished and has taken {done}. "
        f"To go on give it more, as {key}={done + 10}."
    )


def check_files(recipe: Recipe) -> list[str]:
    """What is wrong with the files, folders and code that the recipe names; empty = nothing."""
    problems: list[str] = []
    checks: list[Callable[[], Iterable[str]]] = [
        lambda: _secret_problems(untyped_values(recipe)),
        lambda: _fileroot_problems(recipe),
        lambda: _model_and_adapter_problems(recipe),
        lambda: _companion_problems(recipe),
        lambda: _engine_problems(recipe),
        lambda: _code_problems(recipe),
        lambda: _task_problems(recipe),
    ]
    for check in checks:
        problems += check()
    return problems


def _secret_problems(value: Any, key: str = "") -> Iterator[str]:
    """Values of a saved recipe that were secrets when it was saved."""
    if isinstance(value, str) and REDACTED in value:
        yield (
            f"{key}: is {value!r}, what a saved recipe has in place of a secret of the "
            f"environment. Give it again: {key}=VALUE."
        )
    parts = dict(enumerate(value)) if isinstance(value, list) else value
    for name, item in parts.items() if isinstance(parts, dict) else ():
        yield from _secret_problems(item, f"{key}.{name}" if key else str(name))


def _fileroot_problems(recipe: Recipe) -> Iterator[str]:
    folder = Path(recipe.cluster.fileroot)
    above = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=above):
            pass
    except OSError as error:
        yield (
            f"cluster.fileroot: is {folder}; {above} cannot be written ({error.strerror}). "
            "Choose another folder."
        )


def _model_and_adapter_problems(recipe: Recipe) -> Iterator[str]:
    wrong = list(_model_problems(recipe))
    yield from wrong
    if recipe.model.lora is not None:
        folder = Path(recipe.model_path)
        is_read = not wrong and (folder / "config.json").is_file()
        yield from lora_problems(recipe.model.lora, folder if is_read else None)


def _model_problems(recipe: Recipe) -> Iterator[str]:
    path = Path(recipe.model_path)
    if (path / "config.json").is_file():
        yield from checkpoint_problems(path, "model.path", needs_tokenizer=True)
        return
    if path.is_dir() and any(path.iterdir()):
        yield f"model.path: {path} holds no config.json; must be a Hugging Face checkpoint."
        return
    if recipe.model.create is not None:
        yield from _create_problems(recipe)
        return
    if path.exists() or not recipe.model.may_be_hub_name or not _is_on_hub(recipe.model_path):
        yield (
            f"model.path: {recipe.model_path!r} is no checkpoint folder here, and no model that "
            "the Hugging Face hub answers for. Check the path, or set model.create."
        )


def _companion_problems(recipe: Recipe) -> Iterator[str]:
    """Reference, teacher, critic and reward model: there, and of the policy's vocabulary."""
    for where, said, path in _companions(recipe):
        if said == recipe.model.path and where != _REWARD_PATH:
            continue  # the policy's own start
        folder = Path(path)
        if recipe.model.create is not None and folder.is_relative_to(recipe.model_path):
            continue  # made with the model
        if (folder / "config.json").is_file():
            yield from checkpoint_problems(folder, where)
            yield from _vocabulary_problems(recipe, folder, where)
            if where == _REWARD_PATH:
                yield from _caught(where, lambda folder=folder: _require_head(folder))  # type: ignore[misc]
        elif folder.exists() or not is_hub_name(said) or not _is_on_hub(path):
            yield (
                f"{where}: {path!r} is no checkpoint folder here, and no model that the Hugging "
                "Face hub answers for. Check the path."
            )


def _engine_problems(recipe: Recipe) -> Iterator[str]:
    engine = recipe.rollout.engine
    if recipe.parts.samples:
        yield from _window_problems(recipe)
        yield from parser_problems(recipe.agent.tool_parser)
    yield from gateway_problems(recipe)
    if recipe.parts.samples and engine.kind == "vllm":
        yield from vllm_problems(engine, read_model_config(Path(recipe.model_path)))
    problem = deepspeed_problem() if recipe.learner.engine.kind == "deepspeed" else None
    if recipe.parts.trains and problem is not None:
        yield f"learner.engine.kind: {problem}"
    if recipe.parts.trains:
        companions = (path for _, _, path in _companions(recipe))
        yield from rank_problems(
            recipe.learner.engine,
            [Path(path) for path in dict.fromkeys([recipe.model_path, *companions])],
            has_adapters=recipe.model.lora is not None,
        )


def _window_problems(recipe: Recipe) -> Iterator[str]:
    from areal_ray.gateway.template import said_context_tokens

    allowed = said_context_tokens(Path(recipe.model_path))
    wanted = recipe.rollout.engine.max_context_tokens
    if 0 < allowed < wanted:
        yield (
            f"rollout.engine.max_context_tokens: is {wanted}; must be at most {allowed}, what "
            "model.path allows. Lower it, or set 0 for that."
        )


def _companions(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Key, and path as said and as placed, of each model beside the policy that has one."""
    for name in ("reference", "teacher", "critic"):
        section = getattr(recipe, name)
        if section is not None and section.path is not None:
            yield f"{name}.path", section.path, getattr(recipe.companions, f"{name}_path")
    reward = recipe.reward
    if reward is not None and reward.score == REWARD_MODEL and "path" in reward.args:
        yield _REWARD_PATH, str(reward.args["path"]), str(reward.args["path"])


def _require_head(folder: Path) -> None:
    if not has_score_head(folder):
        raise RecipeError(
            f"{_REWARD_PATH}: {folder} has no tensor score.weight, so every score would be 0; must "
            "be a reward model. A run of kind: reward_model leaves one."
        )


def _vocabulary_problems(recipe: Recipe, folder: Path, where: str) -> Iterator[str]:
    policy = Path(recipe.model_path)
    difference = token_difference(policy, folder)
    if difference:
        yield (
            f"{where}: {folder} reads {difference}; must have the tokenizer of model.path, since "
            "both read the same token ids. Use a model of the same family."
        )
        return
    own, other = _vocabulary_size(policy), _vocabulary_size(folder)
    # With the same tokenizer the rest of a larger embedding is padding (Qwen2.5 7B and 1.5B).
    is_padded = difference == "" and own is not None and other is not None and other > own
    if own is not None and other is not None and own != other and not is_padded:
        least = "at least " if difference == "" else ""
        yield (
            f"{where}: {folder} has a vocabulary of {other} tokens; must be {least}{own}, that of "
            "model.path, since both read the same token ids. Use a model of the same family."
        )


def _vocabulary_size(folder: Path) -> int | None:
    """None where the config does not say, or is not there yet."""
    config = read_model_config(folder)
    if isinstance(config, str):
        return None
    text = config.get("text_config")
    size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None


def _create_problems(recipe: Recipe) -> Iterator[str]:
    create = recipe.model.create
    assert create is not None
    if not recipe.model.is_created_by_recipe:
        yield from _caught("model.create", lambda: check_function(create, recipe.import_roots))
        return
    try:
        maker = model_recipe(recipe)
    except ArealRayError as error:
        yield from str(error).splitlines()
        return
    yield from (f"{Path(create).name}: {told}" for told in check_files(maker))


def _code_problems(recipe: Recipe) -> Iterator[str]:
    roots = recipe.import_roots
    if recipe.parts.samples and (recipe.evaluation is not None or not recipe.parts.serves):
        yield from _caught("agent", lambda: check_agent_section(recipe.agent, roots))
    reward = recipe.reward
    if reward is not None:
        yield from _caught(
            "reward",
            lambda: check_reward(resolve(reward.score, roots, where="reward.score"), reward),
        )
    for i, phase in enumerate(recipe.sft.phases if recipe.sft is not None else ()):
        where, until = f"sft.phases.{i}", phase.until
        yield from _row_problems(recipe, check_conversation, where, phase.source, phase.args)
        if until is not None:
            source = until.source or phase.source
            yield from _row_problems(
                recipe, check_conversation, f"{where}.until", source, until.args
            )
    pairs = recipe.preference
    if pairs is not None:
        yield from _row_problems(recipe, check_pair, "preference", pairs.source, pairs.args)
        if pairs.held_out is not None:
            source, args = pairs.held_out.source or pairs.source, pairs.held_out.args
            yield from _row_problems(recipe, check_pair, "preference.held_out", source, args)


def _row_problems(
    recipe: Recipe, check: Callable[[Any], None], where: str, source: str, args: dict[str, Any]
) -> list[str]:
    return _caught(where, lambda: check_rows(where, source, args, recipe.import_roots, check))


def _task_problems(recipe: Recipe) -> Iterator[str]:
    sections: list[tuple[str, TasksConfig]] = []
    if recipe.tasks is not None:
        sections.append(("tasks", recipe.tasks))
    if recipe.evaluation is not None:
        sections.append(("evaluation.tasks", recipe.evaluation.tasks))
    loaded: list[tuple[str, TasksConfig, list[Task]]] = []
    for where, tasks in sections:
        yield from _caught(
            where,
            lambda where=where, tasks=tasks: loaded.append(  # type: ignore[misc]
                (where, tasks, load_tasks(tasks, recipe.import_roots, where=where))
            ),
        )
    for where, config, given in loaded:
        source = f"{where}.source: {config.source}"
        yield from _message_problems(source, given)
        yield from _sending_problems(source, given)
        told = unwritable_task(recipe.agent, given) if recipe.parts.samples else None
        if told is not None:
            yield f"{source}: {told}."
    if loaded and (Path(recipe.model_path) / "config.json").is_file():  # else nothing to count with
        yield from _caught("model.path", lambda: _count(recipe, loaded))


def _message_problems(where: str, tasks: Sequence[Task]) -> list[str]:
    """The first message that no prompt could be made of."""
    for row, task in enumerate(tasks):
        try:
            for index, message in enumerate(task.messages):
                canonical(message, index)["content"].encode()
        except (ValueError, AttributeError) as error:  # of which UnicodeError is one
            return [f"{where}: row {row} ('{task.id}'): {error}"]
    return []


def _sending_problems(where: str, tasks: Sequence[Task]) -> Iterator[str]:
    """The first task that no actor could be sent."""
    if sending_problem(tasks) is None:
        return
    # Ray's own pickling takes more (lambdas, local classes), but importing it takes seconds.
    from areal_ray.runtime.fleet import unsendable_task

    told = unsendable_task(tasks)
    if told is not None:
        yield f"{where}: {told}."


def _count(recipe: Recipe, loaded: list[tuple[str, TasksConfig, list[Task]]]) -> None:
    from areal_ray.gateway.template import prompt_counter, said_context_tokens

    said = said_context_tokens(Path(recipe.model_path))
    window = recipe.rollout.engine.max_context_tokens or min(said, LARGEST_TOKENS)
    count = prompt_counter(recipe.model_path)
    for where, config, tasks in loaded:
        fit_prompts(tasks, config, count, window_tokens=window, where=where)


def _caught(where: str, check: Callable[[], Any]) -> list[str]:
    """Run user code or a check of it; its failure is a line of the report."""
    try:
        check()
    except ArealRayError as error:
        return str(error).splitlines()
    except (Exception, SystemExit) as error:  # user code may raise anything
        told = str(error).strip().splitlines() or [""]
        return [f"{where}: raised {type(error).__name__}: {told[0]}{_place(error)}"]
    return []


def _place(error: BaseException) -> str:
    """The last line of the user's code that an error came through; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _is_on_hub(name: str) -> bool:
    """Whether the hub's cache on this machine, or the hub itself, has the model."""
    from huggingface_hub import model_info, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return True
    try:
        model_info(name, timeout=_HUB_TIMEOUT_S)
    except Exception:  # whatever the hub's client and its transports raise: not to be had now
        return False
    return True
