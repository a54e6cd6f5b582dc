"""Weights that are made while they arrive: the same bits, and nothing of what never arrived."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from areal_ray.engines.arriving import Abandoned, ArrivingTensors
from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.lean_forward import LeanForward
from areal_ray.engines.made_ahead import MadeAhead
from areal_ray.engines.model_files import load_config, load_tensors
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from tests.support.packed import flip_a_bit
from tests.support.tiny_models import WIDE, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    write_tiny_model(folder, "qwen3", **WIDE)
    return folder


@pytest.fixture
def forward(folder: Path) -> Iterator[LeanForward]:
    with torch.inference_mode():
        forward = load_generation_model(folder, TorchGenerationConfig()).forward
        assert isinstance(forward, LeanForward)
        yield forward


def tensors_of(folder: Path, factor: float = 1.0) -> dict[str, Tensor]:
    loaded = load_tensors(folder, load_config(folder))
    return {name: tensor * factor for name, tensor in loaded.items()}


def arriving(tensors: Mapping[str, Tensor], num_there: int | None = None) -> ArrivingTensors:
    """With so many of them there; None = all."""
    ends = {name: index + 1 for index, name in enumerate(tensors)}
    found = ArrivingTensors(tensors, ends)
    found.advance(len(tensors) if num_there is None else num_there)
    return found


def swapped(forward: LeanForward, ahead: MadeAhead, tensors: Mapping[str, Tensor]) -> None:
    forward.install(ahead.take(tensors))


def test_one_that_is_asked_for_is_waited_for_and_given_up_with_the_rest(folder: Path) -> None:
    tensors = tensors_of(folder)
    first, second, *_ = tensors
    coming = arriving(tensors, 0)
    assert (len(coming), [*coming]) == (len(tensors), [*tensors])
    threading.Timer(0.05, coming.advance, [1]).start()
    assert coming[first] is tensors[first]
    threading.Timer(0.05, coming.abandon).start()
    with pytest.raises(Abandoned):
        coming[second]
    assert coming[first] is tensors[first]


def test_what_is_made_beside_the_arrival_is_what_a_swap_makes(
    folder: Path, forward: LeanForward
) -> None:
    ahead = MadeAhead(forward)
    for factor in (1.5, 2.0, 2.5):  # the third goes over memory of the first
        coming = arriving(tensors_of(folder, factor), 0)
        maker = threading.Thread(target=inferring, args=(ahead.make, coming))
        maker.start()
        for num_there in range(1, len(coming) + 1):
            coming.advance(num_there)
        maker.join()
        swapped(forward, ahead, coming)
        assert forward.differing(coming) == ""
        assert forward.differing(tensors_of(folder, factor)) == ""  # each made once more
        assert forward.differing(tensors_of(folder, 1.0)) != ""


def test_what_nobody_took_or_never_arrived_is_not_put_in_place(
    folder: Path, forward: LeanForward
) -> None:
    ahead = MadeAhead(forward)
    for factor in (1.5, 2.0):
        swapped(forward, ahead, arriving(tensors_of(folder, factor)))
    live = tensors_of(folder, 2.0)
    broken = arriving(tensors_of(folder, 3.0), len(live) - 2)
    broken.abandon()
    with pytest.raises(Abandoned):
        ahead.make(broken)
    ahead.make(arriving(tensors_of(folder, 4.0)))  # and then is discarded
    assert forward.differing(live) == ""
    swapped(forward, ahead, arriving(tensors_of(folder, 5.0)))
    assert forward.differing(tensors_of(folder, 5.0)) == ""


def test_a_slice_of_another_version_or_with_another_bit_is_seen(
    folder: Path, forward: LeanForward
) -> None:
    ahead = MadeAhead(forward)
    given = tensors_of(folder, 1.5)
    first, second = arriving(given), arriving(given)
    for coming in (first, second):
        swapped(forward, ahead, coming)
    assert forward.differing(second) == ""
    weights = forward.prepare(first)
    forward.install(weights)
    packed = weights.layers[0].up_gate
    given["model.layers.0.mlp.up_proj.weight"] *= 2  # memory that another version came into
    assert forward.differing(first) == ""  # as was staged: nothing is made again
    assert forward.differing(second) == "model.layers.0.up_gate"
    flip_a_bit(packed)
    assert forward.differing(first) == "model.layers.0.up_gate"


def inferring(function, *given) -> None:
    with torch.inference_mode():
        function(*given)
