"""What a recipe says about adapters: read, checked before the start, refused where in vain."""

import json

import pytest

from areal_ray.checkpoint import STATE_FORMAT, Checkpoints
from areal_ray.engines.lora_config import ADAPTER_FOLDER, LoraConfig, engine_problems
from areal_ray.errors import DataError, RecipeError
from areal_ray.model_check import lora_problems
from areal_ray.preflight import check_files
from areal_ray.prepare import begin_at
from areal_ray.recipe import evaluation_of, parse_recipe
from areal_ray.runtime.saving import CHECKPOINTS_FOLDER
from areal_ray.smoke import smoke_recipe
from tests.support.tiny_models import write_tiny_model

SFT = """\
kind: sft
name: r
model: {path: "{fileroot}/model", lora: {rank: 4, target_modules: [q_proj, mlp.up_proj]}}
sft: {phases: [{source: "areal_ray.agents.sample_rows:conversations", steps: 1, batch_size: 1}]}
"""
EVALUATION = "evaluation={tasks: {source: 'a:b'}}"


@pytest.fixture
def recipe(tmp_path):
    write_tiny_model(tmp_path / "model")

    def made(*overrides):
        return parse_recipe(SFT, [f"cluster.fileroot={tmp_path}", *overrides])

    return made


def test_it_reads_back_the_same_and_has_peft_like_defaults(recipe):
    lora = recipe("model.lora.rslora=true").model.lora
    assert lora == LoraConfig(rank=4, rslora=True, target_modules=("q_proj", "mlp.up_proj"))
    assert (lora.alpha, lora.scale) == (32, 16.0)
    assert lora.described == "rank 4, scale 16, q_proj, mlp.up_proj"
    assert LoraConfig(rank=16, alpha=8).scale == 0.5
    assert parse_recipe(recipe().to_yaml()).digest == recipe().digest
    assert recipe("model.lora={}").model.lora == LoraConfig(target_modules="all-linear")
    assert recipe("model.lora=null").model.lora is None
    assert check_files(recipe()) == []


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.lora.rank=0", "model.lora.rank"),
        ("model.lora.dropout=0.05", "must be 0, since with dropout the policy that is trained"),
        ("model.lora.target_modules=[]", "model.lora.target_modules: is empty"),
        ("model.lora.target_modules=all", "model.lora.target_modules"),
        ("model.lora.r=8", "model.lora.r: unknown key. Did you mean 'rank'?"),
    ],
)
def test_what_it_cannot_be_is_refused_with_its_key(recipe, override, told):
    with pytest.raises(RecipeError) as error:
        recipe(override)
    assert told in str(error.value)


def test_a_run_that_trains_nothing_has_no_adapters(recipe, tmp_path):
    changes = ["kind=eval", "sft=null", "reward={score: 'a:b'}", EVALUATION]
    with pytest.raises(RecipeError, match=r"model\.lora: is given; kind: eval trains nothing"):
        recipe(*changes)
    scored = evaluation_of(recipe(), None, ["reward={score: 'a:b'}", EVALUATION])
    assert scored.model.lora is None


RL = """\
kind: rl
name: r
model: {path: m, lora: {rank: 4}}
steps: 1
tasks: {source: "a:b"}
reward: {score: "a:b"}
admission: {groups_per_step: 2, n_samples: 2}
"""


def test_an_engine_that_cannot_take_the_adapters_is_refused():
    for kind in ("torch", "vllm"):
        assert parse_recipe(RL, [f"rollout.engine.kind={kind}"]).model.lora is not None
        assert list(engine_problems(LoraConfig(), kind)) == []
    large = ["rollout.engine.kind=vllm", "model.lora.rank=600"]
    with pytest.raises(RecipeError, match=r"model\.lora\.rank: is 600; must be <= 512 with"):
        parse_recipe(RL, large)
    assert parse_recipe(RL, ["model.lora.rank=600"]).model.lora is not None
    with pytest.raises(
        RecipeError, match=r"rollout\.engine\.kind: is sglang with model\.lora; must"
    ):
        parse_recipe(RL, ["rollout.engine.kind=sglang"])
    assert parse_recipe(RL, ["rollout.engine.kind=sglang", "model.lora=null"])


def test_a_layer_that_the_model_lacks_is_told_with_those_it_has(recipe):
    (told,) = check_files(recipe("model.lora.target_modules=[q_proj,query,c_attn]"))
    assert told == (
        "model.lora.target_modules: query, c_attn is no linear layer of the model; must be of "
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj, or all-linear. Choose "
        "from these."
    )


def test_without_peft_it_says_what_to_install():
    (told,) = lora_problems(LoraConfig(), None, package="no_package_of_this_name")
    assert "is not installed" in told
    assert "pip install 'areal-ray[lora]'" in told


def test_a_smoke_run_adapts_the_layers_of_its_own_model(recipe):
    tiny = smoke_recipe(recipe("model.lora.target_modules=[qkv_proj]"))
    assert tiny.model.lora is not None
    assert (tiny.model.lora.target_modules, tiny.model.lora.rank) == ("all-linear", 4)
    assert check_files(tiny) == []


@pytest.mark.parametrize("has_adapters", [True, False])
def test_a_run_is_resumed_with_adapters_if_it_began_with_them(recipe, tmp_path, has_adapters):
    checkpoints = Checkpoints(tmp_path / "r" / CHECKPOINTS_FOLDER)
    draft = checkpoints.begin(2)
    if has_adapters:
        (draft / ADAPTER_FOLDER).mkdir()
        (draft / ADAPTER_FOLDER / "adapter_config.json").write_text(json.dumps({}))
    made = checkpoints.commit(2, {"format": STATE_FORMAT, "step": 2, "version": 2})
    same, other = ("model.lora.rank=4", "model.lora=null")
    if not has_adapters:
        same, other = other, same
    point = begin_at(recipe(same), resume=True, tell=lambda line: None)
    assert point.checkpoint == str(made.folder.resolve())
    model = str((tmp_path / "model").resolve())
    assert point.model_path == (model if has_adapters else point.checkpoint)
    with pytest.raises(DataError, match="a run goes on as it began"):
        begin_at(recipe(other), resume=True, tell=lambda line: None)
