"""plan: placement and preflight of a recipe, without starting anything."""

from dataclasses import dataclass

from areal_ray.actors import layout_of
from areal_ray.errors import PlacementError
from areal_ray.gateway_access import taken_address
from areal_ray.preflight import check_files
from areal_ray.recipe import Recipe
from areal_ray.run_folder import conflict, in_use
from areal_ray.runtime.cluster import address_of, connect, machine_nodes
from areal_ray.runtime.placement import NodeSupply, assign, table


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What would happen."""

    table: str
    """Which actor goes where, and how long a step waits; empty where they do not fit."""
    problems: tuple[str, ...]
    """All that is wrong."""
    held: tuple[str, ...] = ()
    """What another run has now, often this recipe's own: a folder, a port. `train` refuses it."""


def plan_run(recipe: Recipe) -> PlannedRun:
    """Check all that the recipe names, and place its actors on the cluster or this machine."""
    problems = check_files(recipe)
    going_on = in_use(recipe.folder)
    told = conflict(recipe.folder) if going_on is None else None
    problems += [] if told is None else [told]
    held = [*([] if going_on is None else [going_on]), *taken_address(recipe, patience_s=0.0)]
    layout = layout_of(recipe)
    drawn = ""
    try:
        nodes = _nodes(recipe)
        drawn = table(layout, assign(layout, nodes, recipe.cluster), nodes) + _patience(recipe)
    except PlacementError as error:
        problems.append(str(error))
    where = recipe.origin.name if recipe.origin is not None else "recipe"
    told_all = [tuple(f"{where}: {line}" for line in lines) for lines in (problems, held)]
    return PlannedRun(drawn, *told_all)


def _patience(recipe: Recipe) -> str:
    """A line on the one deadline whose default depends on the kind."""
    if recipe.parts.loop != "train":
        return ""
    limit_s = recipe.deadlines.groups_limit_s(is_online=recipe.parts.serves)
    told = "as long as it takes" if limit_s is None else f"{limit_s:g} s"
    return f"\na step waits for its groups {told} (deadlines.groups_s)"


def _nodes(recipe: Recipe) -> list[NodeSupply]:
    if address_of(recipe.cluster, recipe.scheduler) is None:
        return machine_nodes(recipe.cluster)
    connection = connect(recipe.cluster, recipe.scheduler, recipe.deadlines)
    connection.close()
    return list(connection.nodes)
