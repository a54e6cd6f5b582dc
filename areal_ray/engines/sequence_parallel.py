"""Sequence parallelism (Ulysses): neighbouring ranks read slices of the same rows.

Each computes its slice of a pass's tokens; around attention they exchange, so that each has all
tokens for its part of the heads, and what was found of targets is joined at the end. So activations
and logits of a rank are those of its slice. Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.
Waits for: the neighbours, in each attention layer and at the end of a pass, forward and backward.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from areal_ray.algorithms.packing import MicroBatch
from areal_ray.engines.process_group import RankGroup


@dataclass(frozen=True, slots=True)
class Slice:
    """What of a pass this rank computes."""

    token_ids: NDArray[np.int64]
    """[B, L]"""
    position_ids: NDArray[np.int64]
    """[B, L]"""
    sources: NDArray[np.int64]
    """[n] index into the flattened [B * L]."""
    targets: NDArray[np.int64]
    """[n]"""
    own: NDArray[np.int64] | None = None
    """[n] places of these among all targets of the pass; None = they are all."""

    @classmethod
    def all_of(cls, batch: MicroBatch) -> Self:
        """Of a rank that computes a pass alone."""
        return cls(batch.token_ids, batch.position_ids, batch.sources, batch.targets)


class SequenceRanks:
    """The ranks that compute a pass together."""

    def __init__(self, ranks: RankGroup, width: int) -> None:
        """Neighbours by `width`. Collective over all ranks."""
        self._ranks = ranks.neighbours(width)
        self.width = width

    def slice_of(self, batch: MicroBatch) -> Slice:
        """This rank's of rows that lie end to end, in equal lengths: the last slices may be padded.

        A pass on nothing is made by each rank alone.
        """
        if batch.is_empty:
            return Slice.all_of(batch)
        length = self._length(batch)
        start = self._ranks.rank * length
        (own,) = np.nonzero((batch.sources >= start) & (batch.sources < start + length))
        padding = (0, self.width * length - batch.token_ids.shape[1])
        tokens, positions = (
            np.pad(ids, ((0, 0), padding))[:, start : start + length]
            for ids in (batch.token_ids, batch.position_ids)
        )
        return Slice(tokens, positions, batch.sources[own] - start, batch.targets[own], own)

    def joined(self, part: Tensor, share: Slice, num_targets: int) -> Tensor:
        """[N, ...] what all ranks found, from this one's [n, ...], in the order of the pass.

        Its gradient is the sum of those that the ranks have: each computes on, from the same, as if
        it were alone, so a loss must be divided by their number.
        """
        if share.own is None:
            return part
        own = torch.from_numpy(share.own).to(part.device)
        found: Tensor = _Join.apply(part, own, num_targets, self._ranks)  # type: ignore[no-untyped-call]
        return found

    def pass_over(self, batch: MicroBatch) -> "SequencePass":
        """What attention has to know of a pass."""
        return SequencePass(self._ranks, batch.token_ids.shape[1])

    def _length(self, batch: MicroBatch) -> int:
        return -(-batch.token_ids.shape[1] // self.width)


@dataclass(frozen=True, slots=True)
class SequencePass:
    """The exchanges around attention."""

    ranks: RankGroup
    num_tokens: int
    """Of all slices, without what the last ones are padded by."""

    def heads(self, states: Tensor) -> Tensor:
        """[1, heads / S, tokens, d] of all slices, from this one's [1, heads, L, d]."""
        parts = states[0].view(self.ranks.size, -1, *states.shape[2:])
        found = _exchanged(parts, self.ranks).transpose(0, 1)  # [heads / S, S, L, d]
        return found.flatten(1, 2)[None, :, : self.num_tokens]

    def tokens(self, states: Tensor) -> Tensor:
        """[1, L, heads, d] of this slice, from all slices' [1, tokens, heads / S, d]."""
        missing = -self.num_tokens % self.ranks.size
        whole = pad(states[0], (0, 0, 0, 0, 0, missing))
        parts = whole.view(self.ranks.size, -1, *whole.shape[1:])
        found = _exchanged(parts, self.ranks).transpose(0, 1)  # [L, S, heads / S, d]
        return found.flatten(1, 2)[None]


def _exchanged(parts: Tensor, ranks: RankGroup) -> Tensor:
    found: Tensor = _Exchange.apply(parts, ranks)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    """Part r of [S, ...] goes to rank r; the gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return ranks.exchanged(parts.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.exchanged(gradients[0].contiguous()), None


class _Join(torch.autograd.Function):
    """[N, ...] of which each rank has some rows."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, own: Tensor, total: int, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        ctx.save_for_backward(own)
        whole = part.new_zeros(total, *part.shape[1:])
        whole[own] = part
        return ranks.sum_(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        whole = ctx.ranks.sum_(gradients[0].contiguous().clone())
        return whole[own], None, None, None
