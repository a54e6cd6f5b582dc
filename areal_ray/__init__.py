"""Asynchronous reinforcement learning for LLM agents as a Ray actor graph.

Nothing heavy is imported here: `launch` and `load_recipe` load what they need when first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_ray.handle import launch
    from areal_ray.recipe import load_recipe

__all__ = ["__version__", "launch", "load_recipe"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name == "launch":
        from areal_ray.handle import launch

        globals()[name] = launch  # the import itself put the module of that name here
        return launch
    if name == "load_recipe":
        from areal_ray.recipe import load_recipe

        return load_recipe
    raise AttributeError(f"module 'areal_ray' has no attribute {name!r}")
