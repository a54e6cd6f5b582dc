"""Which tokens attend together: rectangles over rows that lie end to end.

Everything in a model but attention treats each token by itself, so rows need no padding there.
Attention takes rows of about one length side by side: one call each would cost short rows more
than their arithmetic.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

PREFIX_SEGMENT = 0
PAD_SEGMENT = -1

_CALL_TOKENS = 16
"""What one more call of attention costs, forward and backward: about as much as so many tokens."""


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """Rectangles that hold each of the N tokens of a micro-batch once, and padding."""

    shapes: tuple[tuple[int, int], ...]
    """(rows, length) of each; M places in all, block after block."""
    tokens: NDArray[np.int64]
    """[M] the token at each place; padding, on the right, repeats one of its row's."""
    places: NDArray[np.int64]
    """[N] the place of each token, ascending."""
    segment_ids: tuple[NDArray[np.int32] | None, ...]
    """Of each block [rows, length], -1 on padding; None where causal attention is right."""

    @property
    def are_exact(self) -> bool:
        """Whether nothing is padded, so that places are tokens."""
        return len(self.tokens) == len(self.places)


def cut_blocks(segments: Sequence[NDArray[np.int32]], pair_cost: float) -> AttentionBlocks:
    """Blocks of rows that lie end to end, at the least cost.

    Args:
        segments: [row] -> [L] its segment ids; longest row first.
        pair_cost: Cost of one pair of positions in attention, where one token through the rest
            of the model costs 1.
    """
    lengths = [len(row) for row in segments]
    runs = [(length, len(list(rows))) for length, rows in groupby(lengths)]
    firsts = np.cumsum([0, *(count for _, count in runs)]).tolist()

    def cost(start: int, end: int) -> float:
        pairs = (firsts[end] - firsts[start]) * runs[start][0] ** 2
        return pairs * pair_cost + _CALL_TOKENS

    shapes, tokens, places, masks, offset, num_places = [], [], [], [], 0, 0
    for start, end in cheapest_cuts(len(runs), cost):
        rows = segments[firsts[start] : firsts[end]]
        sizes = np.array([len(row) for row in rows])
        columns = np.arange(sizes[0])
        starts = offset + np.cumsum(sizes) - sizes
        is_token = columns < sizes[:, None]
        tokens.append((starts[:, None] + np.minimum(columns, sizes[:, None] - 1)).ravel())
        places.append(num_places + np.flatnonzero(is_token))
        masks.append(_segments(rows, is_token))
        shapes.append((len(rows), int(sizes[0])))
        offset, num_places = offset + int(sizes.sum()), num_places + is_token.size
    return AttentionBlocks(
        tuple(shapes), np.concatenate(tokens), np.concatenate(places), tuple(masks)
    )


def _segments(
    rows: Sequence[NDArray[np.int32]], is_token: NDArray[np.bool_]
) -> NDArray[np.int32] | None:
    if all(is_causal(row) for row in rows):
        return None
    found = np.full(is_token.shape, PAD_SEGMENT, np.int32)
    found[is_token] = np.concatenate(rows)
    return found


def is_causal(segment_ids: NDArray[np.int32]) -> bool:
    """Whether ordinary causal attention is right for a row [L]."""
    return int(segment_ids.max(initial=0)) <= 1


def attention_allowed(segment_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """[B, L, L] True where position i may look at position j.

    A token sees the prefix and the earlier tokens of its own segment. Padding sees something
    too, so that no softmax is over nothing.
    """
    own = segment_ids[:, :, None] == segment_ids[:, None, :]
    prefix = (segment_ids == PREFIX_SEGMENT)[:, None, :]
    causal = np.tri(segment_ids.shape[1], dtype=bool)
    allowed: NDArray[np.bool_] = (own | prefix) & causal
    return allowed


def cheapest_cuts(
    num_items: int, cost: Callable[[int, int], float | None]
) -> list[tuple[int, int]]:
    """(start, end) of the consecutive parts of a list that together cost least.

    `cost` of items start to end is None where they, and so any that begin earlier, do not fit;
    one item always fits.
    """
    best = [(0.0, 0)]  # for the first i items: their cost, and where the last part begins
    for end in range(1, num_items + 1):
        choices = []
        for start in range(end - 1, -1, -1):
            price = cost(start, end)
            if price is None:
                break
            choices.append((best[start][0] + price, start))
        best.append(min(choices))
    parts, end = [], num_items
    while end:
        parts.append((best[end][1], end))
        end = best[end][1]
    return parts[::-1]
