"""The head of a run's display."""

from areal_ray.actors import StartPoint
from areal_ray.recipe import Recipe
from areal_ray.telemetry.views import Header


def header_of(recipe: Recipe, steps: int, begin: StartPoint) -> Header:
    """What is told of a run as it starts, from its recipe and the step it begins at."""
    return Header(
        name=recipe.run_name,
        kind=recipe.kind,
        total_steps=steps,
        first_step=begin.step,
        folder=str(recipe.folder),
        facts=_facts(recipe, begin),
    )


def _facts(recipe: Recipe, begin: StartPoint) -> dict[str, str]:
    facts = {"model": begin.model_path, "seed": str(recipe.seed)}
    if recipe.model.lora is not None:
        facts["adapters"] = recipe.model.lora.described
    if recipe.parts.loop == "serve":
        replicas = f"{recipe.rollout.replicas} rollout, {recipe.gateway.replicas} gateway"
        facts |= {"engine": recipe.rollout.engine.kind, "actors": replicas}
    if recipe.parts.loop == "train" and recipe.admission is not None:
        admission = recipe.admission
        facts["step"] = f"{admission.groups_per_step} groups x {admission.n_samples} episodes"
        facts["staleness"] = (
            f"at most {admission.max_head_offpolicyness} versions, then {admission.at_consumption}"
        )
        facts["objective"] = recipe.objective.kind
        if recipe.evaluation is not None:
            facts["evaluation"] = recipe.evaluation.described(recipe.rollout.sampling)
        agents = recipe.gateway if recipe.parts.serves else recipe.agent
        facts["actors"] = (
            f"{recipe.rollout.replicas} rollout, {recipe.learner.ranks} learner, "
            f"{agents.replicas} {'gateway' if recipe.parts.serves else 'agent'}, "
            f"{recipe.scoring.replicas if recipe.scoring else 0} reward"
        )
    return facts
