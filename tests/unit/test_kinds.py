"""What each kind of run needs, refuses and starts."""

import pytest

from areal_ray.actors import layout_of
from areal_ray.errors import RecipeError
from areal_ray.recipe import parse_recipe

TOP = "name: r\nmodel: {path: m}\n"
PREFERENCE = "preference: {source: 'a:b', steps: 2, batch_size: 2}\n"
TASKS = "steps: 2\ntasks: {source: 'a:b'}\nadmission: {groups_per_step: 2, n_samples: 1}\n"
SFT = "sft: {phases: [{source: 'a:b', steps: 1, batch_size: 1}]}\n"
TEACHER = "teacher: {path: t}\n"
OPD = "objective: {kind: opd}\n"
DPO = f"kind: dpo\n{TOP}{PREFERENCE}reference: {{path: null}}\n"
REWARD_MODEL = f"kind: reward_model\n{TOP}{PREFERENCE}"
DISTILL = f"kind: distill\n{TOP}{TASKS}{TEACHER}{OPD}"
INFERENCE = f"kind: inference\n{TOP}"
ONLINE = f"kind: online\nsteps: 1\n{TOP}admission: {{groups_per_step: 2, n_samples: 2}}\n"
UPSTREAM = "gateway.upstream={big: {url: 'http://h/v1', model: m}}"
OFFLINE = f"kind: distill\n{TOP}{SFT}{TEACHER}"
HELD_OUT = "evaluation={tasks: {source: 'a:b'}}"
REWARD = "reward={score: 'a:b'}"

LEARNERS = {"learner"}
NO_REWARD = {"learner", "rollout", "agent", "param-sync"}


@pytest.mark.parametrize(
    ("text", "overrides", "loop", "roles"),
    [
        (DPO, [], "prefer", LEARNERS),
        (REWARD_MODEL, [], "prefer", LEARNERS),
        (OFFLINE, [], "fit", LEARNERS),
        (INFERENCE, [], "serve", {"rollout", "gateway"}),
        (DISTILL, [], "train", NO_REWARD),
        (
            DISTILL,
            [REWARD, HELD_OUT],
            "train",
            NO_REWARD | {"reward", "evaluation", "evaluation-agent"},
        ),
    ],
)
def test_a_run_has_the_actors_that_its_kind_needs(text, overrides, loop, roles):
    recipe = parse_recipe(text, overrides)
    assert recipe.parts.loop == loop
    assert {bundle.role for bundle in layout_of(recipe).bundles} == roles
    assert parse_recipe(recipe.to_yaml()).digest == recipe.digest


def test_dpo_starts_from_the_model_itself_where_the_reference_has_no_path():
    assert parse_recipe(DPO).companions.reference_path == "m"
    assert parse_recipe(DPO, ["reference.path=r"]).companions.reference_path == "r"


@pytest.mark.parametrize(
    ("text", "override", "key", "must"),
    [
        (INFERENCE, "tasks={source: 'a:b'}", "tasks", "no use for it"),
        (INFERENCE, "agent.max_turns=2", "agent", "programs of their own"),
        (INFERENCE, UPSTREAM, "gateway.upstream", "kind: online"),
        (ONLINE, "gateway.no_key=true", "gateway.no_key", "must be false"),
        (DPO, "gateway.port=1", "gateway", "no use for it"),
        (DPO, "preference=null", "preference", "kind: dpo needs it"),
        (DPO, "reference=null", "reference", "kind: dpo needs it"),
        (DPO, "teacher={path: t}", "teacher", "no use for it"),
        (DPO, "tasks={source: 'a:b'}", "tasks", "no use for it"),
        (DPO, "preference.label_smoothing=0.6", "preference.label_smoothing", "must be < 0.5"),
        (REWARD_MODEL, "reference={path: r}", "reference", "no use for it"),
        (REWARD_MODEL, "preference.beta=0.5", "preference.beta", "use kind: dpo"),
        (REWARD_MODEL, "preference.loss=ipo", "preference.loss", "Bradley and Terry's"),
        (DISTILL, "objective.kind=grpo", "teacher", "use kind 'opd'"),
        (DISTILL, "teacher=null", "teacher", "kind: distill needs it"),
        (DISTILL, "steps=0", "steps", "must be >= 1 for kind: distill"),
        (DISTILL, REWARD, "reward", "Give both or neither"),
        (DISTILL, HELD_OUT, "evaluation", "Give both or neither"),
        (
            DISTILL,
            "objective={kind: opd, distillation: {rl_weight: 1}, gae: {discount: 1.0}}",
            "objective.distillation.rl_weight",
            "Use kind: rl",
        ),
        (
            DISTILL,
            "admission={groups_per_step: 2, n_samples: 2, drop_equal_rewards: true}",
            "admission.drop_equal_rewards",
            "must be false",
        ),
        (OFFLINE, "tasks={source: 'a:b'}", "tasks", "no use for it"),
        (OFFLINE, "kind=sft", "teacher", "no use for it"),
        (OFFLINE, "objective={kind: opd}", "objective", "no use for it"),
        (DPO, "objective={eps_clip: 0.3}", "objective", "no use for it"),
        (
            f"kind: sft\n{TOP}{SFT}",
            "sft.distillation={top_k: 4}",
            "sft.distillation",
            "has no teacher",
        ),
    ],
)
def test_sections_that_do_not_go_with_a_kind_are_told(text, override, key, must):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, [override])
    told = [line for line in str(caught.value).splitlines() if f": {key}: " in line]
    assert len(told) == 1, str(caught.value)
    assert must in told[0]
