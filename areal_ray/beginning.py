"""Where a run began, written down before anybody can give it work: what it goes on from if it dies
before its first checkpoint.

Not a checkpoint: at step 0 the weights are those of `model.path`, however large, so that a record
of them is enough. What was done meanwhile is in the journals, of which nothing is forgotten: steps
are taken again, and sessions that were sealed are offered again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_ray.actors import StartPoint
from areal_ray.core.storage import replace_text
from areal_ray.engines.model_files import weights_mark
from areal_ray.errors import DataError
from areal_ray.recipe import Recipe

BEGINNING_FILE = "beginning.json"


@dataclass(frozen=True, slots=True)
class Beginning:
    """A run at step 0."""

    model: str
    """Mark of the weights in the model's folder, or the model's name where it is the hub's."""
    state: dict[str, Any]
    """As a checkpoint would have it."""


def record_beginning(recipe: Recipe, begin: StartPoint, state: Mapping[str, Any]) -> None:
    """Write down where a run begins; one that goes on has begun before.

    Raises:
        StorageError: The disk did not take it.
    """
    if begin.is_resumed:
        return
    told = {"model": _model_of(recipe), "state": state}
    replace_text(recipe.folder / BEGINNING_FILE, json.dumps(told, indent=1, allow_nan=False))


def read_beginning(folder: Path) -> Beginning | None:
    """Where the run in a folder began; None where its actors never were up.

    Raises:
        DataError: The record is damaged.
    """
    path = folder / BEGINNING_FILE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return Beginning(str(told["model"]), dict(told["state"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"resume: {path} cannot be read ({error}); must be as the run wrote it. Start the run "
            "anew with --overwrite"
        ) from error


def check_model(beginning: Beginning, recipe: Recipe) -> None:
    """Refuse other weights than those that the sessions in the journal were sampled by.

    Raises:
        DataError: The recipe's model is not the one that the run began with.
    """
    ours = _model_of(recipe)
    if ours != beginning.model:
        raise DataError(
            f"resume: model.path: {recipe.model_path} is {ours or 'without weights'}; must be "
            f"{beginning.model}, as the run began. Give it that model, or start anew with "
            "--overwrite"
        )


def _model_of(recipe: Recipe) -> str:
    folder = Path(recipe.model_path)
    return weights_mark(folder) if folder.is_dir() else recipe.model_path
