"""Before the actors: where a run begins, and making the model where the recipe says how."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from areal_ray.actors import StartPoint
from areal_ray.beginning import check_model, read_beginning
from areal_ray.checkpoint import STATE_FORMAT, Checkpoints
from areal_ray.engines.lora_config import ADAPTER_FOLDER
from areal_ray.errors import DataError, DeadlineExceeded, RecipeError
from areal_ray.model_function import is_made, make_apart
from areal_ray.recipe import Recipe, absolute_path, model_recipe
from areal_ray.run_folder import FolderInUse, RunFolder
from areal_ray.runtime.saving import CHECKPOINTS_FOLDER


def begin_at(recipe: Recipe, *, resume: bool, tell: Callable[[str], None]) -> StartPoint:
    """Where the run starts: its model, or its last whole checkpoint.

    Args:
        recipe: What to run.
        resume: Begin at the checkpoint, or at step 0 where the run did not live to write one.
        tell: Takes a line about what was found.

    Raises:
        DataError: There is nothing to resume from, or it is not this run's.
    """
    if not resume:
        return StartPoint(absolute_path(recipe.model_path))
    found = Checkpoints(recipe.folder / CHECKPOINTS_FOLDER).latest()
    for told in found.skipped:
        tell(told)
    if found.checkpoint is None:
        # Damaged ones hold steps whose sessions nobody has any more: step 0 would lose those.
        beginning = None if found.skipped else read_beginning(recipe.folder)
        if beginning is None:
            raise DataError(
                f"resume: {recipe.folder} has no whole checkpoint. Start the run anew with "
                "--overwrite, and checkpoint.every_steps small enough to leave one"
            )
        _check_state(beginning.state, recipe)
        check_model(beginning, recipe)
        tell("resumes at step 0: it ended before its first checkpoint")
        return StartPoint(absolute_path(recipe.model_path), state=beginning.state, is_resumed=True)
    state = found.checkpoint.state
    _check_state(state, recipe)
    version = f", at version {state['version']}" if recipe.parts.has_versions else ""
    tell(f"resumes after step {state['step']}{version}")
    folder = str(found.checkpoint.folder.resolve())
    _check_adapters(recipe, found.checkpoint.folder)
    return StartPoint(
        # Adapters are all that a checkpoint of them holds: the model they belong to stays.
        folder if recipe.model.lora is None else absolute_path(recipe.model_path),
        step=int(state["step"]),
        version=int(state["version"]),
        checkpoint=folder,
        state=state,
        is_resumed=True,
    )


def _check_state(state: Mapping[str, Any], recipe: Recipe) -> None:
    written = state.get("format", 1)
    if written != STATE_FORMAT:
        raise DataError(
            f"resume: what {recipe.folder} goes on from is of format {written}; this release of "
            f"areal_ray reads {STATE_FORMAT}. Resume with the release that wrote it, or start a "
            "new run with model.path at the newest folder in its checkpoints/"
        )
    drawn = {**state.get("tasks", {}), **state.get("rows", {})}
    if drawn.get("seed", recipe.seed) != recipe.seed:
        raise DataError(
            f"resume: seed: is {recipe.seed}; must be {drawn['seed']}, which the order of what was "
            "trained on hangs on. Resume with that, or start a new run"
        )


def _check_adapters(recipe: Recipe, checkpoint: Path) -> None:
    has_adapters = (checkpoint / ADAPTER_FOLDER).is_dir()
    if has_adapters == (recipe.model.lora is not None):
        return
    one, other = ("adapters", "null") if has_adapters else ("all weights", "given")
    raise DataError(
        f"resume: {checkpoint} holds {one}, and model.lora is {other}; a run goes on as it began. "
        "Leave model.lora as it was, or start a new run from the model that this one leaves"
    )


def make_model(
    recipe: Recipe,
    train_first: Callable[[Recipe, RunFolder], None],
    *,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> None:
    """Make the folder of `model.path` as `model.create` says, unless it is there.

    Where another run is making it, wait for that one and use what it made.

    Args:
        recipe: Of the run that needs the model.
        train_first: Runs another recipe to its end, in the folder held for it.
        tell: Takes a line about what is waited for.
        check: Called while it waits; what it raises ends the wait.

    Raises:
        RecipeError: `create` cannot be followed, or left no model behind.
        DeadlineExceeded: The other run did not end in time.
    """
    folder, create = Path(recipe.model_path), recipe.model.create
    if create is None or is_made(folder):
        return
    if not recipe.model.is_created_by_recipe:
        tell(f"{folder} is missing: {create} makes it")
        make_apart(create, folder, recipe.seed, search=recipe.import_roots, check=check)
        return
    other = model_recipe(recipe)
    held = _hold(other, recipe.deadlines.model_s, tell, check)
    if is_made(folder):  # by the run that was waited for
        held.release()
        return
    tell(f"{folder} is missing: training {other.run_name}")
    train_first(other, held)
    if not is_made(folder):
        raise RecipeError(
            f"model.create: {create} left no Hugging Face checkpoint in {folder} (no config.json)"
        )


def _hold(
    maker: Recipe, limit_s: float, tell: Callable[[str], None], check: Callable[[], None]
) -> RunFolder:
    """The folder of the run that makes a model, once no other process holds it."""
    end = time.monotonic() + limit_s
    is_told = False
    while True:
        check()
        try:
            return RunFolder.hold(maker.folder)
        except FolderInUse:
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"model.create: the run {maker.run_name} in {maker.folder}, which makes the "
                    f"model, has gone on in another process for deadlines.model_s = {limit_s:g} s. "
                    "Raise it, or stop that run"
                ) from None
        if not is_told:
            tell(f"waiting for {maker.run_name}, which another process runs: it makes the model")
            is_told = True
