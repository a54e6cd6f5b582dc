"""Packed weights: the same bits, the same products, and nothing of the weight they held before."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.lean_forward import LeanForward
from areal_ray.engines.lean_room import ProvingRoom, Room
from areal_ray.engines.model_files import load_config, load_tensors
from areal_ray.engines.packed_linear import PackedLinear, add_linear, is_packed, linear
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from tests.support.packed import flip_a_bit
from tests.support.tiny_models import WIDE, write_tiny_model

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slices(packed: PackedLinear, weight: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    rows = packed.slice_rows
    return [(i, weight[i : i + rows]) for i in range(0, len(weight), rows)]


SHAPES = [(960, 576), (3391, 1408), (1000, 3), (1, 7)]
"""One slice and several, the last of them whole blocks of rows and not."""


@pytest.mark.parametrize("shape", SHAPES)
def test_it_holds_what_was_packed_whole_or_written_in_slices(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    weight[0, :3] = torch.tensor([-0.0, 1e-42, -torch.inf])
    first, second = weight.clone(), random(*shape, seed=1)
    packed = PackedLinear(weight)
    weight.zero_()  # what was packed may be overwritten
    place = packed.address
    assert torch.equal(packed.plain().view(torch.int32), first.view(torch.int32))
    assert all(packed.holds(*one) for one in slices(packed, first))
    assert not any(packed.holds(*one) for one in slices(packed, second))
    second.view(torch.int32)[-1, :3] = torch.tensor([0x7FC01234, -(2**31), 1])  # a NaN, -0.0, tiny
    for i, rows in slices(packed, second.t().contiguous().t()):
        packed.write(i, rows)
    assert packed.address == place
    assert torch.equal(packed.plain().view(torch.int32), second.view(torch.int32))
    assert all(packed.holds(*one) for one in slices(packed, second))
    assert all(PackedLinear(second).holds(*one) for one in slices(packed, second))


def test_large_weights_are_held_in_slices_of_a_caches_size() -> None:
    assert PackedLinear(random(3391, 1408)).slice_rows < 400


@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
def test_a_room_fills_and_proves_slices_on_several_threads_to_the_last_bit(
    sent: torch.dtype,
) -> None:
    weight, other = random(3391, 1408).to(sent), random(3391, 1408, seed=1).to(sent)
    with torch.inference_mode():
        with Room([], [], torch.float32, CPU) as first:
            made = first.pack(other)
        with Room([], first.packed, torch.float32, CPU) as second:
            assert second.pack(weight) is made
        assert torch.equal(made.plain(), weight.float())
        for place in (None, 0, 3391 * 1408 - 1):
            if place is not None:
                flip_a_bit(made, place)
            with ProvingRoom([], second.packed, torch.float32, CPU) as proving:
                assert proving.pack(weight) is made
            assert proving.differing == (set() if place is None else {made.address})
            if place is not None:
                flip_a_bit(made, place)


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
    assert not packed.holds(0, weight)


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
    assert forward.differing(tensors) == ""
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
    assert forward.differing(tensors) == told
    flip_a_bit(weight)
    assert forward.differing(tensors) == ""


def test_a_canary_sees_a_packed_weight_of_the_version_before(
    live: tuple[LeanForward, dict],
) -> None:
    forward, tensors = live
    before = forward._weights
    tensors = {name: tensor + 1.0 for name, tensor in tensors.items()}
    after = forward.prepare(tensors)
    assert before is not None
    forward.install(replace(after, head=before.head))
    assert forward.differing(tensors) == "lm_head"
    forward.install(replace(after, layers=[after.layers[0], before.layers[1]]))
    assert forward.differing(tensors).startswith("model.layers.1.")
    forward.install(after)
    assert forward.differing(tensors) == ""
