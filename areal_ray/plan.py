"""plan: placement and preflight of a recipe, without starting anything."""

from dataclasses import dataclass

from areal_ray.actors import layout_of
from areal_ray.errors import PlacementError
from areal_ray.preflight import check_files
from areal_ray.recipe import Recipe
from areal_ray.run_folder import conflict
from areal_ray.runtime.cluster import address_of, connect, machine_nodes
from areal_ray.runtime.placement import NodeSupply, assign, table


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What would happen."""

    table: str
    """Which actor goes where; empty where they do not fit."""
    problems: tuple[str, ...]
    """All that would keep the run from starting."""


def plan_run(recipe: Recipe) -> PlannedRun:
    """Check all that the recipe names, and place its actors on the cluster or this machine."""
    problems = check_files(recipe)
    told = conflict(recipe.folder)
    problems += [] if told is None else [told]
    layout = layout_of(recipe)
    drawn = ""
    try:
        nodes = _nodes(recipe)
        drawn = table(layout, assign(layout, nodes, recipe.cluster), nodes)
    except PlacementError as error:
        problems.append(str(error))
    where = recipe.origin.name if recipe.origin is not None else "recipe"
    return PlannedRun(drawn, tuple(f"{where}: {problem}" for problem in problems))


def _nodes(recipe: Recipe) -> list[NodeSupply]:
    if address_of(recipe.cluster, recipe.scheduler) is None:
        return machine_nodes(recipe.cluster)
    connection = connect(recipe.cluster, recipe.scheduler, recipe.deadlines)
    connection.close()
    return list(connection.nodes)
