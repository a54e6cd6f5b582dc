"""Adapters on one GPU: trained, published and sampled with as on the CPU. Needs CUDA."""

import numpy as np
import pytest
import torch

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.engines.lora_config import LoraConfig, LoraSetup
from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import LearnerConfig, OptimizerConfig, TorchTrainConfig
from tests.support.generation import random_prompt
from tests.support.tiny_groups import random_group
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SETUP = LoraSetup(config=LoraConfig(rank=4), seed=1)


@pytest.mark.parametrize("forward", ["lean", "hf"])
@pytest.mark.parametrize(("dtype", "nats"), [("float32", 1e-3), ("bfloat16", 0.2)])
def test_what_was_trained_on_the_gpu_is_sampled_with_there(tmp_path, forward, dtype, nats):
    folder = write_tiny_model(tmp_path / "model")
    config = LearnerConfig(
        engine=TorchTrainConfig(device="cuda", dtype=dtype), optimizer=OptimizerConfig(lr=0.01)
    )
    objective = ObjectiveConfig(kind="grpo")
    learner = TorchTrainEngine(folder, config, objective=objective, lora=SETUP)
    rng = np.random.default_rng(0)
    for version in range(3):
        group = random_group(rng, version, rewards=[0.0, 1.0, 1.0, 0.0])
        learner.train_step([[group]], version)
    engine = TorchGenerationEngine(
        folder, TorchGenerationConfig(device="cuda", dtype=dtype, forward=forward), lora=SETUP
    )
    ids = random_prompt(1, 40)
    before = engine.score(ids)
    engine.swap(learner.weights(), 1, "keep")
    found = engine.score(ids)
    learner.export(tmp_path / "made")
    plain = TorchGenerationEngine(tmp_path / "made", TorchGenerationConfig(device="cpu"))
    np.testing.assert_allclose(found, plain.score(ids), atol=nats)
    assert np.abs(found - before).max() > 0.01
