"""The weights of `LeanForward`: a checkpoint's tensors, rearranged once when they are loaded.

Each tensor is read once and written once into its place. Where memory of an earlier version is
given, that is written to: fresh pages cost a CPU five times what the copy itself does.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal_ray.engines.arriving import origin_of
from areal_ray.engines.joined_rows import JoinedRows
from areal_ray.engines.lean_room import ProvingRoom, Room, address
from areal_ray.engines.model_files import is_head_tied
from areal_ray.engines.packed_linear import LinearWeight, PackedLinear, is_packed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_UP_GATE = ("mlp.up_proj", "mlp.gate_proj")


@dataclass(frozen=True, slots=True)
class LeanSizes:
    """What of a model's config its weights depend on."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    num_layers: int
    eps: float
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool

    @classmethod
    def of(cls, config: "PreTrainedConfig") -> "LeanSizes":
        """Those of a model of the family."""
        attention_bias = bool(getattr(config, "attention_bias", False))
        head_dim = getattr(config, "head_dim", None)
        return cls(
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            ffn=config.intermediate_size,
            vocab=config.vocab_size,
            num_layers=config.num_hidden_layers,
            eps=config.rms_norm_eps,
            has_qkv_bias=config.model_type == "qwen2" or attention_bias,
            has_o_bias=config.model_type in ("llama", "qwen3") and attention_bias,
            has_mlp_bias=bool(getattr(config, "mlp_bias", False)),
            has_qk_norm=config.model_type == "qwen3",
            is_tied=is_head_tied(config),
        )


@dataclass(frozen=True, slots=True)
class LeanLayer:
    """One layer's rearranged weights; linear ones as [out, in], plain o and down as [in, out]."""

    qkv: LinearWeight
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]"""
    o: LinearWeight
    o_bias: Tensor | None
    up_gate: LinearWeight
    up_gate_bias: Tensor | None
    down: LinearWeight
    down_bias: Tensor | None
    input_norm: Tensor | None
    """[hidden]; None where multiplied into qkv."""
    post_norm: Tensor | None
    """[hidden]; None where multiplied into up_gate."""


@dataclass(frozen=True, slots=True)
class LeanWeights:
    """A model's weights as `LeanForward` reads them; made aside, put in place between steps."""

    layers: list[LeanLayer]
    embedding: Tensor
    final_norm: Tensor
    head: LinearWeight
    blocks: list[Tensor]
    """The memory of all that is plain, in the order it was taken."""
    packed: list[PackedLinear]
    """All that are packed, in the order they were made."""


class LeanLayout:
    """How a checkpoint's tensors become `LeanWeights`."""

    def __init__(
        self, sizes: LeanSizes, dtype: torch.dtype, device: torch.device, *, norms_are_folded: bool
    ) -> None:
        """`norms_are_folded`: a norm's weight is multiplied into the projection that follows it."""
        self._sizes = sizes
        self._dtype = dtype
        self._device = device
        self._norms_are_folded = norms_are_folded

    def arranged(self, tensors: Mapping[str, Tensor], spare: LeanWeights | None) -> LeanWeights:
        """Copies of checked tensors, in memory of their own.

        Args:
            tensors: May be overwritten as soon as this returns.
            spare: A version made before that nothing reads any more; its memory is reused.
        """
        blocks, packed = (spare.blocks, spare.packed) if spare is not None else ([], [])
        origin = origin_of(tensors)
        room = Room(blocks, packed, self._dtype, self._device, origin)
        with torch.inference_mode(), room:
            return self._made(tensors, room)

    def differing(self, live: LeanWeights, tensors: Mapping[str, Tensor]) -> str:
        """Name of a live tensor that is not what `arranged` makes of these; empty if all are."""
        origin = origin_of(tensors)
        proving = ProvingRoom(live.blocks, live.packed, self._dtype, self._device, origin)
        with torch.inference_mode(), proving as room:
            made = self._made(tensors, room)
        for (name, weight), (_, proven) in zip(_named(live), _named(made), strict=True):
            if _place(weight) != _place(proven) or address(weight) in room.differing:
                return name
        return ""

    def _made(self, tensors: Mapping[str, Tensor], room: Room) -> LeanWeights:
        # In the order of a checkpoint: tensors may still be arriving.
        embedding = room.copy(tensors["model.embed_tokens.weight"].detach())
        head = self._head(tensors, room, embedding) if self._sizes.is_tied else None
        layers = [self._layer(tensors, room, i) for i in range(self._sizes.num_layers)]
        final_norm = self._final_norm(tensors["model.norm.weight"].detach(), room)
        return LeanWeights(
            layers=layers,
            embedding=embedding,
            final_norm=final_norm,
            head=self._head(tensors, room, embedding) if head is None else head,
            blocks=room.blocks,
            packed=room.packed,
        )

    def _is_packed(self, num_out: int, num_in: int) -> bool:
        return is_packed(num_out, num_in, self._dtype, self._device)

    def _head(self, tensors: Mapping[str, Tensor], room: Room, embedding: Tensor) -> LinearWeight:
        """A tied one is the embedding, which is also held packed where that pays."""
        s = self._sizes
        weight = tensors["model.embed_tokens.weight" if s.is_tied else "lm_head.weight"].detach()
        if self._is_packed(s.vocab, s.hidden):
            return room.pack(weight)
        return embedding if s.is_tied else room.copy(weight)

    def _final_norm(self, weight: Tensor, room: Room) -> Tensor:
        if self._norms_are_folded:
            weight = weight.to(self._dtype) * math.sqrt(self._sizes.hidden)
        return room.copy(weight)

    def _layer(self, tensors: Mapping[str, Tensor], room: Room, i: int) -> LeanLayer:
        s, prefix = self._sizes, f"model.layers.{i}."

        def get(name: str) -> Tensor:
            return tensors[prefix + name].detach()

        def transposed(name: str) -> LinearWeight:
            weight = get(name)
            is_packed = self._is_packed(*weight.shape)
            return room.pack(weight) if is_packed else room.copy(weight).t()

        def optional(name: str, is_there: bool) -> Tensor | None:
            return room.copy(get(name)) if is_there else None

        qkv_parts = [get(f"{name}.weight") for name in _QKV]
        up_gate_parts = [get(f"{name}.weight") for name in _UP_GATE]
        input_norm = get("input_layernorm.weight")
        post_norm = get("post_attention_layernorm.weight")
        before_qkv = before_up_gate = None
        if self._norms_are_folded:
            root = math.sqrt(s.hidden)
            before_qkv = input_norm.to(self._dtype) * root
            before_up_gate = post_norm.to(self._dtype) * root
        qkv_bias = up_gate_bias = None
        if s.has_qkv_bias:
            parts = [get(f"{name}.bias") for name in _QKV]
            qkv_bias = self._join(parts, room, rotated=2)
        if s.has_mlp_bias:
            parts = [get(f"{name}.bias") for name in _UP_GATE]
            up_gate_bias = self._join(parts, room)
        return LeanLayer(
            qkv=self._joined(qkv_parts, room, rotated=2, factor=before_qkv),
            qkv_bias=qkv_bias,
            qk_norm=self._qk_norm(get, room) if s.has_qk_norm else None,
            o=transposed("self_attn.o_proj.weight"),
            o_bias=optional("self_attn.o_proj.bias", s.has_o_bias),
            up_gate=self._joined(up_gate_parts, room, factor=before_up_gate),
            up_gate_bias=up_gate_bias,
            down=transposed("mlp.down_proj.weight"),
            down_bias=optional("mlp.down_proj.bias", s.has_mlp_bias),
            input_norm=None if self._norms_are_folded else room.copy(input_norm),
            post_norm=None if self._norms_are_folded else room.copy(post_norm),
        )

    def _joined(
        self, parts: list[Tensor], room: Room, rotated: int = 0, factor: Tensor | None = None
    ) -> LinearWeight:
        """What `_join` makes of weights [out, in], packed where that pays."""
        shape = sum(map(len, parts)), parts[0].shape[1]
        if not self._is_packed(*shape):
            return self._join(parts, room, rotated, factor)
        orders = [self._order(len(part)) if i < rotated else None for i, part in enumerate(parts)]
        return room.pack(JoinedRows(parts, orders, factor))

    def _join(
        self, parts: list[Tensor], room: Room, rotated: int = 0, factor: Tensor | None = None
    ) -> Tensor:
        """Put parts one below the other, the first `rotated` interleaved, rows times a factor."""
        joined = room.take(sum(map(len, parts)), *parts[0].shape[1:])
        targets = torch.split(joined, [len(part) for part in parts])
        for index, (source, target) in enumerate(zip(parts, targets, strict=True)):
            if index < rotated:
                source, target = self._pairs_apart(source), self._pairs_side_by_side(target)
            room.put(target, source, factor)
        return joined

    def _order(self, num_rows: int) -> Tensor:
        """[num_rows] which of them comes first, second, ... where they are interleaved."""
        order = torch.empty(num_rows, dtype=torch.int64, device=self._device)
        rows = torch.arange(num_rows, device=self._device)
        self._pairs_side_by_side(order).copy_(self._pairs_apart(rows))
        return order

    def _qk_norm(self, get: Callable[[str], Tensor], room: Room) -> Tensor:
        """[heads + kv_heads, head_dim] norm weights, one row a head."""
        s = self._sizes
        made = torch.empty(
            s.num_heads + s.num_kv_heads, s.head_dim, dtype=self._dtype, device=self._device
        )
        weight = torch.empty(s.head_dim, dtype=self._dtype, device=self._device)
        for name, rows in (("q", slice(s.num_heads)), ("k", slice(s.num_heads, None))):
            source = get(f"self_attn.{name}_norm.weight")
            self._pairs_side_by_side(weight).copy_(self._pairs_apart(source))
            made[rows] = weight
        if self._norms_are_folded:
            made *= math.sqrt(s.head_dim)
        return room.copy(made)

    def _pairs_apart(self, weight: Tensor) -> Tensor:
        """[heads, half, 2, ...] view of rows 0, d/2, 1, d/2 + 1, ... of each head in turn."""
        half = self._sizes.head_dim // 2
        return weight.reshape(-1, 2, half, *weight.shape[1:]).transpose(1, 2)

    def _pairs_side_by_side(self, weight: Tensor) -> Tensor:
        """[heads, half, 2, ...] view of rows 0, 1, 2, 3, ... of each head in turn."""
        return weight.view(-1, self._sizes.head_dim // 2, 2, *weight.shape[1:])


def _named(weights: LeanWeights) -> Iterator[tuple[str, LinearWeight]]:
    yield "model.embed_tokens", weights.embedding
    yield "model.norm", weights.final_norm
    yield "lm_head", weights.head
    for i, layer in enumerate(weights.layers):
        for field in fields(layer):
            weight = getattr(layer, field.name)
            if weight is not None:
                yield f"model.layers.{i}.{field.name}", weight


def _place(weight: LinearWeight) -> tuple[object, ...]:
    if isinstance(weight, PackedLinear):
        return (weight.address,)
    return weight.data_ptr(), weight.shape, weight.stride(), weight.dtype
