"""Any decoder-only model through its own Transformers forward, over the engine's KV cache.

The fallback of the torch generation engine for models `LeanForward` does not cover. It is right,
not fast: through it the engine is about as fast as `generate` on batches of equal length.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from areal_ray.engines.kv_cache import CacheShape, KVCache
from areal_ray.engines.live_weights import first_difference
from areal_ray.engines.lora_weights import LinearLayer, linear_layers
from areal_ray.engines.token_block import TokenBlock
from areal_ray.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class _CacheRows(Cache):
    """The engine's cache rows in the shape a Transformers attention layer updates and reads."""

    def __init__(self, cache: KVCache, block: TokenBlock) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self._cache = cache
        self._block = block
        self._index = cache.write_index(block.first_row, block.positions)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [m, kv_heads, q, head_dim]; return all keys and values of these rows so far."""
        new = torch.cat((key_states, value_states), 1).transpose(1, 2)
        self._cache.write(layer_idx, self._index, new)
        block = self._block
        return self._cache.keys_and_values(
            layer_idx, block.first_row, len(block.token_ids), block.num_tokens
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before this block; positions and mask are given, so nothing depends on it."""
        return self._block.num_tokens - self._block.token_ids.shape[1]


class HfForward:
    """Logits of the last token of each row, by the model class of Transformers."""

    def __init__(
        self, folder: Path, config: "PreTrainedConfig", dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
        self._model = model.to(device).eval()
        self._spare: dict[str, torch.Tensor] = {}
        self._prepared: dict[str, torch.Tensor] = {}
        self._last_position = getattr(config, "max_position_embeddings", 2**31) - 1
        self.cache_shape = self._probe()

    def _probe(self) -> CacheShape:
        """Find what a layer caches by running one token."""
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._model(
                input_ids=torch.zeros((1, 1), dtype=torch.int64, device=self._device),
                past_key_values=cache,
                use_cache=True,
            )
        shapes = {
            tuple(tensor.shape)
            for layer in cache.layers
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None))
            if tensor is not None
        }
        if len(shapes) != 1 or len(cache.layers) != self._model.config.num_hidden_layers:
            raise EngineError(
                f"torch generation engine: {self._model.config.model_type} caches {shapes or 'no'} "
                "keys and values a token; every layer must cache keys and values of one shape. "
                "Use another model or another rollout.engine."
            )
        _, heads, _, head_dim = shapes.pop()
        return CacheShape(len(cache.layers), heads, head_dim)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter, tied ones once."""
        return {name: tuple(p.shape) for name, p in self._model.named_parameters()}

    def linear_layers(self) -> dict[str, LinearLayer]:
        """Every linear layer of the body."""
        return linear_layers(self._model)

    def loaded_weights(self) -> dict[str, torch.Tensor]:
        """What was loaded; `install` puts other tensors in place and leaves these alone."""
        return {name: p.detach() for name, p in self._model.named_parameters()}

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of checked tensors, in this engine's type and place."""
        spare, self._spare = self._spare, {}
        parameters = dict(self._model.named_parameters())
        with torch.inference_mode():
            for name, tensor in tensors.items():
                if name not in spare:
                    spare[name] = torch.empty_like(parameters[name], requires_grad=False)
                spare[name].copy_(tensor)
        return spare

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Name of a live tensor that is not what `prepare` makes of these; empty if all are."""
        parameters = dict(self._model.named_parameters())

        def as_live(name: str) -> torch.Tensor:
            live = parameters[name]
            return tensors[name].detach().to(self._device, live.dtype)

        return first_difference((name, parameters[name].data, as_live(name)) for name in tensors)

    def install(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Use these weights from the next call on."""
        parameters = dict(self._model.named_parameters())
        for name, tensor in weights.items():
            parameters[name].data = tensor
        # On a CPU fresh pages cost several times what a copy does: the next version is written over
        # the one before this. Elsewhere memory is scarce, and allocating it is not slow. What was
        # loaded is no such version: adapters are added to it.
        if self._device.type == "cpu":
            self._spare, self._prepared = self._prepared, dict(weights)

    def logits(self, block: TokenBlock, cache: KVCache) -> torch.Tensor:
        """[m, vocabulary] after each row's last token; the cache then holds the new tokens.

        [m * q, vocabulary] where `block.last` is None.
        """
        columns = torch.arange(block.num_tokens, device=self._device)
        is_hidden = columns > block.positions[:, None, :, None]
        mask = torch.zeros(is_hidden.shape, dtype=cache.dtype, device=self._device)
        mask.masked_fill_(is_hidden, torch.finfo(cache.dtype).min)
        wanted: int | torch.Tensor = 0  # all
        if block.last is not None:
            wanted, which = torch.unique(block.last, return_inverse=True)
        output = self._model(
            input_ids=block.token_ids,
            attention_mask=mask,
            position_ids=block.positions.clamp(max=self._last_position),
            past_key_values=_CacheRows(cache, block),
            use_cache=True,
            logits_to_keep=wanted,
        )
        logits: torch.Tensor = output.logits
        if block.last is None:
            return logits.flatten(0, 1)
        return logits[torch.arange(len(logits), device=self._device), which]
