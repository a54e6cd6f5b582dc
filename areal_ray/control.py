"""What a run is asked for while it goes on: a file for each request in the folder `control`.

Files travel wherever the run's folder is shared; a port would have to be found and guarded.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from areal_ray.core.storage import replace_text, writing
from areal_ray.core.yaml_tree import read_tree, untyped
from areal_ray.errors import ArealRayError, DeadlineExceeded, PlacementError, RecipeError
from areal_ray.kinds import parts_of
from areal_ray.run_folder import RECIPE_FILE, read_status

SCALABLE = ("agent", "gateway", "reward", "rollout")
"""Roles whose actors may come and go; not every kind of run has each."""

_FOLDER = "control"
_ASKED, _ANSWERED = ".asked.json", ".answered.json"
_LOOK_S = 0.2
_MOST = 10_000


def read_sizes(words: Sequence[str]) -> dict[str, int]:
    """Role -> count, from words such as `agent=8`.

    Raises:
        RecipeError: No such role can be scaled, the count is none, or a role has two.
    """
    sizes: dict[str, int] = {}
    for word in words:
        role, _, count = word.partition("=")
        if role not in SCALABLE:
            raise RecipeError(
                f"scale: {role!r} cannot be scaled while a run goes on; must be one of "
                f"{', '.join(SCALABLE)}. For the learner: stop the run, and resume it with another "
                "learner.ranks."
            )
        if not count.isdecimal() or not 1 <= int(count) <= _MOST:
            raise RecipeError(
                f"scale: {word!r}: must read {role}=COUNT, COUNT a whole number from 1 to {_MOST}."
            )
        if role in sizes:
            raise RecipeError(f"scale: {role} is given twice; must be given once.")
        sizes[role] = int(count)
    return sizes


def ask_to_scale(folder: Path, sizes: Mapping[str, int], *, patience_s: float) -> str:
    """Have the run in a folder change its numbers of actors, and wait until it has.

    Args:
        folder: Of the run.
        sizes: Role -> count.
        patience_s: How long to wait.

    Returns:
        What it says of it.

    Raises:
        RecipeError: The run does not go on, or has no such actors.
        PlacementError: The cluster has no room.
        DeadlineExceeded: It did not answer in time.
    """
    if not read_status(folder).is_running:
        keys = " ".join(f"{role}.replicas={count}" for role, count in sizes.items())
        raise RecipeError(
            f"run {folder.name}: does not go on; nothing was scaled. To go on with so many: "
            f"areal-ray resume {folder.name} {keys}"
        )
    _check_kind(folder)
    name = uuid4().hex
    asked, answered = (folder / _FOLDER / (name + end) for end in (_ASKED, _ANSWERED))
    with writing(asked):
        asked.parent.mkdir(exist_ok=True)
    replace_text(asked, json.dumps(dict(sizes)))
    end = time.monotonic() + patience_s
    try:
        while not answered.exists():
            if not read_status(folder).is_running:
                raise RecipeError(f"run {folder.name}: ended before it could be scaled.")
            if time.monotonic() > end:
                raise DeadlineExceeded(
                    f"scale: {folder.name} was not done within {patience_s:g} s. `areal-ray "
                    f"status {folder.name}` tells how far it is; what it has begun goes on"
                )
            time.sleep(_LOOK_S)
        told: dict[str, str] = json.loads(answered.read_text(encoding="utf-8"))
    finally:
        asked.unlink(missing_ok=True)
        answered.unlink(missing_ok=True)
    if "error" in told:
        raise PlacementError(told["error"])
    return told["done"]


def _check_kind(folder: Path) -> None:
    """Refuse for a run that looks for no requests."""
    recipe = read_tree((folder / RECIPE_FILE).read_text(encoding="utf-8"), RECIPE_FILE)
    told = untyped(recipe)
    kind = told.get("kind", "rl")
    if parts_of(kind, has_sft=told.get("sft") is not None).loop not in ("train", "serve"):
        raise RecipeError(
            f"run {folder.name}: kind: {kind} has no actors that can be scaled while it goes on; "
            "nothing was scaled."
        )


class Requests:
    """The run's side: each request once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / _FOLDER
        self._taken: set[str] = set()

    def new(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Name and sizes of those that came since the last look."""
        if not self._folder.is_dir():
            return
        for path in sorted(self._folder.glob(f"*{_ASKED}")):
            name = path.name.removesuffix(_ASKED)
            if name in self._taken:
                continue
            self._taken.add(name)
            try:
                sizes = json.loads(path.read_text(encoding="utf-8"))
                words = [f"{role}={count}" for role, count in dict(sizes).items()]
                yield name, read_sizes(words)
            except (OSError, ValueError, TypeError) as error:  # taken back, or not of our making
                self.answer(name, error=f"{path}: cannot be read: {error}")
            except ArealRayError as error:
                self.answer(name, error=str(error))

    def answer(self, name: str, *, done: str = "", error: str = "") -> None:
        """Tell who asked what came of it; nobody may be there any more."""
        told = {"error": error} if error else {"done": done}
        replace_text(self._folder / (name + _ANSWERED), json.dumps(told))
