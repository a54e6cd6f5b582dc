"""The engine samples what Transformers would, and says with which probability."""

import numpy as np
import pytest
import torch

from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.hf_forward import HfForward
from areal_ray.engines.lean_forward import LeanForward
from areal_ray.engines.model_files import load_config, load_tensors
from areal_ray.engines.packed_linear import PackedLinear
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import LearnerConfig
from areal_ray.errors import EngineError
from tests.support.generation import hf_logprobs, hf_model, random_prompt, request, serving
from tests.support.tiny_models import WIDE, write_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": ("llama", {}),
    "llama-gqa-biases": (
        "llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3-gqa": ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "mistral-gqa": ("mistral", {"num_key_value_heads": 1}),
    # SmolLM2: a tied Llama of three query heads to a key head, and odd sizes.
    "smollm2": (
        "llama",
        {
            "hidden_size": 72,
            "head_dim": 8,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    ),
    "packed": ("qwen3", WIDE),
    "packed-biases": (
        "llama",
        {**WIDE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "sliding_window": 256}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 32, "sliding_window": 256}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25}),
    "gpt2": ("gpt2", {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny_model(root / name, architecture, seed=3, **fields)
        for name, (architecture, fields) in MODELS.items()
    }


def mixed_requests(count: int) -> list:
    lengths = np.random.default_rng(1).integers(1, 60, (count, 2))
    return [
        request(
            f"r{i}",
            random_prompt(i, int(prompt)),
            seed=i,
            temperature=(1.0, 0.7, 0.0)[i % 3],
            max_new_tokens=int(limit),
        )
        for i, (prompt, limit) in enumerate(lengths)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_greedy_tokens_are_those_of_transformers(folders, name):
    model = hf_model(folders[name])
    sent = mixed_requests(18)
    # Few slots and a small prefill budget: turns enter and leave at any step.
    with serving(folders[name], max_slots=5, max_prefill_tokens_per_step=64) as served:
        results = served.run(sent)
    for one, result in zip(sent, results, strict=True):
        assert not result.error
        logprobs, greedy = hf_logprobs(model, one, result)
        np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)
        if one.sampling.temperature == 0.0:
            np.testing.assert_array_equal(result.token_ids, greedy)


@pytest.mark.parametrize("name", sorted({*MODELS} - {"llama", "llama3-rope"}))
def test_greedy_equals_generate_of_transformers(folders, name):
    model, prompt = hf_model(folders[name]), random_prompt(7, 23)
    with torch.no_grad():
        expected = model.generate(
            torch.from_numpy(prompt.astype(np.int64))[None], do_sample=False, max_new_tokens=40
        )
    with serving(folders[name]) as served:
        (result,) = served.run([request("a", prompt, temperature=0.0, max_new_tokens=40)])
    np.testing.assert_array_equal(result.token_ids, expected[0, len(prompt) :].numpy())


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_greedy_with_a_repetition_penalty_equals_generate_of_transformers(folders, name):
    model, prompt = hf_model(folders[name]), random_prompt(7, 23)
    with torch.no_grad():
        expected = model.generate(
            torch.from_numpy(prompt.astype(np.int64))[None],
            do_sample=False,
            max_new_tokens=40,
            repetition_penalty=1.4,
        )
    sent = [
        request("p", prompt, temperature=0.0, max_new_tokens=40, repetition_penalty=1.4),
        request("q", prompt, temperature=0.0, max_new_tokens=40),
    ]
    with serving(folders[name]) as served:
        penalised, plain = served.run(sent)
    np.testing.assert_array_equal(penalised.token_ids, expected[0, len(prompt) :].numpy())
    assert penalised.token_ids.tolist() != plain.token_ids.tolist()


def test_filters_penalties_and_biases_leave_the_recorded_logprob_the_policys_own(folders):
    model = hf_model(folders["qwen3"])
    ways = [
        {"min_p": 0.3},
        {"min_p": 0.1, "temperature": 0.7, "top_k": 20},
        {"presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"repetition_penalty": 1.5, "temperature": 1.3, "top_p": 0.9},
        {"logit_bias": {"17": 100.0}},
        {"logit_bias": {"17": -100.0, "40": 5.0}, "temperature": 0.0},
        {},
    ]
    sent = [
        request(f"r{i}", random_prompt(i, 10 + 3 * i), seed=i, max_new_tokens=20 + i, **way)
        for i, way in enumerate(ways)
    ]
    # Fewer slots than requests: rows move while the others' penalties count on.
    with serving(folders["qwen3"], max_slots=4) as served:
        results = served.run(sent)
    for one, result in zip(sent, results, strict=True):
        assert not result.error
        np.testing.assert_allclose(result.logprobs, hf_logprobs(model, one, result)[0], atol=1e-4)
    assert set(results[4].token_ids.tolist()) == {17}
    assert 17 not in results[5].token_ids


def test_a_bias_of_a_token_beyond_the_vocabulary_comes_back_naming_the_request(folders):
    with serving(folders["qwen3"]) as served:
        bad, good = served.run(
            [request("bad", [5], logit_bias={"384": 1.0}), request("good", [5, 6])]
        )
    assert bad.error.startswith("request bad: logit_bias: names token 384; must be in 0..383")
    assert not good.error


def test_the_common_family_takes_the_lean_forward_and_others_their_own(folders):
    def forward_of(name, **config):
        return load_generation_model(folders[name], TorchGenerationConfig(**config)).forward

    assert isinstance(forward_of("qwen3"), LeanForward)
    assert isinstance(forward_of("qwen3", forward="hf"), HfForward)
    assert isinstance(forward_of("gpt2"), HfForward)
    with pytest.raises(EngineError, match="is lean, but the model has model_type gpt2"):
        forward_of("gpt2", forward="lean")


@pytest.mark.parametrize("name", ["packed", "packed-biases", "qwen3"])
def test_large_weights_are_packed_and_small_ones_are_not(folders, name):
    forward = load_generation_model(folders[name], TorchGenerationConfig()).forward
    weights = forward.prepare(load_tensors(folders[name], load_config(folders[name])))
    linear = [w for one in weights.layers for w in (one.qkv, one.o, one.up_gate, one.down)]
    kinds = {type(weight) for weight in (*linear, weights.head)}
    assert kinds == {torch.Tensor if name == "qwen3" else PackedLinear}


def test_lean_and_own_forward_of_one_model_name_the_same_weights(folders):
    for name in ("llama-gqa-biases", "qwen2", "qwen3-gqa", "mistral-gqa"):
        shapes = [
            load_generation_model(
                folders[name], TorchGenerationConfig(forward=which)
            ).forward.weight_shapes()
            for which in ("lean", "hf")
        ]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", sorted({*MODELS} - {"llama", "llama3-rope"}))
def test_what_the_learner_publishes_of_each_family_is_what_a_swap_takes(folders, name, tmp_path):
    architecture, fields = MODELS[name]
    other = write_tiny_model(tmp_path / "other", architecture, seed=4, **fields)
    learner = TorchTrainEngine(other, LearnerConfig())
    sent = request("a", random_prompt(0, 30), seed=3, max_new_tokens=30)
    with serving(folders[name]) as served:
        served.engine.swap(learner.weights(), 1, "keep")
        (result,) = served.run([sent])
    assert set(result.versions.tolist()) == {1}
    logprobs, _ = hf_logprobs(hf_model(other), sent, result)
    np.testing.assert_allclose(result.logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3-gqa", "gemma", "gemma3"])
def test_a_next_turn_over_kept_keys_and_values_has_the_logprobs_of_a_fresh_start(folders, name):
    model = hf_model(folders[name])
    first = [request(f"t1-{i}", random_prompt(0, 30), seed=i, key="g") for i in range(4)]
    with serving(folders[name]) as served:
        turns = served.run(first)
        second = [
            request(
                f"t2-{i}",
                np.concatenate([first[i].prompt_ids, turn.token_ids, random_prompt(50 + i, 9)]),
                seed=i,
                key="g",
                max_new_tokens=20,
            )
            for i, turn in enumerate(turns)
        ]
        results = served.run(second)
    for sent, result in zip(second, results, strict=True):
        np.testing.assert_allclose(result.logprobs, hf_logprobs(model, sent, result)[0], atol=1e-4)


def test_a_sibling_that_enters_late_copies_the_prompt_of_a_running_one(folders):
    model, prompt = hf_model(folders["qwen3"]), random_prompt(3, 40)
    with serving(folders["qwen3"]) as served:
        long = request("long", prompt, seed=1, key="g", max_new_tokens=200)
        probe = request("probe", random_prompt(4, 5), max_new_tokens=1)
        served.run_until("probe", [long, probe])
        served.engine.resume()
        late = request("late", prompt, seed=2, key="g", max_new_tokens=30)
        (result,) = served.run([late])
    np.testing.assert_allclose(result.logprobs, hf_logprobs(model, late, result)[0], atol=1e-4)


def test_half_precision_stays_near_full_precision(folders):
    model, sent = hf_model(folders["qwen3-gqa"]), request("a", random_prompt(5, 30))
    with serving(folders["qwen3-gqa"], dtype="bfloat16") as served:
        (result,) = served.run([sent])
    difference = np.abs(result.logprobs - hf_logprobs(model, sent, result)[0])
    assert difference.mean() < 0.05
