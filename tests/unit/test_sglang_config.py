"""What a recipe may say of SGLang, and the command line that becomes of it."""

from pathlib import Path

import pytest

from areal_ray.engines.sglang_generation_config import SglangGenerationConfig
from areal_ray.engines.sglang_model import read_sglang_model
from areal_ray.engines.sglang_server import server_command
from areal_ray.errors import EngineError, RecipeError
from areal_ray.recipe import load_recipe
from areal_ray.smoke import smoke_recipe
from tests.support.generation import request
from tests.support.tiny_models import write_tiny_model

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "calculator" / "grpo.yaml"


def loaded(*overrides: str):
    return load_recipe(RECIPE, [f"rollout.engine.{override}" for override in overrides])


def test_the_kind_alone_is_enough():
    assert isinstance(loaded("kind=sglang").rollout.engine, SglangGenerationConfig)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["kind=sglang", "max_slots=4"], "max_slots"),
        (["kind=torch", "url=http://here:1"], "url"),
        (["kind=sglang", "url=here"], "must be http://host:port"),
        (["kind=sglang", "url=http://127.0.0.1:1", "dtype=float32"], "url and dtype"),
        (["kind=sglang", "url=http://127.0.0.1:1", "args={a: 1}"], "url and args"),
        (["kind=sglang", "url=http://elsewhere:1"], "weights_folder must name a folder"),
        (["kind=sglang", "args={port: 1}"], "'port', which the adapter sets"),
        (["kind=sglang", "args={--foo: 1}"], "must be as in SGLang"),
        (["kind=sglang", "tp_size=2"], r"num_gpus 0 and engine\.tp_size 2"),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides, told):
    with pytest.raises(RecipeError, match=told):
        loaded(*overrides)


def test_a_smoke_run_starts_a_server_only_where_it_is_asked_for():
    own = ["rollout.engine.kind=sglang"]
    assert smoke_recipe(load_recipe(RECIPE, own), own).rollout.engine.kind == "sglang"
    elsewhere = load_recipe(RECIPE, [*own, "rollout.engine.url=http://127.0.0.1:1"])
    assert smoke_recipe(elsewhere).rollout.engine.kind == "torch"


def test_adapters_are_refused_before_anything_starts():
    with pytest.raises(RecipeError, match=r"rollout\.engine\.kind: is sglang with model\.lora"):
        load_recipe(RECIPE, ["rollout.engine.kind=sglang", "model.lora={rank: 4}"])


def test_replicas_do_not_share_a_server():
    overrides = ["rollout.engine.kind=sglang", "rollout.engine.url=http://127.0.0.1:1"]
    with pytest.raises(RecipeError, match=r"replicas 2 and engine\.url"):
        load_recipe(RECIPE, [*overrides, "rollout.replicas=2"])


def test_the_command_line_says_all_that_the_adapter_relies_on(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    model = read_sglang_model(folder, 100)
    config = SglangGenerationConfig(
        device="cuda:1", args={"mem_fraction_static": 0.7, "disable_radix_cache": True,
                               "enable_mixed_chunk": False},
    )  # fmt: skip
    command = server_command(config, model, port=4321, version=7)
    said = " ".join(command[1:])
    assert said == (
        f"-m sglang.launch_server --model-path {folder} --host 127.0.0.1 --port 4321 --tp-size 1 "
        "--dtype float32 --context-length 102 --weight-version 7 --skip-tokenizer-init "
        "--incremental-streaming-output --device cuda --base-gpu-id 1 --mem-fraction-static 0.7 "
        "--disable-radix-cache"
    )


def test_a_served_model_is_read_from_its_files(tmp_path):
    folder = write_tiny_model(tmp_path / "model", max_position_embeddings=64)
    model = read_sglang_model(folder, 0)
    assert (model.window_tokens, model.vocab_size, model.stop_ids) == (64, 384, (2,))
    assert model.weight_shapes["model.embed_tokens.weight"] == (384, 64)
    assert "lm_head.weight" not in model.weight_shapes
    assert model.why_refused(request("r", [5] * 63)) == ""
    assert "context window 64" in model.why_refused(request("r", [5] * 64))
    with pytest.raises(EngineError, match="the model allows 64"):
        read_sglang_model(folder, 65)
