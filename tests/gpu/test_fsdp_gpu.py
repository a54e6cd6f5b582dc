"""FSDP2 and what else the train engine has for GPUs alone. Needs CUDA; some need a package."""

import importlib.util

import pytest
import torch

from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import (
    FsdpConfig,
    LearnerConfig,
    OptimizerConfig,
    TorchTrainConfig,
)
from tests.support.tiny_models import write_tiny_model
from tests.support.train_conformance import examples_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def _losses(folder, engine, optimizer=None):
    config = LearnerConfig(engine=engine, optimizer=optimizer or OptimizerConfig(lr=1e-3, eps=1e-4))
    trainer = TorchTrainEngine(folder, config)
    losses = [trainer.sft_step(examples_of(step)).metrics["learner/loss"] for step in range(3)]
    trainer.export(folder.parent / "export")
    trainer.close()
    return losses


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "model", head_dim=32)


@pytest.fixture
def expected(folder):
    return _losses(folder, TorchTrainConfig())


@pytest.mark.parametrize(
    ("how", "tolerance"),
    [({}, 1e-3), ({"cpu_offload": True}, 1e-3), ({"dtype": "bfloat16"}, 5e-2)],
    ids=["float32", "offload", "bfloat16"],
)
def test_fsdp_on_one_gpu_is_the_engine_on_the_cpu(folder, expected, how, tolerance):
    found = _losses(folder, FsdpConfig(device="cuda", **how))
    assert found == pytest.approx(expected, rel=tolerance)


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
def test_sequences_end_to_end_through_flash_attn_are_rows_side_by_side(folder, expected):
    engine = TorchTrainConfig(device="cuda", dtype="bfloat16", attention="flash")
    assert _losses(folder, engine) == pytest.approx(expected, rel=5e-2)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_eight_bit_moments_train_about_as_well(folder, expected):
    optimizer = OptimizerConfig(name="adamw_8bit", lr=1e-3, eps=1e-4)
    found = _losses(folder, TorchTrainConfig(device="cuda"), optimizer)
    assert found == pytest.approx(expected, rel=5e-2)
