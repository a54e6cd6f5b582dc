"""Packed weights: the same bits, the same products, and nothing of the weight they held before."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.lean_forward import LeanForward
from areal_ray.engines.live_weights import first_difference
from areal_ray.engines.model_files import load_config, load_tensors
from areal_ray.engines.packed_linear import PackedLinear, add_linear, is_packed, linear
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from tests.support.packed import flip_a_bit
from tests.support.tiny_models import WIDE, write_tiny_model

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(960, 576), (391, 1408), (1, 7)])
def test_unpacked_it_is_bit_for_bit_what_was_packed(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    weight[0, :4] = torch.tensor([-0.0, 1e-42, torch.inf, -torch.inf])
    expected = weight.clone()
    packed = PackedLinear(weight)
    weight.zero_()  # what was packed may be overwritten
    assert first_difference([("w", packed, expected)]) == ""
    packed.write(random(*shape, seed=1).t().contiguous().t())
    assert first_difference([("w", packed, random(*shape, seed=1))]) == ""
    assert first_difference([("w", packed, expected)]) == "w"


@pytest.mark.parametrize("num_rows", [1, 2, 16, 300])
def test_products_are_those_of_the_plain_weight(num_rows: int) -> None:
    weight, x, bias = random(960, 576), random(num_rows, 576, seed=1), random(960, seed=2)
    added = random(num_rows, 960, seed=3)
    packed = PackedLinear(weight)
    for made, expected in (
        (linear(x, packed, bias), linear(x, weight, bias)),
        (linear(x, packed, None), linear(x, weight, None)),
        (add_linear(added, x, packed, bias), add_linear(added, x, weight.t(), bias)),
    ):
        torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-5)


def test_one_bit_in_the_memory_that_products_read_is_seen() -> None:
    weight, x = random(960, 576), random(2, 576, seed=1)
    packed = PackedLinear(weight)
    before = linear(x, packed, None)
    flip_a_bit(packed)
    assert not torch.equal(linear(x, packed, None), before)
    assert first_difference([("w", packed, weight)]) == "w"


def test_large_float32_weights_of_a_cpu_alone_are_packed() -> None:
    assert is_packed(960, 576, torch.float32, CPU)
    assert not is_packed(576, 576, torch.float32, CPU)
    assert not is_packed(960, 576, torch.bfloat16, CPU)
    assert not is_packed(960, 576, torch.float32, torch.device("cuda"))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LeanForward, dict]:
    """A forward of packed weights after a swap, and what was swapped in."""
    folder = write_tiny_model(tmp_path, "qwen3", **WIDE, tie_word_embeddings=request.param)
    forward = load_generation_model(folder, TorchGenerationConfig()).forward
    assert isinstance(forward, LeanForward)
    loaded = load_tensors(folder, load_config(folder))
    tensors = {name: tensor * 1.5 for name, tensor in loaded.items()}
    forward.install(forward.prepare(tensors))
    assert first_difference(forward.live_pairs(tensors)) == ""
    return forward, tensors


@pytest.mark.parametrize("name", ["qkv", "o", "up_gate", "down", "head"])
def test_a_canary_sees_one_bit_of_any_packed_weight(
    live: tuple[LeanForward, dict], name: str
) -> None:
    forward, tensors = live
    weights = forward._weights
    assert weights is not None
    weight = weights.head if name == "head" else getattr(weights.layers[1], name)
    flip_a_bit(weight)
    told = "lm_head" if name == "head" else f"model.layers.1.{name}"
    assert first_difference(forward.live_pairs(tensors)) == told
    flip_a_bit(weight)
    assert first_difference(forward.live_pairs(tensors)) == ""


def test_a_canary_sees_a_packed_weight_of_the_version_before(
    live: tuple[LeanForward, dict],
) -> None:
    forward, tensors = live
    before = forward._weights
    tensors = {name: tensor + 1.0 for name, tensor in tensors.items()}
    after = forward.prepare(tensors)
    assert before is not None
    forward.install(replace(after, head=before.head))
    assert first_difference(forward.live_pairs(tensors)) == "lm_head"
    forward.install(replace(after, layers=[after.layers[0], before.layers[1]]))
    assert first_difference(forward.live_pairs(tensors)).startswith("model.layers.1.")
    forward.install(after)
    assert first_difference(forward.live_pairs(tensors)) == ""
