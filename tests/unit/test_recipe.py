"""The recipe as a whole: what it refuses, and that saving and reading it changes nothing."""

from pathlib import Path

import pytest

from areal_ray.algorithms.presets import PRESETS
from areal_ray.engines.protocols import SamplingConfig
from areal_ray.errors import RecipeError
from areal_ray.recipe import (
    Recipe,
    evaluation_of,
    load_recipe,
    model_recipe,
    parse_recipe,
    recipe_schema,
)

TEXT = """\
kind: rl
name: sums-{seed}
steps: 40
model: {path: "{fileroot}/warm-{seed}/model", create: warm.yaml}
tasks: {source: "recipes.sums.tasks:train"}
reward: {score: "areal_ray.rewards.math:score"}
admission: {groups_per_step: 32}
rollout: {sampling: {max_new_tokens: 24, top_k: 5}}
"""


def refused(*overrides: str, text: str = TEXT) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_overrides_are_typed_by_the_schema_and_the_last_one_wins():
    recipe = parse_recipe(
        TEXT, ["learner.optimizer.lr=1e-5", "steps=3", "steps=4", "evaluation=null"]
    )
    assert recipe.learner.optimizer.lr == 1e-5
    assert recipe.steps == 4
    assert recipe.evaluation is None


def test_a_saved_recipe_reads_back_as_the_same_recipe(tmp_path):
    recipe = parse_recipe(TEXT, ["seed=7", "name=1e3", "admission.max_concurrent_rollouts=5"])
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    again = load_recipe(tmp_path / "recipe.yaml")
    assert again.digest == recipe.digest
    assert again.to_yaml() == recipe.to_yaml()
    assert again.name == "1e3"


def test_recipes_that_differ_in_one_value_have_different_digests():
    changes = ("seed=1", "seed=2", "learner.optimizer.lr=3e-5", "tasks.args={a: 1}")
    assert len({parse_recipe(TEXT, [change]).digest for change in changes}) == len(changes)


def test_seed_and_fileroot_stand_in_names_and_paths():
    recipe = parse_recipe(TEXT, ["seed=3", "cluster.fileroot=/tmp/r"])
    assert recipe.folder == Path("/tmp/r/sums-3")
    assert recipe.model_path == "/tmp/r/warm-3/model"


@pytest.mark.parametrize(
    ("override", "key", "must"),
    [
        ("learner.ppo_n_minibatches=5", "learner.ppo_n_minibatches", "must divide"),
        ("rollout.sampling.temperature=0", "rollout.sampling.temperature", "above 0"),
        ("rollout.sampling.temperature=-1", "rollout.sampling.temperature", ">= 0"),
        ("admission.n_samples=1", "admission.n_samples", "Use 2 or more"),
        ("admission.max_head_offpolicyness=-1", "admission.max_head_offpolicyness", ">= 0"),
        ("rollout.num_gpus=1", "cluster.n_gpus_per_node", "must hold 1 GPUs"),
        ("learner.engine.device=cuda", "learner.num_gpus", "above 0"),
        ("learner.optimizer.name=adamw_8bit", "learner.optimizer.name", "must be adamw"),
        ("learner.engine.attention=flash", "learner.engine.attention", "must be sdpa or auto"),
        ("learner.engine={kind: fsdp, cpu_offload: true}", "learner.engine.cpu_offload", "false"),
        (
            "learner.engine={kind: fsdp, reduce_dtype: bfloat16}",
            "learner.engine.reduce_dtype",
            "32",
        ),
        (
            "learner.engine.reshard_after_forward=true",
            "learner.engine.reshard_after_forward",
            "unk",
        ),
        ("learner.engine={kind: fsdp, tensor_parallel: 2}", "learner.ranks", "a multiple of it"),
        (
            "learner.engine={kind: fsdp, sequence_parallel: 2}",
            "learner.ranks",
            "sequence_parallel 2",
        ),
        (
            "learner.engine={kind: fsdp, sequence_parallel: 2, tensor_parallel: 2}",
            "learner.engine.sequence_parallel",
            "one of the two must be 1",
        ),
        (
            "learner.engine={kind: fsdp, sequence_parallel: 2, attention: sdpa}",
            "learner.engine.sequence_parallel",
            "Set attention=auto",
        ),
        ("learner.engine.tensor_parallel=1", "learner.engine.tensor_parallel", "unknown key"),
        ("rollout.engine.device=tpu", "rollout.engine.device", "cpu, cuda or cuda:N"),
        ("rollout.sampling.stop_token_ids=[-1]", "rollout.sampling.stop_token_ids.0", ">= 0"),
        ("rollout.sampling.stop=['']", "rollout.sampling.stop.0", "at least 1"),
        ("rollout.sampling.min_p=1.5", "rollout.sampling.min_p", "<= 1"),
        ("rollout.sampling.logit_bias={5: 101}", "rollout.sampling.logit_bias.5", "<= 100"),
        ("rollout.sampling.logit_bias={a: 1}", "rollout.sampling.logit_bias", "must be token ids"),
        ("rollout.sampling.logit_bias={5: 1}", "rollout.sampling.logit_bias", "be left out"),
        ("rollout.sampling.repetition_penalty=1.1", "rollout.sampling.repetition_penalty", "left"),
        ("rollout.sampling.presence_penalty=1", "rollout.sampling.presence_penalty", "left out"),
        ("rollout.sampling.frequency_penalty=1", "rollout.sampling.frequency_penalty", "left out"),
        ("name=a/b", "name", "plain folder name"),
        ("name=a\nb", "name", "in one line"),
        ("tasks.args={a: 1, a: 2}", "tasks.args", "'a' is given twice"),
        ("steps=0", "steps", ">= 1"),
        ("tasks=null", "tasks", "kind: rl needs it"),
        ("tasks.limit=0", "tasks.limit", ">= 1"),
        ("tasks.limit=-3", "tasks.limit", ">= 1"),
        ("tasks.source=null", "tasks.source", "must be text"),
        ("reward.score=", "reward.score", "must be text"),
        ("rollout.sampling.temperature=0.001", "rollout.sampling.temperature", "at least 0.01"),
        ("rollout.sampling.stop=a,b", "rollout.sampling.stop", "Write [a,b]."),
        ("learner.optimizer.lr=.inf", "learner.optimizer.lr", "finite"),
        ("learner.optimizer.lr=nan", "learner.optimizer.lr", "must be a number"),
        ("rollout.sampling.length_penalty=0.5", "rollout.sampling.length_penalty", "unknown"),
        ("rollout.sampling.top_p=0", "rollout.sampling.top_p", "> 0"),
        ("sft={phases: [{source: 'a:b', steps: 1, batch_size: 1}]}", "sft", "no use for it"),
        ("evaluation={every_steps: 5}", "evaluation.tasks", "must be given"),
        (
            "evaluation={tasks: {source: 'a:b'}, limit: 5}",
            "evaluation.limit",
            "unknown key. Did you mean 'evaluation.tasks.limit'?",
        ),
        ("objective.kind=grop", "objective.kind", "Did you mean 'grpo'?"),
        ("objective.kind=DAPO", "objective.kind", "Did you mean 'dapo'?"),
        ("objective.discount=0.9", "objective.discount", "mean 'objective.gae.discount'?"),
        ("objective.adv_norm={mean: batch}", "objective.adv_norm", "mean 'advantage_norm'?"),
        ("weights.bucket_bytes=17", "weights.bucket_bytes", "multiple of 16"),
    ],
)
def test_what_cannot_work_is_refused_with_its_key_and_what_must_be(override, key, must):
    lines = refused(override)
    assert len(lines) == 1, lines
    assert f": {key}: " in lines[0]
    assert must in lines[0]


def test_a_path_that_begins_at_home_is_there(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    home = ["cluster.fileroot=~/runs", "model={path: ~/models/small}"]
    recipe = parse_recipe(TEXT, home)
    assert (str(recipe.folder.parent), recipe.model_path) == (
        "/home/ada/runs",
        "/home/ada/models/small",
    )


ONE_SAMPLE = ("admission.n_samples=1",)


@pytest.mark.parametrize(
    ("overrides", "key", "must"),
    [
        (["objective.kl={kl_ctl: 0.1}"], "objective.kl", "without the section reference"),
        (["reference={path: null}"], "reference", "without objective.kl"),
        (["objective.kind=opd"], "objective.distillation", "without the section teacher"),
        (["teacher={path: t}"], "teacher", "without objective.distillation"),
        (["objective.kind=ppo"], "objective.kind", "use kind 'grpo' or 'decoupled_ppo'"),
        (["critic={path: null}"], "critic", "two baselines would be subtracted"),
        (["objective.gae={gae_lambda: 0.9}"], "objective.gae", "without a critic"),
        (["objective.gae={discount: 0}"], "objective.gae.discount", "its last token alone"),
        (
            ["objective={kind: ppo, gae: {discount: 0, unit: turn}}", "critic={}"],
            "objective.gae.discount",
            "its last turn alone",
        ),
        (
            [
                "objective={kind: decoupled_ppo, prox_logp_method: reuse}",
                "learner.ppo_n_minibatches=2",
            ],
            "learner.ppo_n_minibatches",
            "must be 1",
        ),
        (
            ["objective={kind: m2po, prox_logp_method: loglinear}"],
            "objective.prox_logp_method",
            "must be 'recompute'",
        ),
        (
            ["objective={kind: rloo}", "admission.n_samples=1"],
            "admission.n_samples",
            "Use 2 or more",
        ),
        (
            ["objective={reward_norm: {mean: none, std: group}}", "admission.n_samples=1"],
            "admission.n_samples",
            "no deviation to be divided by",
        ),
        (["objective.gae={unit: turn}"], "objective.gae.unit", "has the same advantage anyway"),
        (
            ["objective={kind: kpop, rejection_sampling: {lower: 0.5}}"],
            "objective.rejection_sampling.lower",
            "with metric 'binary_kl'",
        ),
        (
            ["objective={kind: reinforce, eps_clip: 0.3}"],
            "objective.eps_clip",
            "loss 'reinforce', which does not clip",
        ),
        (
            ["objective={kind: reinforce_pp, advantage_norm: {mean: group}}", *ONE_SAMPLE],
            "admission.n_samples",
            "never has an advantage",
        ),
        (
            ["objective={kind: reinforce_pp}", *ONE_SAMPLE, "admission.groups_per_step=1"],
            "admission.groups_per_step",
            "never has an advantage",
        ),
        (
            ["objective.advantage_norm={mean: leave_one_out}"],
            "objective.advantage_norm.mean",
            "Use it in reward_norm",
        ),
        (
            ["objective.reward_shaping={overlong_tokens: 99}"],
            "objective.reward_shaping.overlong_tokens",
            "at most the limit of 24 tokens",
        ),
        (["objective.advantage=group_mean"], "objective.advantage", "Use reward_norm: {mean"),
        (["kind=sft", "teacher={path: t}"], "teacher", "no use for it"),
    ],
)
def test_an_objective_and_the_sections_around_it_must_make_sense_together(overrides, key, must):
    told = [line for line in refused(*overrides) if f": {key}: " in line]
    assert len(told) == 1, refused(*overrides)
    assert must in told[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["objective.kl={kl_ctl: 0.1}", "reference={path: null}"],
        ["objective.kind=opd", "teacher={path: t}"],
        ["objective={kind: ppo, gae: {gae_lambda: 0.95}}", "critic={optimizer: {lr: 0.001}}"],
        ["objective={kind: decoupled_ppo, prox_logp_method: loglinear}"],
        ["objective={reward_norm: {mean: batch}}", "admission.n_samples=1"],
        # Its tokens differ: by the critic's values, or by their KL.
        ["objective={kind: ppo}", "critic={}", *ONE_SAMPLE, "admission.groups_per_step=1"],
        [
            "objective={kind: reinforce_pp, kl: {kl_ctl: 0.1}}",
            "reference={}",
            *ONE_SAMPLE,
            "admission.groups_per_step=1",
        ],
    ],
)
def test_an_objective_with_the_sections_it_needs_loads_and_reads_back_the_same(overrides):
    recipe = parse_recipe(TEXT, overrides)
    assert parse_recipe(recipe.to_yaml()) == recipe


def test_models_beside_the_policy_start_from_its_own_where_no_path_is_given():
    overrides = ["objective={kind: ppo, kl: {kl_ctl: 0.1}}", "critic={path: 'c-{seed}'}", "seed=4"]
    beside = parse_recipe(TEXT, [*overrides, "reference={path: null}"]).companions
    assert beside.critic_path == "c-4"
    assert beside.reference_path.endswith("warm-4/model")
    assert beside.teacher_path == ""


def test_several_impossible_combinations_are_told_together():
    lines = refused("learner.ppo_n_minibatches=5", "rollout.sampling.temperature=0", "nmae=x")
    assert [line.split(": ")[1] for line in lines] == [
        "nmae",
        "learner.ppo_n_minibatches",
        "rollout.sampling.temperature",
    ]


def test_evaluation_at_temperature_zero_is_greedy_and_allowed():
    recipe = parse_recipe(TEXT, ["evaluation={tasks: {source: 'a:b'}, sampling: {temperature: 0}}"])
    assert recipe.evaluation is not None
    assert recipe.evaluation.sampling_for(recipe.rollout.sampling).temperature == 0


def test_an_evaluation_may_sample_with_penalties_and_biases():
    sampling = "{temperature: 1.0, logit_bias: {'5': -1}, repetition_penalty: 1.2}"
    recipe = parse_recipe(
        TEXT, ["evaluation={tasks: {source: 'a:b'}}", f"evaluation.sampling={sampling}"]
    )
    assert recipe.evaluation.sampling.logit_bias == {"5": -1.0}
    assert parse_recipe(recipe.to_yaml()).digest == recipe.digest


def test_an_evaluation_without_sampling_is_greedy_within_the_limits_of_training():
    recipe = parse_recipe(TEXT, ["evaluation={tasks: {source: 'a:b'}}"])
    assert recipe.evaluation is not None
    inherited = recipe.evaluation.sampling_for(recipe.rollout.sampling)
    assert inherited == SamplingConfig(temperature=0.0, max_new_tokens=24)


def test_what_an_evaluation_does_is_told_with_what_it_inherits():
    training = parse_recipe(TEXT).rollout.sampling
    inherited = parse_recipe(TEXT, ["evaluation={tasks: {source: 'a:b'}}"]).evaluation
    assert inherited is not None
    assert inherited.described(training) == (
        "1 a task, greedy, at most 24 tokens a turn, at the end"
    )
    own = parse_recipe(
        TEXT,
        [
            "evaluation={tasks: {source: 'a:b'}, n_samples: 3, every_steps: 5, "
            "sampling: {temperature: 0.6, max_new_tokens: 64}}"
        ],
    ).evaluation
    assert own is not None
    assert own.described(training) == (
        "3 a task, temperature 0.6, at most 64 tokens a turn, every 5 steps"
    )


UNBOUNDED = "objective={kind: reinforce, behaviour_weight: full}"


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        ([UNBOUNDED, "admission.max_head_offpolicyness=2"], True),
        ([UNBOUNDED, "admission.max_head_offpolicyness=1"], False),
        ([UNBOUNDED, "admission.max_head_offpolicyness=0"], False),
        (
            [
                UNBOUNDED,
                "admission.max_head_offpolicyness=unlimited",
                "admission.max_concurrent_rollouts=9",
            ],
            True,
        ),
        (["objective={kind: rloo, behaviour_weight: none}"], True),
        (["objective={kind: decoupled_ppo, behaviour_weight: full}"], True),
        (["objective={kind: decoupled_ppo, behaviour_weight: full, m2_threshold: 0.04}"], False),
        *(([f"objective.kind={kind}"], False) for kind in PRESETS if kind not in ("ppo", "opd")),
    ],
)
def test_old_tokens_under_a_loss_that_bounds_nothing_are_warned_of(overrides, is_told):
    told = parse_recipe(TEXT, overrides).cautions
    assert bool(told) is is_told, told
    for line in told:
        assert line.startswith("objective: loss ")
        assert "admission.max_head_offpolicyness" in line


def test_several_greedy_samples_of_a_held_out_task_are_refused():
    lines = refused("evaluation={tasks: {source: 'a:b'}, n_samples: 3}")
    assert "evaluation.n_samples: is 3 with greedy sampling" in lines[0]


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(RecipeError, match=r"none.yaml: No such file"):
        load_recipe(tmp_path / "none.yaml")


def test_the_recipe_that_makes_the_model_gets_the_same_seed_and_fileroot(tmp_path):
    (tmp_path / "warm.yaml").write_text(
        "kind: sft\nname: warm-{seed}\nmodel: {path: m}\n"
        "sft: {phases: [{source: 'a:b', steps: 1, batch_size: 1}]}\n"
    )
    (tmp_path / "grpo.yaml").write_text(TEXT)
    recipe = load_recipe(tmp_path / "grpo.yaml", ["seed=5", f"cluster.fileroot={tmp_path}/r"])
    maker = model_recipe(recipe)
    assert maker.seed == 5
    assert maker.folder / "model" == Path(recipe.model_path)


def test_the_recipe_beside_it_makes_the_model_whatever_the_working_directory_holds(
    tmp_path, monkeypatch
):
    maker = (
        "kind: sft\nname: warm-{seed}\nmodel: {path: PATH}\n"
        "sft: {phases: [{source: 'a:b', steps: 1, batch_size: 1}]}\n"
    )
    for folder, model in (("own", "beside"), ("other", "elsewhere")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "warm.yaml").write_text(maker.replace("PATH", model))
    (tmp_path / "own" / "grpo.yaml").write_text(TEXT)
    monkeypatch.chdir(tmp_path / "other")
    recipe = load_recipe(tmp_path / "own" / "grpo.yaml", [f"cluster.fileroot={tmp_path}/r"])
    assert model_recipe(recipe).model.path == "beside"


def test_a_recipe_that_makes_a_model_elsewhere_is_refused(tmp_path):
    (tmp_path / "warm.yaml").write_text(
        "kind: sft\nname: other\nmodel: {path: m}\n"
        "sft: {phases: [{source: 'a:b', steps: 1, batch_size: 1}]}\n"
    )
    (tmp_path / "grpo.yaml").write_text(TEXT)
    with pytest.raises(RecipeError, match=r"model.create: warm.yaml leaves its model in"):
        model_recipe(load_recipe(tmp_path / "grpo.yaml"))


def test_a_run_is_evaluated_with_its_own_last_weights(tmp_path):
    recipe = parse_recipe(TEXT, ["evaluation={tasks: {source: 'a:b'}}"])
    with pytest.raises(RecipeError, match="holds no model/ with weights"):
        evaluation_of(recipe, tmp_path / "r" / "sums-0")
    model = tmp_path / "r" / "sums-0" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    scored = evaluation_of(recipe, tmp_path / "r" / "sums-0", ["rollout.replicas=2"])
    assert (scored.kind, scored.rollout.replicas) == ("eval", 2)
    assert scored.model_path == str(model)
    assert scored.folder == tmp_path / "r" / "sums-{seed}-eval".replace("{seed}", "0")


def test_a_recipe_cannot_be_changed_after_it_was_checked():
    recipe = parse_recipe(TEXT)
    with pytest.raises(ValueError, match="frozen"):
        recipe.steps = 5  # type: ignore[misc]


def test_the_schema_names_every_section_with_its_documentation():
    schema = recipe_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False
    assert all("description" in field for field in schema["properties"].values())


@pytest.mark.parametrize(
    ("kind", "bounds", "expected"),
    [
        ("kpop", "{upper: 0.5}", {"metric": "binary_kl", "action": "mask", "upper": 0.5}),
        ("icepop", "{upper: 3.0}", {"metric": "ratio", "lower": 0.5, "upper": 3.0}),
        ("rloo", "{upper: 3.0}", {"metric": "ratio", "action": "clamp", "upper": 3.0}),
        ("icepop", "{lower: null}", {"metric": "ratio", "lower": None, "upper": 5.0}),
    ],
)
def test_a_section_given_in_part_keeps_the_rest_of_what_its_kind_says(kind, bounds, expected):
    recipe = parse_recipe(
        TEXT, [f"objective.kind={kind}", f"objective.rejection_sampling={bounds}"]
    )
    section = recipe.objective.rejection_sampling.model_dump()
    assert {name: section[name] for name in expected} == expected
    assert recipe.objective.behaviour_weight == section["action"]
    assert parse_recipe(recipe.to_yaml()) == recipe


def test_a_section_in_part_that_does_not_go_with_its_kind_is_refused():
    with pytest.raises(RecipeError, match="only a ratio is a weight"):
        parse_recipe(TEXT, ["objective.kind=kpop", "objective.rejection_sampling={action: clamp}"])
