"""LoraForward: a forward of the torch generation engine whose versions are adapters alone.

The base weights are kept as loaded; a version's weights are made from them and its adapters beside
the live ones, so that sampling costs what it does without adapters.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from areal_ray.engines.cached_model import Forward
from areal_ray.engines.kv_cache import KVCache
from areal_ray.engines.lora_config import LoraSetup
from areal_ray.engines.lora_weights import (
    LinearLayer,
    MergedWeights,
    adapter_shapes,
    read_adapters,
)
from areal_ray.engines.model_files import check_tensors
from areal_ray.engines.token_block import TokenBlock


class LoraForward:
    """A `Forward` that `prepare`s a version from its adapters."""

    def __init__(
        self,
        forward: Forward,
        kept: Mapping[str, Tensor],
        layers: Mapping[str, LinearLayer],
        setup: LoraSetup,
        device: torch.device,
    ) -> None:
        """Take over a forward with the base weights installed.

        Args:
            forward: What computes.
            kept: Base weights by name: all that `forward.prepare` needs.
            layers: Those with adapters.
            setup: Rank and scale, and adapters to begin with.
            device: Where the forward computes.

        Raises:
            DataError: The adapters to begin with cannot be read.
            EngineError: They are not of this model.
        """
        self._layers = dict(layers)
        self._forward = forward
        self._kept = kept
        self._config = setup.config
        self._device = device
        self.cache_shape = forward.cache_shape
        if setup.folder:
            tensors = read_adapters(setup.folder)
            check_tensors(self.weight_shapes(), tensors)
            self.install(self.prepare(tensors))

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the adapters."""
        return adapter_shapes(self._layers, self._config.rank)

    def prepare(self, tensors: Mapping[str, Tensor]) -> Any:
        """The weights that checked adapters make, ready to be put in place."""
        return self._forward.prepare(self._merged(tensors))

    def differing(self, tensors: Mapping[str, Tensor]) -> str:
        """Name of a live tensor that is not what these adapters make of the base weights."""
        return self._forward.differing(self._merged(tensors))

    def _merged(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return MergedWeights(self._kept, self._layers, tensors, self._config.scale, self._device)

    def install(self, weights: Any) -> None:
        """Use what `prepare` made from the next call on."""
        self._forward.install(weights)

    def logits(self, block: TokenBlock, cache: KVCache) -> Tensor:
        """As the forward's own."""
        return self._forward.logits(block, cache)
