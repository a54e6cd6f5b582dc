"""Before the actors: where a run begins, and making the model where the recipe says how."""

import inspect
from collections.abc import Callable
from pathlib import Path

from areal_ray.assembly import StartPoint
from areal_ray.checkpoint import latest_checkpoint
from areal_ray.core.imports import resolve
from areal_ray.errors import ArealRayError, DataError, RecipeError
from areal_ray.recipe import Recipe, load_recipe

MODEL_FOLDER = "model"
"""Of a run's final Hugging Face checkpoint, in its folder."""


def begin_at(recipe: Recipe, *, resume: bool) -> StartPoint:
    """Where the run starts: its model, or its last whole checkpoint.

    Raises:
        DataError: There is no checkpoint to resume from.
    """
    if not resume:
        return StartPoint(recipe.model_path)
    found = latest_checkpoint(recipe.folder)
    if found is None:
        raise DataError(
            f"resume: {recipe.folder} has no whole checkpoint. Start the run anew, with "
            "checkpoint.every_steps above 0"
        )
    return StartPoint(
        str(found.model_folder),
        step=int(found.state["step"]),
        version=int(found.state["version"]),
        checkpoint=str(found.model_folder),
        state=dict(found.state),
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
        other = load_recipe(_beside(recipe, create), [f"seed={recipe.seed}"])
        made = other.folder / MODEL_FOLDER
        if made.resolve() != folder.resolve():
            raise RecipeError(
                f"model.create: {create} leaves its model in {made}, and model.path is {folder}; "
                "they must be the same folder. Change model.path or the other recipe's name"
            )
        train_first(other)
    else:
        function = resolve(create, recipe.import_roots, where="model.create")
        _call(function, create, folder, recipe.seed)
    if not (folder / "config.json").exists():
        raise RecipeError(
            f"model.create: {create} left no Hugging Face checkpoint in {folder} (no config.json)"
        )


def _beside(recipe: Recipe, create: str) -> Path:
    """The other recipe: from the working directory, or from where this one lies."""
    if recipe.origin is None or Path(create).exists():
        return Path(create)
    for folder in recipe.origin.resolve().parents:
        if (folder / create).exists():
            return folder / create
    return Path(create)


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
