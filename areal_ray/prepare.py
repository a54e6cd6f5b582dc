"""Before the actors: where a run begins, and making the model where the recipe says how."""

import inspect
from collections.abc import Callable
from pathlib import Path

from areal_ray.actors import StartPoint
from areal_ray.checkpoint import Checkpoints
from areal_ray.core.imports import resolve
from areal_ray.errors import ArealRayError, DataError, RecipeError
from areal_ray.recipe import Recipe, absolute_path, model_recipe
from areal_ray.runtime.saving import CHECKPOINTS_FOLDER


def begin_at(recipe: Recipe, *, resume: bool, tell: Callable[[str], None]) -> StartPoint:
    """Where the run starts: its model, or its last whole checkpoint.

    Args:
        recipe: What to run.
        resume: Begin at the checkpoint.
        tell: Takes a line about what was found.

    Raises:
        DataError: There is no checkpoint to resume from.
    """
    if not resume:
        return StartPoint(absolute_path(recipe.model_path))
    found = Checkpoints(recipe.folder / CHECKPOINTS_FOLDER).latest()
    for told in found.skipped:
        tell(told)
    if found.checkpoint is None:
        raise DataError(
            f"resume: {recipe.folder} has no whole checkpoint. Start the run anew with "
            "--overwrite, and checkpoint.every_steps small enough to leave one"
        )
    state = found.checkpoint.state
    tell(f"resumes after step {state['step']}, at version {state['version']}")
    folder = str(found.checkpoint.folder.resolve())
    return StartPoint(
        folder,
        step=int(state["step"]),
        version=int(state["version"]),
        checkpoint=folder,
        state=state,
    )


def make_model(recipe: Recipe, train_first: Callable[[Recipe], None]) -> None:
    """Make the folder of `model.path` as `model.create` says, unless it is there.

    Args:
        recipe: Of the run that needs the model.
        train_first: Runs another recipe to its end.

    Raises:
        RecipeError: `create` cannot be followed, or left no model behind.
    """
    folder, create = Path(recipe.model_path), recipe.model.create
    if create is None or (folder / "config.json").exists():
        return
    if recipe.model.is_created_by_recipe:
        other = model_recipe(recipe)
        train_first(other)
    else:
        function = resolve(create, recipe.import_roots, where="model.create")
        _call(function, create, folder, recipe.seed)
    if not (folder / "config.json").exists():
        raise RecipeError(
            f"model.create: {create} left no Hugging Face checkpoint in {folder} (no config.json)"
        )


def _call(function: Callable[[Path, int], object], name: str, folder: Path, seed: int) -> None:
    try:
        inspect.signature(function).bind(folder, seed)
    except TypeError as error:
        raise RecipeError(f"model.create: {name} must take (folder, seed): {error}") from error
    try:
        function(folder, seed)
    except ArealRayError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise RecipeError(
            f"model.create: {name} failed: {type(error).__name__}: {error}"
        ) from error
