"""DeepSpeed on one GPU. Needs CUDA and the package."""

import pytest
import torch

from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import (
    DeepspeedConfig,
    LearnerConfig,
    OptimizerConfig,
    TorchTrainConfig,
)
from tests.support.needs import needs_deepspeed
from tests.support.tiny_models import write_tiny_model
from tests.support.train_conformance import examples_of

pytestmark = [
    needs_deepspeed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def _losses(folder, engine):
    config = LearnerConfig(engine=engine, optimizer=OptimizerConfig(lr=1e-3, eps=1e-4))
    trainer = TorchTrainEngine(folder, config)
    losses = [trainer.sft_step(examples_of(step)).metrics["learner/loss"] for step in range(3)]
    trainer.export(folder.parent / "export")
    trainer.close()
    return losses


@pytest.mark.parametrize(
    ("how", "tolerance"),
    [
        ({"zero_stage": 1}, 1e-3),
        ({"zero_stage": 2, "offload": "optimizer"}, 1e-3),
        ({"zero_stage": 3}, 1e-3),
        ({"zero_stage": 3, "offload": "all"}, 1e-3),
        ({"zero_stage": 2, "dtype": "bfloat16"}, 5e-2),
        ({"zero_stage": 3, "dtype": "bfloat16"}, 5e-2),
    ],
)
def test_zero_on_one_gpu_is_the_engine_on_the_cpu(tmp_path, monkeypatch, how, tolerance):
    monkeypatch.setenv("LOCAL_RANK", "1")  # of a process that sees one GPU
    folder = write_tiny_model(tmp_path / "model")
    expected = _losses(folder, TorchTrainConfig())
    found = _losses(folder, DeepspeedConfig(device="cuda", **how))
    assert found == pytest.approx(expected, rel=tolerance)
