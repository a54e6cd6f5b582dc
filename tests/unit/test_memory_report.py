"""What the memory metrics say is what is there."""

import numpy as np
import pytest
import torch

from areal_ray.engines.sft import SftExample
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import LearnerConfig, TorchTrainConfig
from tests.support.tiny_models import write_tiny_model

NAMES = ("parameter", "optimizer", "activation")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def _told(folder, num_tokens, **engine):
    trainer = TorchTrainEngine(folder, LearnerConfig(engine=TorchTrainConfig(**engine)))
    example = SftExample(np.arange(4, 4 + num_tokens, dtype=np.int32), np.ones(num_tokens, bool))
    metrics = trainer.sft_step([example]).metrics
    return trainer, {n: metrics[f"learner/{n}_bytes"] for n in NAMES}


def test_parameters_and_moments_are_counted_to_the_byte(folder):
    trainer, told = _told(folder, 20)
    weights = trainer.weights().values()
    count = sum(tensor.numel() for tensor in weights)
    buffers = 2 * 16 * 4  # the rotary frequencies, and Transformers' copy of them
    assert told["parameter"] == 4 * count + buffers
    assert told["optimizer"] == 2 * 4 * count + 4 * len(weights)  # and a step count for each


def test_activations_grow_with_the_tokens_and_shrink_with_checkpointing(folder):
    short, long = (_told(folder, n)[1]["activation"] for n in (50, 150))
    assert 2.5 * short < long < 4.5 * short
    assert _told(folder, 150, gradient_checkpointing=True)[1]["activation"] < 0.6 * long


def test_what_a_pass_keeps_is_what_autograd_saves():
    from areal_ray.engines.memory_report import ActivationMeter

    layer = torch.nn.Linear(8, 4)
    meter = ActivationMeter(layer, torch.device("cpu"))
    inputs = torch.randn(16, 8)
    with meter.over(16):
        layer(inputs).exp().sum()
    assert meter.most_bytes == 16 * 8 * 4 + 16 * 4 * 4  # the input, and what exp returned
    with meter.over(15):  # smaller: not looked at
        torch.randn(1000, 8, requires_grad=True).exp().sum()
    with torch.no_grad(), meter.over(1000):
        layer(torch.randn(1000, 8)).exp().sum()
    assert meter.most_bytes == 16 * 8 * 4 + 16 * 4 * 4
