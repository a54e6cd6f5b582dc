"""Forward pass of the Llama, Qwen2, Qwen3 and Mistral family, with few and large tensor ops.

Called by the torch generation engine; the weights are those of the Hugging Face checkpoint,
rearranged once when they are loaded:

- query, key and value projections are one matrix, so are up and gate;
- rows of query and key are permuted so that the two halves Hugging Face rotates lie side by side,
  and rotation is one complex multiplication (scores do not change: both sides are permuted);
- on CPU in float32 a norm's weight is multiplied into the projection that follows it, and large
  weights are packed (`packed_linear.py`).
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from areal_ray.engines.kv_cache import CacheShape, KVCache
from areal_ray.engines.lean_weights import LeanLayout, LeanSizes, LeanWeights
from areal_ray.engines.packed_linear import add_linear, linear
from areal_ray.engines.token_block import TokenBlock

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FAMILY = ("llama", "qwen2", "qwen3", "mistral")


def why_not_lean(config: "PreTrainedConfig") -> str:
    """Empty if this forward covers the model, else what it has that this forward lacks."""
    if config.model_type not in _FAMILY:
        return f"model_type {config.model_type}"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act}"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in ("default", "llama3"):
        return f"rope_type {rope['rope_type']}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial_rotary_factor"
    return ""


class LeanForward:
    """Logits of the last token of each row, through an external KV cache."""

    def __init__(
        self, config: "PreTrainedConfig", dtype: torch.dtype, device: torch.device
    ) -> None:
        self._sizes = LeanSizes.of(config)
        self._dtype = dtype
        self._device = device
        self._norms_are_folded = dtype == torch.float32 and device.type == "cpu"
        self._scale = self._sizes.head_dim**-0.5
        self._inverse_frequencies = _inverse_frequencies(config, self._sizes.head_dim)
        self._rotations = torch.empty(0, self._sizes.head_dim // 2, dtype=torch.complex64)
        self._columns = torch.empty(0, dtype=torch.int64)
        self._floors = {
            size: torch.tensor(math.sqrt(size * self._sizes.eps), dtype=dtype, device=device)
            for size in (self._sizes.hidden, self._sizes.head_dim)
        }
        self._seen, self._hidden = torch.tensor([0.0, -math.inf], dtype=dtype, device=device)
        self._layout = LeanLayout(
            self._sizes, dtype, device, norms_are_folded=self._norms_are_folded
        )
        self._weights: LeanWeights | None = None
        self._spare: LeanWeights | None = None
        """Of the version before, for the next one to be written over."""
        self.cache_shape = CacheShape(
            self._sizes.num_layers, self._sizes.num_kv_heads, self._sizes.head_dim
        )

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the checkpoint."""
        s = self._sizes
        q_rows, kv_rows = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocab, s.hidden)}
        for i in range(s.num_layers):
            prefix = f"model.layers.{i}."
            for name, rows, columns, has_bias in (
                ("self_attn.q_proj", q_rows, s.hidden, s.has_qkv_bias),
                ("self_attn.k_proj", kv_rows, s.hidden, s.has_qkv_bias),
                ("self_attn.v_proj", kv_rows, s.hidden, s.has_qkv_bias),
                ("self_attn.o_proj", s.hidden, q_rows, s.has_o_bias),
                ("mlp.gate_proj", s.ffn, s.hidden, s.has_mlp_bias),
                ("mlp.up_proj", s.ffn, s.hidden, s.has_mlp_bias),
                ("mlp.down_proj", s.hidden, s.ffn, s.has_mlp_bias),
            ):
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if has_bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            if s.has_qk_norm:
                shapes[f"{prefix}self_attn.q_norm.weight"] = (s.head_dim,)
                shapes[f"{prefix}self_attn.k_norm.weight"] = (s.head_dim,)
            shapes[f"{prefix}input_layernorm.weight"] = (s.hidden,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (s.hidden,)
        shapes["model.norm.weight"] = (s.hidden,)
        if not s.is_tied:
            shapes["lm_head.weight"] = (s.vocab, s.hidden)
        return shapes

    def prepare(self, tensors: Mapping[str, Tensor]) -> LeanWeights:
        """Rearranged copies of checked tensors; nothing of the live weights is touched."""
        spare, self._spare = self._spare, None
        try:
            return self._layout.arranged(tensors, spare)
        except BaseException:  # what it was to be written over is as good as before
            self._spare = spare
            raise

    @property
    def makes_ahead(self) -> bool:
        """Whether weights should be prepared while they arrive: on a CPU that takes as long."""
        return self._device.type == "cpu"

    def reuse(self, weights: LeanWeights) -> None:
        """Take back what `prepare` made and nobody installed."""
        self._spare = weights

    def differing(self, tensors: Mapping[str, Tensor]) -> str:
        """Name of a live tensor that is not what `prepare` makes of these; empty if all are."""
        assert self._weights is not None
        return self._layout.differing(self._weights, tensors)

    def install(self, weights: LeanWeights) -> None:
        """Use these weights from the next call on."""
        if self._device.type == "cpu":  # elsewhere memory is scarce, and allocating it is not slow
            self._spare = self._weights
        self._weights = weights

    def logits(self, block: TokenBlock, cache: KVCache) -> Tensor:
        """[m, vocabulary] after each row's last token; after all, [m * q, ...], without `last`."""
        assert self._weights is not None
        s, weights = self._sizes, self._weights
        self._extend_tables(cache.num_tokens + 1)
        m, q = block.token_ids.shape
        x = weights.embedding.index_select(0, block.token_ids.view(-1))
        rotation = self._rotations.index_select(0, block.positions.view(-1)).unsqueeze(1)
        index = cache.write_index(block.first_row, block.positions)
        ends = None  # Of the last layer only the last token of each row is needed.
        last_positions = block.positions
        if block.last is not None:
            ends = torch.arange(m, device=x.device) * q + block.last
            last_positions = block.positions.view(-1, 1).index_select(0, ends)
        # Layers before this one attend with all of a row's tokens at once, the others with one.
        num_wide = 0 if q == 1 else s.num_layers - (ends is not None)
        mask = self._seen  # read by none where all layers are wide
        if num_wide < s.num_layers:
            mask = self._step_mask(last_positions, block.num_tokens)
        block_mask = None if q == 1 or block.is_fresh else self._block_mask(block)
        for i, layer in enumerate(weights.layers):
            qkv = linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(m * q, -1, s.head_dim)
            self._rotate(qkv, layer.qk_norm, rotation)
            cache.write(i, index, qkv[:, s.num_heads :])
            if i < num_wide:
                attended = self._attend_block(qkv, block, block_mask, cache, i)
            else:
                if ends is not None:
                    x, qkv = x.index_select(0, ends), qkv.index_select(0, ends)
                attended = self._attend_step(qkv, block, mask, cache, i)
            x = add_linear(x, attended, layer.o, layer.o_bias)
            up_gate = linear(self._norm(x, layer.post_norm), layer.up_gate, layer.up_gate_bias)
            # glu gives up * sigmoid(gate); silu(gate) * up is that times gate.
            x = add_linear(
                x, functional.glu(up_gate).mul_(up_gate[:, s.ffn :]), layer.down, layer.down_bias
            )
        if self._norms_are_folded:
            x = self._norm(x, None).mul_(weights.final_norm)
        else:
            x = self._norm(x, weights.final_norm)
        return linear(x, weights.head, None)

    def _extend_tables(self, num_tokens: int) -> None:
        if len(self._columns) >= num_tokens:
            return
        self._columns = torch.arange(num_tokens, device=self._device)
        angles = torch.arange(num_tokens).float()[:, None] * self._inverse_frequencies
        self._rotations = torch.polar(torch.ones_like(angles), angles).to(self._device)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMS norm; without a weight, the weight times sqrt(size) is in the next projection."""
        size = x.shape[-1]
        if weight is not None:
            return functional.rms_norm(x, (size,), weight, self._sizes.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # hypot(|x|, sqrt(size * eps)) = sqrt(size) * sqrt(mean(x * x) + eps), in a single op.
        return x / torch.hypot(length, self._floors[size])

    def _rotate(self, qkv: Tensor, qk_norm: Tensor | None, rotation: Tensor) -> None:
        """Norm (Qwen3) and rotary embedding of query and key heads of [t, heads, d], in place."""
        num_rotated = self._sizes.num_heads + self._sizes.num_kv_heads
        heads = qkv[:, :num_rotated]
        turned = heads
        if qk_norm is not None:
            if self._norms_are_folded:
                turned = self._norm(heads, None).mul_(qk_norm)
            else:
                turned = functional.rms_norm(heads, heads.shape[-1:], None, self._sizes.eps)
                turned = turned * qk_norm
        pair_shape = (len(qkv), num_rotated, -1, 2)
        if qkv.dtype == torch.float32:
            pairs = torch.view_as_complex(turned.view(pair_shape))
            torch.mul(pairs, rotation, out=torch.view_as_complex(heads.view(pair_shape)))
        else:
            pairs = torch.view_as_complex(turned.float().view(pair_shape))
            heads.copy_(torch.view_as_real(pairs * rotation).flatten(-2))

    def _step_mask(self, positions: Tensor, num_tokens: int) -> Tensor:
        """[m * kv_heads, 1, num_tokens] 0 up to each row's position, -inf beyond."""
        repeated = positions.expand(-1, self._sizes.num_kv_heads).reshape(-1, 1, 1)
        return torch.where(self._columns[:num_tokens] > repeated, self._hidden, self._seen)

    def _block_mask(self, block: TokenBlock) -> Tensor:
        """[m, 1, q, num_tokens] True where a token may look."""
        return self._columns[: block.num_tokens] <= block.positions[:, None, :, None]

    def _attend_step(
        self, qkv: Tensor, block: TokenBlock, mask: Tensor, cache: KVCache, layer: int
    ) -> Tensor:
        """[m, heads * head_dim] attention of one token a row over the cache."""
        s, m = self._sizes, qkv.shape[0]
        query = qkv[:, : s.num_heads].reshape(m * s.num_kv_heads, -1, s.head_dim)
        keys = cache.keys_transposed(layer, block.first_row, m, block.num_tokens)
        scores = torch.baddbmm(mask, query, keys, alpha=self._scale)
        if self._dtype == torch.float32:
            weights = torch.softmax(scores, -1)
        else:
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(self._dtype)
        values = cache.values(layer, block.first_row, m, block.num_tokens)
        return torch.bmm(weights, values).view(m, -1)

    def _attend_block(
        self, qkv: Tensor, block: TokenBlock, mask: Tensor | None, cache: KVCache, layer: int
    ) -> Tensor:
        """[m * q, heads * head_dim] attention of all new tokens, causal."""
        s, (m, q) = self._sizes, block.token_ids.shape
        heads = qkv.view(m, q, -1, s.head_dim).transpose(1, 2)
        query = heads[:, : s.num_heads]
        if mask is None:  # Padding comes after the real tokens, so causality alone hides it.
            keys, values = heads[:, s.num_heads :].tensor_split(2, dim=1)
        else:
            keys, values = cache.keys_and_values(layer, block.first_row, m, block.num_tokens)
        attended = functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=s.num_heads != s.num_kv_heads,
        )
        return attended.transpose(1, 2).reshape(m * q, -1)


def _inverse_frequencies(config: "PreTrainedConfig", head_dim: int) -> Tensor:
    """[head_dim / 2] rotary frequencies: the default, or stretched as Llama 3.1 does.

    Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between
    interpolated; arXiv:2407.21783 and the model's reference code.
    """
    rope = config.rope_parameters
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / rope["rope_theta"] ** exponents
    if rope.get("rope_type", "default") == "default":
        return frequencies
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    stretched: Tensor = frequencies * (kept + (1.0 - kept) / rope["factor"])
    return stretched
