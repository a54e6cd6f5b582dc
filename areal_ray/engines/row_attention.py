"""Attention of models of Transformers over rows that lie end to end, without their padding.

A pass gives `row_blocks`, which Transformers hands down to its attention function. Ours takes the
rows of a block side by side through Transformers' own SDPA; without blocks it is that alone.
Attention functions: https://huggingface.co/docs/transformers/attention_interface
"""

import logging
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from areal_ray.algorithms.attention_blocks import AttentionBlocks, attention_allowed
from areal_ray.algorithms.packing import MicroBatch, TrainSequence, build_rows, join_rows
from areal_ray.engines.sequence_parallel import SequencePass

_NAME = "areal_ray_rows"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """`AttentionBlocks` as a pass needs them, on its device."""

    shapes: tuple[tuple[int, int], ...]
    tokens: Tensor | None
    """None where nothing is padded; so with `places`."""
    places: Tensor | None
    masks: tuple[Tensor | None, ...]

    @classmethod
    def of(cls, blocks: AttentionBlocks, dtype: torch.dtype, device: torch.device) -> Self:
        """`dtype` is the masks'."""
        exact = blocks.are_exact
        return cls(
            blocks.shapes,
            None if exact else torch.from_numpy(blocks.tokens).to(device),
            None if exact else torch.from_numpy(blocks.places).to(device),
            tuple(
                None if ids is None else attention_mask(ids, dtype, device)
                for ids in blocks.segment_ids
            ),
        )

    def spread(self, states: Tensor) -> list[Tensor]:
        """[block] -> [rows, heads, length, d] of [1, heads, N, d]."""
        flat = states[0].transpose(0, 1)
        if self.tokens is not None:
            flat = flat.index_select(0, self.tokens)
        parts = torch.split(flat, [rows * length for rows, length in self.shapes])
        return [
            part.view(*shape, *part.shape[1:]).transpose(1, 2)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """[1, N, heads, d] of [block] -> [rows, length, heads, d]."""
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        return (flat if self.places is None else flat.index_select(0, self.places))[None]


def attention_mask(
    segment_ids: NDArray[np.int32], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[B, 1, L, L] 0 where attention is allowed and the lowest number elsewhere."""
    allowed = torch.from_numpy(attention_allowed(segment_ids)).to(device)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def joined_inputs(batch: MicroBatch, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What a model with this attention is called with for rows that lie end to end."""
    assert batch.joined is not None
    return {
        "input_ids": torch.from_numpy(batch.token_ids).to(device),
        "position_ids": torch.from_numpy(batch.position_ids).to(device),
        # One of four dimensions is handed down as it is; else Transformers would make one of its
        # own, of all pairs of tokens.
        "attention_mask": torch.zeros(1, 1, 1, 1, dtype=dtype, device=device),
        "row_blocks": RowBlocks.of(batch.joined.blocks, dtype, device),
    }


def use_row_attention(model: Any) -> None:
    """Let a model of Transformers read rows end to end."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        row_blocks: RowBlocks | None = None,
        sequence: SequencePass | None = None,
        **how: Any,
    ) -> tuple[Tensor, None]:
        if row_blocks is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
        if sequence is not None:
            query, key, value = (sequence.heads(states) for states in (query, key, value))
        columns = [row_blocks.spread(states) for states in (query, key, value)]
        parts = [
            sdpa_attention_forward(module, *block, **how)[0]
            for block in zip(*columns, row_blocks.masks, strict=True)
        ]
        found = row_blocks.joined(parts)
        return (found if sequence is None else sequence.tokens(found)), None

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)


@torch.no_grad()
def reads_joined_rows(model: Any) -> bool:
    """Whether rows end to end give the states that each sequence has alone; found by trying.

    Not where attention is none (linear attention, state spaces), or not Transformers' function.
    """
    device, body = model.device, model.base_model
    ids = np.array([1, 2, 3, 4, 5, 6, 7], np.int32)
    shared = [TrainSequence(ids[[0, 1, *own]], np.arange(4) > 1, 0) for own in ([2, 3], [4, 5])]
    sequences = [*shared, TrainSequence(ids, ids > 1, 1), TrainSequence(ids[2:], ids[2:] > 3, 2)]
    rows = build_rows(sequences, max_tokens=100)
    (batch,) = join_rows(rows, max_tokens=100)
    before = model.config._attn_implementation
    expected = []
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.token_ids).long().to(device)[None]
        states = body(input_ids=tokens, use_cache=False).last_hidden_state[0]
        expected.append(states[np.flatnonzero(sequence.trained) - 1])
    why = ""
    try:
        use_row_attention(model)
        inputs = joined_inputs(batch, model.dtype, device)
        found = body(**inputs, use_cache=False).last_hidden_state[0, batch.sources]
    except (TypeError, ValueError) as error:
        why = f" ({error})"
    else:
        wanted = torch.cat(expected)[batch.origins]
        if torch.allclose(found, wanted, rtol=1e-3, atol=1e-3):
            return True
    model.set_attn_implementation(before)
    _log.warning(
        "%s cannot read sequences end to end%s; they are padded to one length.",
        type(model).__name__, why,
    )  # fmt: skip
    return False
