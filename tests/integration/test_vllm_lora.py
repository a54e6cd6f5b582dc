"""vLLM under adapters: log-probs of peft's own layers, versions exact across a swap in mid-turn."""

import importlib.util

import numpy as np
import pytest
import torch

from areal_ray.engines.lora import Adapters
from areal_ray.engines.lora_config import LoraConfig, LoraSetup
from areal_ray.engines.vllm_generation_config import VllmGenerationConfig
from areal_ray.errors import EngineError
from tests.support.generation import Served, hf_logprobs, hf_model, random_prompt, request
from tests.support.lora import random_adapters
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
)
CONFIG = LoraConfig(rank=4, alpha=8, rslora=True)


def peft_model(folder, tensors):
    model = hf_model(folder)
    adapters = Adapters(model, LoraSetup(config=CONFIG))
    with torch.no_grad():
        for name, parameter in adapters.trained(dict(model.named_parameters())).items():
            parameter.copy_(tensors[name])
    return model, adapters


@pytest.mark.extended
def test_it_samples_from_the_adapters_of_each_version(tmp_path):
    from areal_ray.engines.vllm_generation import VllmGenerationEngine

    folder = write_tiny_model(tmp_path / "model", head_dim=64, num_key_value_heads=1)
    large = LoraSetup(config=LoraConfig(rank=600))
    with pytest.raises(EngineError, match="must be <= 512 with"):
        VllmGenerationEngine(folder, VllmGenerationConfig(), lora=large)
    shapes = {name: tuple(t.shape) for name, t in fresh_adapters(folder).items()}
    versions = {v: random_adapters(shapes, seed=v) for v in (3, 4, 5)}
    models = {v: peft_model(folder, tensors) for v, tensors in versions.items()}
    model, adapters = models[3]
    adapters.write(tmp_path / "checkpoint", dict(model.named_parameters()))
    engine = VllmGenerationEngine(
        folder,
        VllmGenerationConfig(max_context_tokens=512),
        version=3,
        lora=LoraSetup(config=CONFIG, folder=str(tmp_path / "checkpoint")),
    )
    try:
        assert dict(engine.weight_shapes()) == shapes
        served = Served(engine)
        engine.start(served.receive)
        sent = [
            request(f"r{i}", random_prompt(i, 6 + i), seed=i, max_new_tokens=400) for i in range(3)
        ]
        short = [request(f"s{v}", random_prompt(9, 40), seed=9, max_new_tokens=5) for v in versions]
        results = served.run(short[:1])
        engine.submit(sent)
        for version, one in zip((4, 5), short[1:], strict=True):
            engine.swap(versions[version], version, "recompute")
            results += served.run([one])
            ids = random_prompt(version, 30)
            expected = token_logprobs(models[version][0], ids)
            np.testing.assert_allclose(engine.score(ids), expected, atol=1e-5)
        with pytest.raises(EngineError, match="not in the model"):
            engine.swap({"model.norm.weight": torch.ones(64)}, 6, "keep")
        long = served.wait(*(one.request_id for one in sent))
    finally:
        engine.close()
    # The same prompt under each version: no block of another one's keys and values is used.
    for version, one, result in zip(versions, short, results, strict=True):
        assert set(result.versions) == {version}
        expected = hf_logprobs(models[version][0], one, result)[0]
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-5)
    for one, result in zip(sent, long, strict=True):
        assert result.versions.tolist() == sorted(result.versions)
        for version, (model, _) in models.items():
            own = result.versions == version
            expected = hf_logprobs(model, one, result)[0]
            np.testing.assert_allclose(result.logprobs[own], expected[own], atol=1e-5)
    assert any(len(set(result.versions)) > 1 for result in long), "swapped in no turn"


def fresh_adapters(folder):
    model = hf_model(folder)
    return Adapters(model, LoraSetup(config=CONFIG)).trained(dict(model.named_parameters()))


def token_logprobs(model, ids):
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        table = torch.log_softmax(model(tokens[None]).logits[0, :-1], -1)
    return table.gather(1, tokens[1:, None])[:, 0].numpy()
