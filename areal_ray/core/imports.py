"""Turns `package.module:name` strings of a recipe into the objects they name.

A recipe may name code that is not installed: it is looked for from each folder above the recipe
file and from the working directory, so `recipes.calculator.tasks:train` works from a fresh clone.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_ray.errors import RecipeError

_AT_IMPORT = (
    *(ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError),
    *(LookupError, OSError, RuntimeError, ArithmeticError, AssertionError),
)
"""What a module of the user's may raise while it is imported."""


def import_roots(recipe: Path | None = None) -> list[Path]:
    """Folders to resolve references from: the recipe's ancestors, then the working directory."""
    here = Path.cwd()
    above = list(recipe.resolve().parents) if recipe is not None else []
    return [*above, *([] if here in above else [here])]


def resolve(reference: str, search: Sequence[Path | str] = (), *, where: str = "reference") -> Any:
    """The object that `package.module:name` names.

    Args:
        reference: Module path and attribute; the attribute may be dotted.
        search: Folders tried as import roots, in order, before what is installed.
        where: The recipe key, for messages.

    Raises:
        RecipeError: Badly formed, no such module, the module fails to import, or no such name.
    """
    module_path, _, name = reference.partition(":")
    if not module_path or not name:
        raise RecipeError(f"{where}: '{reference}' must read 'package.module:name'.")
    roots = [Path(root) for root in search]
    home = next((root for root in roots if _holds(root, module_path)), None)
    if home is not None:
        if sys.path[:1] != [str(home)]:
            # Kept on the path, and first: the module may import its neighbours later, when it runs.
            sys.path[:] = [str(home), *(path for path in sys.path if path != str(home))]
        importlib.invalidate_caches()
        _forget_stale(module_path, home)
    target = _import(module_path, reference, roots, where)
    if home is not None:
        _remember(target)
    for part in name.split("."):
        if not hasattr(target, part):
            raise RecipeError(f"{where}: '{reference}': {_no_such_name(module_path, part, target)}")
        target = getattr(target, part)
    return target


def _holds(root: Path, module_path: str) -> bool:
    return _file_in(root, module_path) is not None


def _file_in(root: Path, module_path: str) -> Path | None:
    stem = root.joinpath(*module_path.split("."))
    files = (stem / "__init__.py", stem.with_suffix(".py"))  # in the order of Python
    return next((file for file in files if file.is_file()), None)


_loaded: dict[str, tuple[Path, int]] = {}
"""Modules of recipes in this process: file, and when that was last changed."""


def _forget_stale(module_path: str, home: Path) -> None:
    """Have a module read again where its file, or one beside it, is another or changed.

    A notebook starts run after run: what was edited since, or stands in another folder under the
    same name, would otherwise be one thing in this process and another in the actors.
    """
    file = _file_in(home, module_path)
    assert file is not None
    file = file.resolve()
    held = _loaded.get(module_path, (file, 0))[0]
    beside = [name for name, (path, _) in _loaded.items() if path.parent == held.parent]
    if held == file and all(_changed_at(_loaded[n][0]) == _loaded[n][1] for n in beside):
        beside = []
    shadowing = [  # a neighbour that this folder has under the same name
        name
        for name, (path, _) in _loaded.items()
        if "." not in name and path.parent != file.parent and (file.parent / path.name).is_file()
    ]
    for name in {*beside, *shadowing}:
        sys.modules.pop(name, None)
        del _loaded[name]


def _remember(module: Any) -> None:
    """Note a module, and what was imported from the same folder."""
    folder = Path(module.__file__).resolve().parent
    if folder.is_relative_to(Path(__file__).parents[1]):
        return  # a module of ours: it does not change
    for name, beside in list(sys.modules.items()):
        path = getattr(beside, "__file__", None)
        if path is None or name == "__main__":
            continue
        file = Path(path).resolve()
        if file.parent == folder:
            _loaded.setdefault(name, (file, _changed_at(file)))


def _changed_at(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def _import(module_path: str, reference: str, roots: Sequence[Path], where: str) -> Any:
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        missing = error.name or module_path
        if module_path == missing or module_path.startswith(missing + "."):
            looked = ", ".join(str(root) for root in roots) or "the installed packages"
            raise RecipeError(
                f"{where}: '{reference}': no module '{module_path}' under {looked}. "
                "Put its folder beside or above the recipe, or install it."
            ) from error
        raise RecipeError(
            f"{where}: '{reference}': {module_path} imports '{missing}', which is not installed. "
            f"pip install it."
        ) from error
    except (*_AT_IMPORT, SystemExit) as error:
        raise RecipeError(
            f"{where}: '{reference}': importing {module_path} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _no_such_name(module_path: str, part: str, target: Any) -> str:
    public = {name: known for name, known in vars(target).items() if not name.startswith("_")}
    near = difflib.get_close_matches(part, public, n=1)
    own = [n for n, known in public.items() if getattr(known, "__module__", "") == module_path]
    listed = ", ".join(sorted(own or public)[:12])
    hint = f"Did you mean '{near[0]}'?" if near else f"It has: {listed or 'nothing'}."
    return f"{module_path} has no '{part}'. {hint}"
