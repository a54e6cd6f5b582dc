"""Adapters as tensors: their names, what they add to a model's weights, and their files.

An adapter of the layer `x.q_proj` is `x.q_proj.lora_A.weight` [rank, in] and
`x.q_proj.lora_B.weight` [out, rank]; it adds scale * B A to `x.q_proj.weight`. In files the names
begin with `base_model.model.`, as peft writes and vLLM reads them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal_ray.engines.lora_config import (
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS,
    LoraConfig,
    layers_in,
)
from areal_ray.errors import DataError

_IN_FILES = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A layer that can have an adapter."""

    out_size: int
    in_size: int
    is_transposed: bool = False
    """Whether its weight is kept as [in, out] (GPT-2)."""


def linear_layers(model: Any) -> dict[str, LinearLayer]:
    """Every linear layer of a Hugging Face model by name, but not its head."""
    from transformers.pytorch_utils import Conv1D

    heads = {id(model.get_output_embeddings()), id(getattr(model, "score", None))}
    found: dict[str, LinearLayer] = {}
    for name, module in model.named_modules():
        if id(module) in heads:
            continue
        if isinstance(module, nn.Linear):
            found[name] = LinearLayer(*module.weight.shape)
        elif isinstance(module, Conv1D):
            in_size, out_size = module.weight.shape
            found[name] = LinearLayer(out_size, in_size, is_transposed=True)
    return found


def plain_layers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, LinearLayer]:
    """The same by the tensors of a checkpoint, for a family whose weights are [out, in]."""
    found = {}
    for name in layers_in(shapes):
        out_size, in_size = shapes[f"{name}.weight"]
        found[name] = LinearLayer(out_size, in_size)
    return found


def adapted_layers(layers: Mapping[str, LinearLayer], config: LoraConfig) -> dict[str, LinearLayer]:
    """Those of a model's linear layers that get adapters.

    Raises:
        RecipeError: A target of the recipe is none of them.
    """
    return {name: layers[name] for name in config.adapted(layers)}


def adapter_shapes(layers: Mapping[str, LinearLayer], rank: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of these layers' adapters."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, layer in layers.items():
        shapes[name + _DOWN] = (rank, layer.in_size)
        shapes[name + _UP] = (layer.out_size, rank)
    return shapes


def added_weight(
    layer: str, tensors: Mapping[str, Tensor], scale: float, *, is_transposed: bool, like: Tensor
) -> Tensor:
    """scale * B A, shaped as the layer's weight; where `like` is, in float32 at the least.

    Args:
        layer: Its name.
        tensors: Adapters by name.
        scale: Of the recipe.
        is_transposed: Whether the weight is kept as [in, out].
        like: Says where to compute, and in which type if that is wider.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    down = tensors[layer + _DOWN].detach().to(like.device, dtype)
    up = tensors[layer + _UP].detach().to(like.device, dtype)
    added = (up @ down).mul_(scale)
    return added.t() if is_transposed else added


class MergedWeights(Mapping[str, Tensor]):
    """A model's tensors with adapters in them, each made when it is asked for.

    Nothing of the kept weights is changed, so that any number of versions adds no rounding.
    """

    def __init__(
        self,
        kept: Mapping[str, Tensor],
        layers: Mapping[str, LinearLayer],
        adapters: Mapping[str, Tensor],
        scale: float,
        device: torch.device | None = None,
    ) -> None:
        """Tensors by name, those of `layers` adapted; `device`: where sums are made."""
        self._kept = kept
        self._layers = {f"{name}.weight": (name, layer) for name, layer in layers.items()}
        self._adapters = adapters
        self._scale = scale
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        kept = self._kept[name]
        if name not in self._layers:
            return kept
        layer, shape = self._layers[name]
        there = kept.detach().to(self._device or kept.device)
        added = added_weight(
            layer, self._adapters, self._scale, is_transposed=shape.is_transposed, like=there
        )
        return there.to(added.dtype) + added

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def write_adapter_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors into an adapter's folder."""
    from safetensors.torch import save_file

    named = {_IN_FILES + name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def read_adapters(checkpoint: Path | str) -> dict[str, Tensor]:
    """Every tensor of the adapters in a checkpoint.

    Raises:
        DataError: There are none that can be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(checkpoint) / ADAPTER_FOLDER / ADAPTER_WEIGHTS
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{file}: holds no adapters that can be read: {error}; must be of a checkpoint of a "
            "run with model.lora. Resume from another step, or without model.lora."
        ) from error
    return {name.removeprefix(_IN_FILES): tensor for name, tensor in found.items()}
