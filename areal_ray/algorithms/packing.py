"""From groups to optimizer updates to forward passes, in whole numbers only.

`plan_step` cuts a step into minibatches (one optimizer update each) and ranks, from token counts
alone: the driver calls it and each rank fetches only its own groups. `build_rows` and
`pack_rows` then cut a rank's share into micro-batches (one forward pass each). Siblings begin
with the same prompt, so a row holds that once, followed by each sibling's own tokens: with 8
siblings of a 30-token prompt and 16 own tokens, 158 tokens instead of 368.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Self

import numpy as np
from numpy.typing import NDArray

from areal_ray.algorithms.attention_blocks import (
    PAD_SEGMENT,
    PREFIX_SEGMENT,
    AttentionBlocks,
    cheapest_cuts,
    cut_blocks,
    is_causal,
)

_MICRO_BATCH_TOKENS = 128
"""What one more forward and backward pass costs besides its tokens: about as much as so many."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """What planning needs to know of one group."""

    num_tokens: int
    """All tokens of all siblings: what the group costs."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which groups each rank trains in each minibatch."""

    minibatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[minibatch][rank] -> indices of groups, in the order they were given to `plan_step`."""

    def of_rank(self, rank: int) -> list[list[int]]:
        """[minibatch] -> indices of the groups this rank must fetch; some may be empty."""
        return [list(ranks[rank]) for ranks in self.minibatches]


def plan_step(
    groups: Sequence[GroupSize], *, num_minibatches: int, num_ranks: int, seed: int
) -> StepPlan:
    """Shuffle groups into minibatches by `seed`, then balance each over the ranks by tokens.

    Which minibatch a group is in does not depend on `num_ranks`, so the same seed gives the
    same updates on any number of ranks. With fewer groups than minibatches there are fewer
    minibatches; none is empty.
    """
    if num_minibatches < 1 or num_ranks < 1:
        raise ValueError(
            f"num_minibatches = {num_minibatches}, num_ranks = {num_ranks}; both must be >= 1"
        )
    order = np.random.default_rng(seed).permutation(len(groups))
    parts = np.array_split(order, min(num_minibatches, len(groups))) if len(groups) else []
    sizes = [group.num_tokens for group in groups]
    return StepPlan(tuple(_balance(part.tolist(), sizes, num_ranks) for part in parts))


def _balance(
    members: Sequence[int], sizes: Sequence[int], num_ranks: int
) -> tuple[tuple[int, ...], ...]:
    """Largest first onto the emptiest rank: at most 4/3 of the best possible longest rank."""
    loads = [0] * num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(members, key=lambda i: (-sizes[i], i)):
        rank = loads.index(min(loads))
        ranks[rank].append(index)
        loads[rank] += sizes[index]
    return tuple(tuple(sorted(rank)) for rank in ranks)


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence to be trained on."""

    token_ids: NDArray[np.int32]
    """[T]"""
    trained: NDArray[np.bool_]
    """[T] True on tokens whose log-prob is wanted; False at 0, which nothing predicts."""
    group: int
    """Sequences with the same number may share a prefix row."""

    def __post_init__(self) -> None:
        if len(self.trained) and self.trained[0]:
            raise ValueError(
                "a sequence's first token is marked as trained, but nothing precedes it to "
                "predict it; the mask must begin with False. Put a prompt token before it."
            )

    @property
    def num_trained(self) -> int:
        """Tokens whose log-prob is wanted."""
        return int(self.trained.sum())

    @property
    def num_inputs(self) -> int:
        """Leading tokens the model must read: all that come before the last trained one."""
        trained = np.flatnonzero(self.trained)
        return int(trained[-1]) if len(trained) else 0


@dataclass(frozen=True, slots=True)
class Row:
    """One row of input: a prefix, then the own tokens of each sequence that shares it."""

    token_ids: NDArray[np.int32]
    """[L]"""
    position_ids: NDArray[np.int32]
    """[L] position in the sequence the token belongs to."""
    segment_ids: NDArray[np.int32]
    """[L] 0 on the shared prefix, then 1, 2, ... for each sequence's own tokens."""
    sources: NDArray[np.int64]
    """[N] index in the row of the token that predicts each trained token."""
    targets: NDArray[np.int64]
    """[N] the trained tokens' ids."""
    origins: NDArray[np.int64]
    """[N] their places among all trained tokens of all sequences, in the order given."""

    @property
    def is_plain(self) -> bool:
        """Whether ordinary causal attention is right for this row."""
        return is_causal(self.segment_ids)


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """How rows lie end to end."""

    starts: NDArray[np.int32]
    """[R + 1] of each row, and the end."""
    blocks: AttentionBlocks
    """Who attends with whom."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded to one rectangle, or end to end: one forward pass."""

    token_ids: NDArray[np.int64]
    """[B, L] padded on the right."""
    position_ids: NDArray[np.int64]
    """[B, L]"""
    segment_ids: NDArray[np.int32] | None
    """[B, L], -1 on padding; None where every row is plain."""
    sources: NDArray[np.int64]
    """[N] index into the flattened [B * L]."""
    targets: NDArray[np.int64]
    """[N]"""
    origins: NDArray[np.int64]
    """[N]"""
    num_tokens: int
    """Inputs that are not padding."""
    joined: JoinedRows | None = None
    """Where rows lie end to end in one."""

    @classmethod
    def empty(cls) -> Self:
        """One token that predicts nothing: a pass that only keeps other ranks company."""
        token, nothing = np.zeros((1, 1), np.int64), np.zeros(0, np.int64)
        return cls(token, token, None, nothing, nothing, nothing, 0)

    @property
    def is_empty(self) -> bool:
        """Whether it has no target."""
        return len(self.targets) == 0


def build_rows(
    sequences: Sequence[TrainSequence],
    *,
    max_tokens: int,
    share_prefixes: bool = True,
    pair_cost: float = 0.0,
) -> list[Row]:
    """Rows that hold each trained token of each sequence exactly once.

    Args:
        sequences: Those without a trained token take no place.
        max_tokens: A row of several sequences has at most so many tokens; a group that needs
            more is split, each part with the prefix. One sequence alone may be longer.
        share_prefixes: False gives each sequence a row of its own.
        pair_cost: Cost of one pair of positions in attention, where one token through the rest
            of the model costs 1. A shared row computes pairs between siblings in vain, so with
            long suffixes several smaller rows are cheaper; 0 disregards that.
    """
    starts = np.concatenate([[0], np.cumsum([s.num_trained for s in sequences])]).astype(np.int64)
    wanted = [i for i, s in enumerate(sequences) if s.num_inputs > 0]
    if not share_prefixes:
        return [_row([sequences[i]], [starts[i]], 0) for i in wanted]
    rows = []
    for _, members in groupby(wanted, key=lambda i: sequences[i].group):
        siblings = sorted(members, key=lambda i: (-sequences[i].num_inputs, i))
        prefix = _shared_prefix([sequences[i] for i in siblings])
        for part in _split(siblings, sequences, prefix, max_tokens, pair_cost):
            rows.append(_row([sequences[i] for i in part], [starts[i] for i in part], prefix))
    return rows


def _shared_prefix(siblings: Sequence[TrainSequence]) -> int:
    """Tokens all siblings begin with, ending before the first trained token of any."""
    length = min(int(np.flatnonzero(s.trained)[0]) for s in siblings)
    first = siblings[0].token_ids[:length]
    for sibling in siblings[1:]:
        differs = np.flatnonzero(sibling.token_ids[:length] != first[:length])
        length = int(differs[0]) if len(differs) else length
    return length


def _split(
    siblings: Sequence[int],
    sequences: Sequence[TrainSequence],
    prefix: int,
    max_tokens: int,
    pair_cost: float,
) -> list[list[int]]:
    """Siblings (longest first) cut into the rows that cost least and fit."""
    if prefix == 0:
        return [[i] for i in siblings]
    best: tuple[float, list[list[int]]] | None = None
    for num_rows in range(1, len(siblings) + 1):
        # Dealt out in turn, so rows of a group come out about equally long.
        parts = [list(siblings[k::num_rows]) for k in range(num_rows)]
        lengths = [prefix + sum(sequences[i].num_inputs - prefix for i in part) for part in parts]
        if any(n > max_tokens and len(p) > 1 for n, p in zip(lengths, parts, strict=True)):
            continue
        cost = sum(n + pair_cost * n * n for n in lengths)
        if best is None or cost < best[0]:
            best = (cost, parts)
    assert best is not None  # one sequence a row always fits
    return best[1]


def _row(members: Sequence[TrainSequence], starts: Sequence[np.int64], prefix: int) -> Row:
    tokens, positions = [members[0].token_ids[:prefix]], [np.arange(prefix)]
    segments, sources, targets, origins = [np.full(prefix, PREFIX_SEGMENT)], [], [], []
    offset = prefix
    for segment, (member, start) in enumerate(zip(members, starts, strict=True), start=1):
        end, trained = member.num_inputs, np.flatnonzero(member.trained)
        tokens.append(member.token_ids[prefix:end])
        positions.append(np.arange(prefix, end))
        segments.append(np.full(end - prefix, segment))
        before = trained - 1  # the token that predicts it: in the prefix or among its own
        sources.append(np.where(before < prefix, before, before - prefix + offset))
        targets.append(member.token_ids[trained])
        origins.append(start + np.arange(len(trained)))
        offset += end - prefix
    return Row(
        np.concatenate(tokens).astype(np.int32),
        np.concatenate(positions).astype(np.int32),
        np.concatenate(segments).astype(np.int32),
        np.concatenate(sources).astype(np.int64),
        np.concatenate(targets).astype(np.int64),
        np.concatenate(origins).astype(np.int64),
    )


def pack_rows(rows: Iterable[Row], *, max_tokens: int) -> list[MicroBatch]:
    """Rows of similar length side by side, at most `max_tokens` with padding in a micro-batch.

    A row longer than that is a micro-batch of its own. Among the ways to cut the rows, sorted by
    length, this is the one with the fewest tokens, a micro-batch itself counting as some.
    """
    ordered = sorted(rows, key=lambda r: -len(r.token_ids))

    def cost(start: int, end: int) -> float | None:
        tokens = (end - start) * len(ordered[start].token_ids)
        fits = tokens <= max_tokens or end - start == 1
        return tokens + _MICRO_BATCH_TOKENS if fits else None

    return [_collate(ordered[start:end]) for start, end in cheapest_cuts(len(ordered), cost)]


def join_rows(rows: Iterable[Row], *, max_tokens: int, pair_cost: float = 0.0) -> list[MicroBatch]:
    """Rows end to end without padding, at most `max_tokens` in a micro-batch.

    A row longer than that is a micro-batch of its own. Longest first, into the first that has room.
    `pair_cost` as in `build_rows`.
    """
    parts: list[list[Row]] = []
    sizes: list[int] = []
    for row in sorted(rows, key=lambda r: -len(r.token_ids)):
        length = len(row.token_ids)
        place = next((i for i, size in enumerate(sizes) if size + length <= max_tokens), None)
        if place is None:
            parts.append([row])
            sizes.append(length)
        else:
            parts[place].append(row)
            sizes[place] += length
    return [_joined(part, pair_cost) for part in parts]


def _joined(rows: Sequence[Row], pair_cost: float) -> MicroBatch:
    starts = np.cumsum([0, *(len(row.token_ids) for row in rows)])
    return MicroBatch(
        np.concatenate([row.token_ids for row in rows])[None].astype(np.int64),
        np.concatenate([row.position_ids for row in rows])[None].astype(np.int64),
        None,
        np.concatenate([row.sources + start for row, start in zip(rows, starts, strict=False)]),
        np.concatenate([row.targets for row in rows]),
        np.concatenate([row.origins for row in rows]),
        int(starts[-1]),
        JoinedRows(starts.astype(np.int32), cut_blocks([r.segment_ids for r in rows], pair_cost)),
    )


def _collate(rows: Sequence[Row]) -> MicroBatch:
    shape = (len(rows), max(len(row.token_ids) for row in rows))
    token_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segment_ids = np.full(shape, PAD_SEGMENT, np.int32)
    for place, row in enumerate(rows):
        length = len(row.token_ids)
        token_ids[place, :length] = row.token_ids
        position_ids[place, :length] = row.position_ids
        segment_ids[place, :length] = row.segment_ids
    return MicroBatch(
        token_ids,
        position_ids,
        None if all(row.is_plain for row in rows) else segment_ids,
        np.concatenate([row.sources + place * shape[1] for place, row in enumerate(rows)]),
        np.concatenate([row.targets for row in rows]),
        np.concatenate([row.origins for row in rows]),
        sum(len(row.token_ids) for row in rows),
    )
