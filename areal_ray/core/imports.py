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
    if home is not None and str(home) not in sys.path:
        # Kept on the path: the module may import its neighbours later, when it runs.
        sys.path.insert(0, str(home))
        importlib.invalidate_caches()
    target = _import(module_path, reference, roots, where)
    for part in name.split("."):
        if not hasattr(target, part):
            raise RecipeError(f"{where}: '{reference}': {_no_such_name(module_path, part, target)}")
        target = getattr(target, part)
    return target


def _holds(root: Path, module_path: str) -> bool:
    stem = root.joinpath(*module_path.split("."))
    return stem.with_suffix(".py").is_file() or (stem / "__init__.py").is_file()


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
    except (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError) as error:
        raise RecipeError(
            f"{where}: '{reference}': importing {module_path} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _no_such_name(module_path: str, part: str, target: Any) -> str:
    public = [known for known in vars(target) if not known.startswith("_")]
    near = difflib.get_close_matches(part, public, n=1)
    hint = f"Did you mean '{near[0]}'?" if near else f"It has: {', '.join(sorted(public)[:12])}."
    return f"{module_path} has no '{part}'. {hint}"
