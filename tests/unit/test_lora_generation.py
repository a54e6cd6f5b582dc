"""The torch generation engine under adapters: exact, without drift, and as peft computes them."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from areal_ray.engines.lora import Adapters
from areal_ray.engines.lora_config import LoraConfig, LoraSetup
from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.errors import DataError, EngineError, RecipeError
from tests.support.generation import Served, hf_logprobs, hf_model, random_prompt, request
from tests.support.lora import random_adapters
from tests.support.tiny_models import write_tiny_model

MODELS = {
    "qwen3": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2}, "lean"),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}, "lean"),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}, "lean"),
    "qwen3-hf": ("qwen3", {}, "hf"),
    "gemma": ("gemma", {}, "hf"),
    "gpt2": ("gpt2", {}, "hf"),
}
RANK_4 = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny_model(root / name, family, seed=3, **fields)
        for name, (family, fields, _) in MODELS.items()
    }


def engine_of(folder, config=RANK_4, *, adapters="", **engine):
    setup = LoraSetup(config=config, folder=adapters)
    return TorchGenerationEngine(folder, TorchGenerationConfig(**engine), lora=setup)


def sampled(engine, count=6):
    """What the engine samples, with the requests; ends it."""
    served = Served(engine)
    engine.start(served.receive)
    sent = [
        request(f"r{i}", random_prompt(i, 5 + 4 * i), seed=i, max_new_tokens=12)
        for i in range(count)
    ]
    results = served.run(sent)
    engine.close()
    return sent, results


def peft_model(folder, config, tensors):
    """The model with peft's own layers, and these adapters in them."""
    model = hf_model(folder)
    adapters = Adapters(model, LoraSetup(config=config))
    own = adapters.trained(dict(model.named_parameters()))
    assert own.keys() == tensors.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_pefts_own_layers(folders, name):
    config = LoraConfig(rank=4, alpha=8, rslora=name == "qwen3")
    engine = engine_of(folders[name], config, forward=MODELS[name][2])
    tensors = random_adapters(engine.weight_shapes(), seed=1)
    engine.swap(tensors, 1, "keep")
    model = peft_model(folders[name], config, tensors)
    plain = hf_model(folders[name])
    sent, results = sampled(engine)
    for one, result in zip(sent, results, strict=True):
        np.testing.assert_allclose(result.logprobs, hf_logprobs(model, one, result)[0], atol=1e-5)
        assert set(result.versions) == {1}
    away = [
        np.abs(result.logprobs - hf_logprobs(plain, one, result)[0]).max()
        for one, result in zip(sent, results, strict=True)
    ]
    assert min(away) > 0.01, "the adapters change nothing"


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_fifty_versions_later_the_weights_are_those_of_the_last_adapters_to_the_bit(folders, name):
    engine = engine_of(folders[name], forward=MODELS[name][2])
    shapes = engine.weight_shapes()
    for version in range(1, 51):
        engine.swap(random_adapters(shapes, seed=version, size=1.0), version, "keep")
    last = random_adapters(shapes, seed=99)
    engine.swap(last, 51, "keep")
    fresh = engine_of(folders[name], forward=MODELS[name][2])
    fresh.swap(last, 51, "keep")
    for one, other in zip(sampled(engine)[1], sampled(fresh)[1], strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_before_any_version_it_is_the_model_itself(folders):
    plain = TorchGenerationEngine(folders["qwen3"], TorchGenerationConfig())
    adapted = engine_of(folders["qwen3"])
    for one, other in zip(sampled(plain)[1], sampled(adapted)[1], strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_a_swap_takes_adapters_alone(folders):
    engine = engine_of(folders["qwen3"], LoraConfig(rank=2, target_modules=("q_proj", "down_proj")))
    shapes = engine.weight_shapes()
    assert shapes == {
        f"model.layers.{i}.{layer}.lora_{part}.weight": shape
        for i in (0, 1)
        for layer, sizes in (("self_attn.q_proj", (128, 64)), ("mlp.down_proj", (64, 192)))
        for part, shape in (("A", (2, sizes[1])), ("B", (sizes[0], 2)))
    }
    with pytest.raises(EngineError, match=r"not in the model: model\.norm\.weight"):
        engine.swap({"model.norm.weight": torch.ones(64)}, 1, "keep")


def test_it_begins_with_the_adapters_of_a_checkpoint(folders, tmp_path):
    model = hf_model(folders["qwen3"])
    adapters = Adapters(model, LoraSetup(config=RANK_4))
    named = dict(model.named_parameters())
    tensors = random_adapters({n: t.shape for n, t in adapters.trained(named).items()}, seed=5)
    with torch.no_grad():
        for name, parameter in adapters.trained(named).items():
            parameter.copy_(tensors[name])
    adapters.write(tmp_path, named)
    swapped = engine_of(folders["qwen3"])
    swapped.swap(tensors, 0, "keep")
    begun = engine_of(folders["qwen3"], adapters=str(tmp_path))
    for one, other in zip(sampled(swapped)[1], sampled(begun)[1], strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    with pytest.raises(EngineError, match=r"wrong shape: .*lora_A"):
        engine_of(folders["qwen3"], LoraConfig(rank=8), adapters=str(tmp_path))
    with pytest.raises(DataError, match="holds no adapters that can be read"):
        engine_of(folders["qwen3"], adapters=str(tmp_path / "elsewhere"))


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_layer_that_is_not_there_is_told_with_those_that_are(folders, name):
    with pytest.raises(RecipeError) as told:
        engine_of(folders[name], LoraConfig(target_modules=("q_porj",)))
    first = "c_attn, c_fc, c_proj" if name == "gpt2" else "down_proj, gate_proj, k_proj, o_proj"
    assert str(told.value).startswith(
        "model.lora.target_modules: q_porj is no linear layer of the model; must be of " + first
    )


def test_the_head_is_never_adapted(folders):
    for name in ("qwen2-untied", "gpt2"):
        assert not [n for n in engine_of(folders[name]).weight_shapes() if "lm_head" in n]
        with pytest.raises(RecipeError, match="lm_head is no linear layer"):
            engine_of(folders[name], LoraConfig(target_modules=("lm_head",)))


def test_dropout_is_refused():
    with pytest.raises(ValidationError, match="must be 0, since with dropout"):
        LoraConfig(dropout=0.05)


def test_given_tokens_are_scored_under_the_adapters_in_force(folders):
    engine = engine_of(folders["qwen3"])
    tensors = random_adapters(engine.weight_shapes(), seed=1)
    engine.swap(tensors, 1, "keep")
    ids = random_prompt(3, 30)
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logits = peft_model(folders["qwen3"], RANK_4, tensors)(tokens[None]).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
    np.testing.assert_allclose(engine.score(ids), expected.numpy(), atol=1e-5)


def test_a_version_of_smollm2_135m_is_a_twenty_seventh_of_its_weights_at_rank_16():
    from transformers import LlamaConfig

    from areal_ray.engines.lean_forward import LeanForward
    from areal_ray.engines.lora_weights import adapted_layers, adapter_shapes, plain_layers

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    shapes = LeanForward(config, torch.float32, torch.device("cpu")).weight_shapes()
    layers = adapted_layers(plain_layers(shapes), LoraConfig(rank=16))
    own = adapter_shapes(layers, 16)
    whole_bytes, own_bytes = (4 * sum(map(np.prod, s.values())) for s in (shapes, own))
    assert (whole_bytes, own_bytes) == (538_060_032, 19_537_920)
