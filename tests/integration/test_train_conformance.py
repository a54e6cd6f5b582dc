"""Every kind of train engine, on any number of ranks, is one and the same training.

A kind plugs in with a line in LAYOUTS.
"""

import pytest
import torch

from areal_ray.engines.train_config import FsdpConfig, TorchTrainConfig
from tests.support.train_conformance import (
    PATIENCE_S,
    TIMEOUT_S,
    Layout,
    asked_for,
    assert_same,
    names_of,
    run_layouts,
)

pytestmark = pytest.mark.timeout(PATIENCE_S + 60)

HOW = {"max_tokens_per_mb": 80, "collective_timeout_s": TIMEOUT_S}
HALF = Layout(
    "fsdp 2, bfloat16",
    FsdpConfig(dtype="bfloat16", **HOW),
    2,
    scenarios=("ppo", "sft", "reward_model"),
)
LAYOUTS = (
    Layout("torch 1", TorchTrainConfig(**HOW)),
    Layout("torch 2", TorchTrainConfig(**HOW), 2, resumes="torch 1", scenarios=("rl", "ppo")),
    Layout("fsdp 1", FsdpConfig(**HOW), 1, resumes="torch 2", scenarios=("rl", "ppo", "dpo")),
    Layout("fsdp 2", FsdpConfig(**HOW), 2, resumes="torch 1"),
    Layout(
        "fsdp 2, checkpointing",
        FsdpConfig(gradient_checkpointing=True, reshard_after_forward=False, **HOW),
        2,
        scenarios=("ppo", "sft"),
    ),
    Layout(
        "fsdp 2, tensor 2",
        FsdpConfig(tensor_parallel=2, **HOW),
        2,
        resumes="fsdp 2",
        scenarios=("rl", "ppo"),
    ),
    Layout(
        "fsdp 4, tensor 2",
        FsdpConfig(tensor_parallel=2, **HOW),
        4,
        resumes="fsdp 2, tensor 2",
        scenarios=("rl",),
    ),
    Layout(
        "fsdp 2, sequence 2",
        FsdpConfig(sequence_parallel=2, **HOW),
        2,
        resumes="fsdp 2",
        scenarios=("rl", "ppo"),
    ),
    Layout(
        "fsdp 4, sequence 2",
        FsdpConfig(sequence_parallel=2, gradient_checkpointing=True, **HOW),
        4,
        resumes="fsdp 2, sequence 2",
        resumes_lora="fsdp 2",
    ),
    Layout(
        "fsdp 4",
        FsdpConfig(**HOW),
        4,
        resumes="fsdp 4, tensor 2",
        resumes_lora="fsdp 2",
        scenarios=("rl", "ppo", "sft", "dpo", "lora"),
    ),
)


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory):
    layouts = asked_for(request, (*LAYOUTS, HALF))
    return run_layouts(layouts, tmp_path_factory.mktemp("conformance"))


@pytest.mark.parametrize("name", names_of(LAYOUTS[1:], core=("fsdp 2", "fsdp 2, sequence 2")))
def test_a_layout_trains_as_one_rank_that_holds_the_model(outcomes, name):
    assert_same(outcomes[name], outcomes["torch 1"])


@pytest.mark.extended
@pytest.mark.parametrize("name", [HALF.name])
def test_bfloat16_comes_near_it(outcomes, name):
    for scenario, outcome in outcomes[name].items():
        expected = outcomes["torch 1"][scenario]
        for one, other in zip(outcome.metrics, expected.metrics, strict=True):
            assert one["learner/loss"] == pytest.approx(other["learner/loss"], rel=0.05, abs=0.02)
        for tensor_name, tensor in outcome.weights.items():
            assert tensor.dtype == torch.float32
            distance = (tensor - expected.weights[tensor_name]).abs().mean()
            assert float(distance) < 5e-4, (scenario, tensor_name)


@pytest.mark.parametrize("name", ["fsdp 2", pytest.param("fsdp 4", marks=pytest.mark.extended)])
def test_a_sharded_rank_holds_its_part_of_all_models_and_moments(outcomes, name):
    ranks = int(name[-1])
    for scenario, outcome in outcomes[name].items():
        for what in ("learner/parameter_bytes", "learner/optimizer_bytes"):
            share = outcome.held[what] / outcomes["torch 1"][scenario].held[what]
            assert 0.99 / ranks < share < 1.1 / ranks, (scenario, what)


@pytest.mark.parametrize("name", ["fsdp 2, sequence 2"])  # which resumes from the other
def test_a_rank_of_a_sequence_keeps_the_activations_of_its_slice(outcomes, name):
    whole, sliced = outcomes["fsdp 2"]["rl"], outcomes[name]["rl"]
    kept = "learner/activation_bytes"
    assert 0.4 < sliced.held[kept] / whole.held[kept] < 0.75


def test_what_is_compared_moves(outcomes):
    alone = outcomes["torch 1"]
    for scenario, outcome in alone.items():
        losses = [m["learner/loss"] for m in outcome.metrics]
        assert len({round(loss, 6) for loss in losses}) == len(losses), scenario
    assert [m["learner/updates"] for m in alone["rl"].metrics].count(2) >= 3
    assert alone["ppo"].metrics[-1]["learner/value_loss"] > 0
