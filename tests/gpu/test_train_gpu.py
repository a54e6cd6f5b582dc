"""The train engine on one GPU: the same step as on the CPU. Needs CUDA."""

import numpy as np
import pytest
import torch

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import LearnerConfig, TorchTrainConfig
from tests.support.tiny_groups import random_group
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _step(folder, device, dtype):
    rng = np.random.default_rng(0)
    groups = [random_group(rng, number) for number in range(4)]
    config = LearnerConfig(engine=TorchTrainConfig(device=device, dtype=dtype))
    objective = ObjectiveConfig(kind="decoupled_ppo")
    engine = TorchTrainEngine(folder, config, objective=objective)
    return engine, engine.train_step([groups[:2], groups[2:]], 0).metrics


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_a_step_on_the_gpu_is_the_step_on_the_cpu(tmp_path, dtype, tolerance):
    folder = write_tiny_model(tmp_path / "model")
    _, expected = _step(folder, "cpu", "float32")
    engine, found = _step(folder, "cuda", dtype)
    for name in ("learner/ratio_mean", "learner/grad_norm_max", "learner/entropy_nats"):
        assert found[name] == pytest.approx(expected[name], rel=tolerance), name
    assert found["learner/updates"] == 2
    assert all(tensor.isfinite().all() for tensor in engine.weights().values())


def test_a_checkpoint_written_on_the_gpu_resumes_on_the_cpu(tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    engine, _ = _step(folder, "cuda", "float32")
    (tmp_path / "saved").mkdir()
    engine.save(tmp_path / "saved")
    resumed = TorchTrainEngine(tmp_path / "saved", LearnerConfig())
    resumed.load(tmp_path / "saved")
    assert resumed.steps_taken == 1
    for name, tensor in resumed.weights().items():
        torch.testing.assert_close(tensor, engine.weights()[name].cpu())
