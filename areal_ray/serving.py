"""What `areal-ray serve` runs: a recipe that serves, or kind inference around a model alone."""

from collections.abc import Sequence

from areal_ray.core.yaml_tree import write_yaml
from areal_ray.errors import RecipeError
from areal_ray.recipe import Recipe, load_recipe, parse_recipe

INFERENCE = "inference"

_MOST_NEW_TOKENS = 8192
"""Of a reply, where its context leaves that many."""


def served_recipe(target: str, words: Sequence[str]) -> Recipe:
    """The recipe to serve.

    Args:
        target: A recipe file, or `inference`.
        words: `key=value` overrides; after `inference` the model's folder or hub name before them.

    Raises:
        RecipeError: All that is wrong with it, one line each.
    """
    if target != INFERENCE:
        recipe = load_recipe(target, words)
        if not recipe.parts.serves:
            raise RecipeError(
                f"kind: is {recipe.kind}; must be online or inference to be served. Use areal-ray "
                "train for others."
            )
        return recipe
    if not words or "=" in words[0].partition("/")[0]:
        raise RecipeError(
            "serve inference: MODEL_PATH is missing; must be a checkpoint folder or a name on the "
            "Hugging Face hub. As: areal-ray serve inference MODEL_PATH rollout.replicas=2"
        )
    path, *overrides = words
    text = write_yaml(
        {
            "kind": INFERENCE,
            "name": INFERENCE,
            "model": {"path": path},
            "rollout": {"sampling": {"max_new_tokens": _MOST_NEW_TOKENS}},
        }
    )
    return parse_recipe(text, overrides)
