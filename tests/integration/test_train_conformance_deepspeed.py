"""DeepSpeed's ZeRO, at two ranks, is the same training as one rank that holds the model."""

import pytest

from areal_ray.engines.train_config import DeepspeedConfig, TorchTrainConfig
from tests.support.needs import needs_deepspeed
from tests.support.train_conformance import (
    TIMEOUT_S,
    Layout,
    asked_for,
    assert_same,
    names_of,
    run_layouts,
)

pytestmark = needs_deepspeed

HOW = {"max_tokens_per_mb": 80, "collective_timeout_s": TIMEOUT_S}
SMALL = {"zero_optimization": {"reduce_bucket_size": 20_000, "stage3_prefetch_bucket_size": 9_000}}
SPLIT = {"zero_optimization": {"stage3_param_persistence_threshold": 100}}
LAYOUTS = (
    Layout("torch 1", TorchTrainConfig(**HOW), 1, scenarios=("rl", "ppo", "sft", "dpo", "lora")),
    Layout("zero 0", DeepspeedConfig(zero_stage=0, **HOW), 2, "torch 1", scenarios=("rl",)),
    Layout("zero 1", DeepspeedConfig(zero_stage=1, **HOW), 2, "zero 0", scenarios=("rl", "dpo")),
    Layout(
        "zero 2", DeepspeedConfig(zero_stage=2, offload="optimizer", config=SMALL, **HOW), 2,
        "torch 1", scenarios=("rl", "ppo", "lora"),
    ),
    Layout(
        "zero 3", DeepspeedConfig(zero_stage=3, config=SPLIT, **HOW), 2,
        "zero 2", scenarios=("rl", "ppo", "sft", "lora"),
    ),
    Layout(
        "zero 3 alone", DeepspeedConfig(zero_stage=3, offload="all", **HOW), 1, "zero 3",
        scenarios=("rl",),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    return run_layouts(asked_for(request, LAYOUTS), tmp_path_factory.mktemp("zero"))


@pytest.mark.parametrize("name", names_of(LAYOUTS[1:], core=("zero 2",)))
def test_a_stage_trains_as_one_rank_that_holds_the_model(outcomes, name):
    assert_same(outcomes[name], outcomes["torch 1"])
