"""A generation engine writes each version over the one before the last, and never over others."""

from pathlib import Path
from typing import Any

import pytest
import torch

from areal_ray.engines.generation_model import load_generation_model
from areal_ray.engines.hf_forward import HfForward
from areal_ray.engines.lean_weights import LeanWeights
from areal_ray.engines.model_files import load_config, load_tensors
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from tests.support.tiny_models import WIDE, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("wide"), "qwen3", **WIDE)


def _version(folder: Path, version: int) -> dict[str, torch.Tensor]:
    tensors = load_tensors(folder, load_config(folder))
    return {name: tensor + version for name, tensor in tensors.items()}


def _parts(weights: Any) -> list[torch.Tensor]:
    if isinstance(weights, LeanWeights):
        return weights.blocks + [one.plain() for one in weights.packed]
    return list(weights.values())


def _places(weights: Any) -> set[int]:
    if isinstance(weights, LeanWeights):
        return {part.data_ptr() for part in weights.blocks} | {id(one) for one in weights.packed}
    return {part.data_ptr() for part in _parts(weights)}


@pytest.mark.parametrize("forward", ["lean", "packed", "hf"])
def test_versions_take_turns_in_two_memories_and_none_shows_in_another(
    folder, wide, forward
) -> None:
    if forward == "packed":
        folder, forward = wide, "lean"
    config = TorchGenerationConfig(forward=forward)
    used = load_generation_model(folder, config).forward
    made = []
    for version in range(1, 6):
        weights = used.prepare(_version(folder, version))
        if made:
            assert not _places(weights) & _places(made[-1])  # which is live
        used.install(weights)
        made.append(weights)
        fresh = load_generation_model(folder, config).forward.prepare(_version(folder, version))
        for part, expected in zip(_parts(weights), _parts(fresh), strict=True):
            assert torch.equal(part, expected)
    assert [_places(one) == _places(made[-1]) for one in made[1:]] == [False, True] * 2


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_version_that_is_never_installed_costs_the_live_one_nothing(
    folder, wide, is_wide
) -> None:
    folder = wide if is_wide else folder
    used = load_generation_model(folder, TorchGenerationConfig()).forward
    live = used.prepare(_version(folder, 1))
    used.install(live)
    kept = [part.clone() for part in _parts(live)]
    for version in (2, 3):
        used.prepare(_version(folder, version))
    assert all(torch.equal(part, old) for part, old in zip(_parts(live), kept, strict=True))


def test_what_was_loaded_is_never_written_to(folder) -> None:
    used = load_generation_model(folder, TorchGenerationConfig(forward="hf")).forward
    assert isinstance(used, HfForward)
    loaded = used.loaded_weights()
    before = {name: tensor.clone() for name, tensor in loaded.items()}
    for version in (1, 2, 3):
        used.install(used.prepare(_version(folder, version)))
    assert all(torch.equal(loaded[name], before[name]) for name in before)
