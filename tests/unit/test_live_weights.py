"""Live tensors against those they were made from: any bit that differs is seen."""

from dataclasses import dataclass

import pytest
import torch

from areal_ray.engines.live_weights import first_difference

FORMS = {
    "matrix": torch.arange(24.0).reshape(4, 6),
    "transposed": torch.arange(24.0).reshape(4, 6).t(),
    "slice": torch.arange(25.0)[1:],
    "odd length": torch.arange(7, dtype=torch.uint8),
    "scalar": torch.tensor(2.5),
    "bfloat16": torch.arange(5.0).bfloat16(),
    "every second": torch.arange(24.0)[::2],
    "nan": torch.full((3, 3), torch.nan),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_bit_is_seen(form: str) -> None:
    live = FORMS[form]
    assert first_difference([("w", live, live.clone())]) == ""
    other = live.clone(memory_format=torch.preserve_format)
    bits = other.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[other.itemsize])
    bits[(-1,) * bits.dim()] ^= 1
    assert first_difference([("v", live, live), ("w", live, other)]) == "w"


def test_zero_is_not_negative_zero_and_neither_shape_nor_type_may_differ() -> None:
    zero = torch.zeros(2)
    for other in (-zero, zero.reshape(2, 1), zero.half(), zero.int()):
        assert first_difference([("w", zero, other)]) == "w"


def test_an_empty_tensor_is_equal_to_another() -> None:
    assert first_difference([("w", torch.zeros(0, 4), torch.zeros(0, 4))]) == ""


@dataclass
class Layer:
    """As an engine keeps one."""

    up: torch.Tensor
    bias: torch.Tensor | None


def test_within_a_layer_the_tensor_is_named() -> None:
    live, given = (Layer(torch.ones(2), None) for _ in range(2))
    assert first_difference([("0", live, given)]) == ""
    given.up = torch.zeros(2)
    assert first_difference([("0", live, given)]) == "0.up"
