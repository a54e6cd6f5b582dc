"""smoke: a recipe with a tiny random model and a few rows in place of its own.

Shows in under a minute, on any machine, that a recipe's sections, code and objective work
together. Models become `engines.tiny_model`; data the first rows of each source, or rows of the
same form where a source cannot be reached; two steps of two groups on the CPU.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_ray.agents import sample_rows
from areal_ray.engines.lora_config import ALL_LINEAR
from areal_ray.engines.tiny_model import TEACHER_FOLDER
from areal_ray.errors import RecipeError
from areal_ray.recipe import REWARD_MODEL, Recipe, load_recipe, parse_recipe

_MODEL = "{fileroot}/smoke-model"
_ROWS = "areal_ray.agents.sample_rows"
_NUM_ROWS = 8
_NUM_HELD_OUT = 4
_STEPS = 2

Changes = dict[str, Any]
Tell = Callable[[str], None]


def load_to_smoke(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a file, for `smoke_recipe`: overrides may fit what is made tiny alone.

    Raises:
        RecipeError: The file is wrong by itself, or an override is.
    """
    try:
        return load_recipe(path, overrides)
    except RecipeError as error:
        try:
            load_recipe(path)
        except RecipeError:
            raise error from None
    return load_recipe(path, overrides, is_checked=False)


def smoke_recipe(recipe: Recipe, overrides: Sequence[str] = (), *, tell: Tell = print) -> Recipe:
    """The recipe, made tiny; nothing but its data sources is read.

    Args:
        recipe: As loaded, with the overrides.
        overrides: `key=value` that win over what is made tiny.
        tell: Takes a line for each source that cannot be reached.

    Raises:
        RecipeError: A source does not exist, or an override is wrong.
    """
    changes = {
        **_everywhere(recipe),
        **_models(recipe),
        **_rollouts(recipe, overrides),
        **_given(recipe, tell),
        **_tasks(recipe, tell),
    }
    changes |= _fitting(recipe, changes, overrides)
    values = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    last = [override for override in overrides if not _is_held(override, changes)]
    return parse_recipe(recipe.to_yaml(), [*values, *last], origin=recipe.origin)


def _fitting(recipe: Recipe, changes: Changes, overrides: Sequence[str]) -> Changes:
    """What is made tiny must go together with what the user says of its neighbours."""

    def is_said(key: str) -> bool:
        said = (override.partition("=")[0] for override in overrides)
        return any(key == name or key.startswith(f"{name}.") for name in said)

    fitting: Changes = {}
    admission, minibatches = recipe.admission, "learner.ppo_n_minibatches"
    if admission is None:
        return fitting
    groups = admission.groups_per_step
    if is_said("admission.groups_per_step") and groups % changes[minibatches]:
        fitting[minibatches] = 1
    needed = "admission.min_scored_samples"
    if is_said("admission.n_samples") and needed in changes:
        fitting[needed] = min(changes[needed], admission.n_samples)
    return fitting


def _is_held(override: str, changes: Changes) -> bool:
    """Whether what is made tiny holds the override already: a data source, a reward or their
    arguments, which it calls in turn."""
    key = override.partition("=")[0]
    called = [name for name in changes if name.endswith((".source", ".args", ".score"))]
    return any(key == name or key.startswith(f"{name}.") for name in called)


def _everywhere(recipe: Recipe) -> Changes:
    changes: Changes = {
        "name": f"{recipe.name}-smoke",
        "cluster.n_nodes": 1,
        "cluster.n_gpus_per_node": 0,
        "checkpoint.every_steps": None,
        "weights.backend": "gloo",
        "rollout.num_gpus": 0,
        "rollout.replicas": 1,
        "learner.ranks": 1,
        "learner.num_gpus": 0,
        "learner.ppo_n_minibatches": min(2, recipe.learner.ppo_n_minibatches),
        "learner.engine.device": "cpu",
        "learner.engine.dtype": "float32",
        "learner.engine.max_tokens_per_mb": 4096,
    }
    return changes | ({"steps": _STEPS} if recipe.steps else {})


def _models(recipe: Recipe) -> Changes:
    changes: Changes = {"model.path": _MODEL, "model.create": "areal_ray.engines.tiny_model:create"}
    changes |= {
        f"{name}.path": _MODEL
        for name in ("reference", "critic")
        if getattr(recipe, name) is not None
    }
    if recipe.model.lora is not None:  # layers may have other names in the model it was meant for
        changes["model.lora.target_modules"] = ALL_LINEAR
    if recipe.teacher is not None:  # who is its own teacher learns nothing
        changes["teacher.path"] = f"{_MODEL}/{TEACHER_FOLDER}"
    reward = recipe.reward
    if reward is None:
        return changes
    args = dict(reward.args)
    if reward.score == REWARD_MODEL:
        args["path"] = str(_MODEL.replace("{fileroot}", recipe.cluster.fileroot))
    roots = [str(root) for root in recipe.import_roots]
    changes |= {
        "reward.score": f"{_ROWS}:by_chance",
        "reward.args": {"score": reward.score, "args": args, "roots": roots},
        "reward.timeout_s": 60.0,  # a model is loaded by its first score here
        "reward.replicas": 1,
        "reward.workers": 1,
    }
    return changes


def _rollouts(recipe: Recipe, overrides: Sequence[str]) -> Changes:
    if not recipe.parts.samples:
        return {}
    changes: Changes = {
        "rollout.engine": _engine(recipe, overrides),
        "rollout.sampling.max_new_tokens": 8,
    }
    if not recipe.parts.serves:
        changes |= {"agent.replicas": 1, "agent.max_turns": min(2, recipe.agent.max_turns)}
    admission, shaping = recipe.admission, recipe.objective.reward_shaping
    if admission is not None:
        changes["admission.groups_per_step"] = 2
        changes["admission.n_samples"] = min(4, admission.n_samples)
        if admission.min_scored_samples is not None:
            changes["admission.min_scored_samples"] = min(2, admission.min_scored_samples)
        if admission.max_concurrent_rollouts is not None:
            changes["admission.max_concurrent_rollouts"] = 6
    if shaping.overlong_tokens is not None:
        changes["objective.reward_shaping.overlong_tokens"] = 4
        changes["objective.reward_shaping.overlong_limit_tokens"] = None
    if recipe.objective.fixed_length_tokens is not None:
        changes["objective.fixed_length_tokens"] = None
    return changes


def _engine(recipe: Recipe, overrides: Sequence[str]) -> dict[str, Any]:
    """The embedded engine, which any machine has, unless the user asks for the recipe's own."""
    tiny = {"dtype": "float32", "max_slots": 8, "max_context_tokens": 1024}
    said = recipe.rollout.engine
    is_asked_for = any(
        override.partition("=")[0] in ("rollout.engine", "rollout.engine.kind")
        for override in overrides
    )
    if said.kind != "torch" and not is_asked_for:
        return {"kind": "torch", "device": "cpu", **tiny}
    # What others are built for says vLLM itself.
    device = "cpu" if said.kind == "torch" else "auto"
    kept = {name: getattr(said, name) for name in type(said).model_fields}
    return {**kept, "device": device, **{k: v for k, v in tiny.items() if k in kept}}


def _tasks(recipe: Recipe, tell: Tell) -> Changes:
    changes: Changes = {}
    sections = [("tasks", recipe.tasks)]
    if recipe.evaluation is not None:
        sections.append(("evaluation.tasks", recipe.evaluation.tasks))
        changes["evaluation.n_samples"] = min(2, recipe.evaluation.n_samples)
    for where, tasks in sections:
        if tasks is None:
            continue
        changes |= _source(recipe, where, tasks.source, tasks.args, "tasks", tell)
        changes[f"{where}.limit"] = _NUM_ROWS if where == "tasks" else _NUM_HELD_OUT
        changes[f"{where}.max_prompt_tokens"] = 768
        changes[f"{where}.overlong"] = "left"
    return changes


def _given(recipe: Recipe, tell: Tell) -> Changes:
    """Conversations and pairs that a run is given."""
    changes: Changes = {}
    for number, phase in enumerate(recipe.sft.phases if recipe.sft is not None else ()):
        where = f"sft.phases.{number}"
        changes |= {f"{where}.steps": _STEPS, f"{where}.batch_size": 4}
        changes |= {f"{where}.until": None, f"{where}.max_steps": None}
        changes |= _source(recipe, where, phase.source, phase.args, "conversations", tell)
    pairs = recipe.preference
    if pairs is not None:
        changes |= {"preference.steps": _STEPS, "preference.batch_size": 4}
        changes |= _source(recipe, "preference", pairs.source, pairs.args, "pairs", tell)
        held_out = pairs.held_out
        if held_out is not None:
            where, source = "preference.held_out", held_out.source or pairs.source
            changes |= _source(recipe, where, source, held_out.args, "pairs", tell)
            changes[f"{where}.num_pairs"] = 4
    return changes


def _source(
    recipe: Recipe, where: str, source: str, args: dict[str, Any], form: str, tell: Tell
) -> Changes:
    """The first rows of a source, or rows of the same form."""
    roots = [str(root) for root in recipe.import_roots]
    taken = {"source": source, "args": args, "roots": roots, "num_rows": _NUM_ROWS}
    reason = _unreachable(taken)
    if reason is not None:
        tell(f"{where}: {source} cannot be read here ({reason}); made-up rows take its place")
        return {f"{where}.source": f"{_ROWS}:{form}", f"{where}.args": {"num_rows": _NUM_ROWS}}
    return {f"{where}.source": f"{_ROWS}:first", f"{where}.args": taken}


def _unreachable(taken: dict[str, Any]) -> str | None:
    """Why a source has no rows here; None = it has."""
    try:
        has_rows = any(True for _ in sample_rows.first(**taken))
    except RecipeError:  # no such code: a defect of the recipe, which a smoke run should tell
        raise
    except Exception as error:  # a data set, a file, a network that is not there
        told = str(error).strip().splitlines() or [type(error).__name__]
        return told[0][:120]
    return None if has_rows else "it gave none"
