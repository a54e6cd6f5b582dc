"""Packing: every trained token once, groups whole, budgets kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.algorithms.attention_blocks import PAD_SEGMENT, attention_allowed
from areal_ray.algorithms.packing import (
    GroupSize,
    TrainSequence,
    build_rows,
    join_rows,
    pack_rows,
    plan_step,
)


@st.composite
def _sequences(draw):
    sequences = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 5))):
            own = draw(st.lists(st.integers(0, 3), min_size=0, max_size=8))
            mask = draw(st.lists(st.booleans(), min_size=len(own), max_size=len(own)))
            ids = np.array(prompt + own, np.int32)
            trained = np.array([False] * len(prompt) + mask, bool)
            sequences.append(TrainSequence(ids, trained, group))
    return sequences


@given(_sequences(), st.integers(1, 40), st.booleans(), st.sampled_from([0.0, 0.05, 1.0]))
def test_every_trained_token_is_computed_once_after_exactly_what_came_before_it(
    sequences, budget, share, pair_cost
):
    rows = build_rows(sequences, max_tokens=budget, share_prefixes=share, pair_cost=pair_cost)
    expected = [
        (sequence.token_ids[:t].tolist(), int(sequence.token_ids[t]))
        for sequence in sequences
        for t in np.flatnonzero(sequence.trained)
    ]
    seen = {}
    for batch in pack_rows(rows, max_tokens=budget):
        segments = batch.segment_ids
        if segments is None:  # plain rows: ordinary causal attention
            segments = np.ones(batch.token_ids.shape, np.int32)
            positions = np.broadcast_to(np.arange(batch.token_ids.shape[1]), segments.shape)
        else:
            positions = batch.position_ids
        allowed = attention_allowed(segments)
        width = batch.token_ids.shape[1]
        for source, target, origin in zip(batch.sources, batch.targets, batch.origins, strict=True):
            row, place = divmod(int(source), width)
            looked_at = np.flatnonzero(allowed[row, place])
            assert positions[row, looked_at].tolist() == list(range(len(looked_at)))
            assert int(origin) not in seen
            seen[int(origin)] = (batch.token_ids[row, looked_at].tolist(), int(target))
    assert [seen[i] for i in range(len(expected))] == expected
    assert len(seen) == len(expected)


@given(_sequences(), st.integers(1, 40), st.booleans(), st.sampled_from([0.0, 0.05, 10.0]))
def test_end_to_end_each_trained_token_comes_after_exactly_what_came_before_it(
    sequences, budget, share, pair_cost
):
    rows = build_rows(sequences, max_tokens=budget, share_prefixes=share)
    expected = [
        (sequence.token_ids[:t].tolist(), int(sequence.token_ids[t]))
        for sequence in sequences
        for t in np.flatnonzero(sequence.trained)
    ]
    seen = {}
    for batch in join_rows(rows, max_tokens=budget, pair_cost=pair_cost):
        assert batch.token_ids.size == batch.num_tokens
        looked_at = _looked_at(batch.joined.blocks)
        for source, target, origin in zip(batch.sources, batch.targets, batch.origins, strict=True):
            tokens = looked_at[int(source)]
            assert batch.position_ids[0, tokens].tolist() == list(range(len(tokens)))
            assert int(origin) not in seen
            seen[int(origin)] = (batch.token_ids[0, tokens].tolist(), int(target))
    assert [seen[i] for i in range(len(expected))] == expected
    assert len(seen) == len(expected)


def _looked_at(blocks):
    """[N] which tokens each token looks at, in order."""
    found, start = [], 0
    for (rows, length), segments in zip(blocks.shapes, blocks.segment_ids, strict=True):
        tokens = blocks.tokens[start : start + rows * length].reshape(rows, length)
        causal = segments is None
        allowed = attention_allowed(np.ones((rows, length), np.int32) if causal else segments)
        is_token = np.isin(start + np.arange(rows * length), blocks.places).reshape(rows, length)
        if not causal:
            assert ((segments != PAD_SEGMENT) == is_token).all()
        for row, place in np.argwhere(is_token):
            assert tokens[row, place] == len(found)
            assert is_token[row, allowed[row, place]].all()
            found.append(tokens[row, allowed[row, place]])
        start += rows * length
    return found


def test_rows_of_about_one_length_attend_together_and_others_apart():
    sequences = [s for i in range(8) for s in _group(20, [9 + i % 2], group=i)]
    sequences += _group(512, [513], group=8)
    rows = build_rows(sequences, max_tokens=2048)
    (batch,) = join_rows(rows, max_tokens=2048, pair_cost=1 / 384)
    assert batch.joined.blocks.shapes == ((1, 1024), (8, 29))
    assert not batch.joined.blocks.are_exact
    (batch,) = join_rows(rows, max_tokens=2048, pair_cost=100.0)
    assert batch.joined.blocks.shapes == ((1, 1024), (4, 29), (4, 28))
    assert batch.joined.blocks.are_exact


@given(_sequences(), st.integers(1, 40), st.booleans())
def test_no_forward_pass_is_over_budget_unless_one_sequence_alone_is(sequences, budget, share):
    rows = build_rows(sequences, max_tokens=budget, share_prefixes=share)
    longest = max((s.num_inputs for s in sequences), default=0)
    for batch in pack_rows(rows, max_tokens=budget):
        assert batch.token_ids.size <= max(budget, longest)


def _group(prompt, owns, group=0):
    tokens = [np.arange(prompt), *()]
    return [
        TrainSequence(
            np.concatenate([tokens[0], 100 + 50 * i + np.arange(own)]).astype(np.int32),
            np.arange(prompt + own) >= prompt,
            group,
        )
        for i, own in enumerate(owns)
    ]


def test_siblings_share_their_prompt():
    (row,) = build_rows(_group(30, [16] * 8), max_tokens=1000)
    assert len(row.token_ids) == 30 + 8 * 15  # the last token of each predicts nothing
    assert len(row.targets) == 8 * 16
    assert row.position_ids[[0, 29, 30, 45, 60]].tolist() == [0, 29, 30, 30, 30]


def test_a_group_over_budget_is_split_with_the_prompt_in_each_part():
    rows = build_rows(_group(30, [16] * 8), max_tokens=80)
    assert sorted(len(row.token_ids) for row in rows) == [30 + 30, 30 + 45, 30 + 45]
    assert all(row.token_ids[:30].tolist() == list(range(30)) for row in rows)


def test_long_answers_are_cut_into_rows_where_attention_would_cost_more_than_the_prompt():
    few = build_rows(_group(100, [200] * 8), max_tokens=4096, pair_cost=1 / 384)
    assert len(few) > 1
    assert len(build_rows(_group(100, [200] * 8), max_tokens=4096)) == 1
    assert len(build_rows(_group(30, [16] * 8), max_tokens=4096, pair_cost=1 / 384)) == 1


def test_a_shared_prefix_stops_before_the_first_sampled_token_even_where_siblings_agree():
    twins = _group(4, [5])[0], _group(4, [5])[0]
    (row,) = build_rows(twins, max_tokens=100)
    assert len(row.token_ids) == 4 + 4 + 4
    assert sorted(row.origins.tolist()) == list(range(10))


def test_a_sequence_that_trains_on_its_first_token_is_refused():
    with pytest.raises(ValueError, match="nothing precedes it"):
        TrainSequence(np.zeros(3, np.int32), np.ones(3, bool), 0)


def test_padding_stays_small_however_uneven_the_lengths():
    sequences = [s for i in range(7) for s in _group(8, [9], group=i)] + _group(512, [513], 7)
    batches = pack_rows(build_rows(sequences, max_tokens=2048), max_tokens=2048)
    padded = sum(batch.token_ids.size for batch in batches)
    assert padded <= 1.3 * sum(batch.num_tokens for batch in batches)


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 2**31),
)
def test_a_plan_gives_each_group_to_one_minibatch_and_one_rank(sizes, minibatches, ranks, seed):
    groups = [GroupSize(size) for size in sizes]
    plan = plan_step(groups, num_minibatches=minibatches, num_ranks=ranks, seed=seed)
    placed = [i for parts in plan.minibatches for part in parts for i in part]
    assert sorted(placed) == list(range(len(sizes)))
    alone = plan_step(groups, num_minibatches=minibatches, num_ranks=1, seed=seed)
    assert [sorted(i for part in parts for i in part) for parts in plan.minibatches] == [
        sorted(parts[0]) for parts in alone.minibatches
    ]
    counts = [sum(map(len, parts)) for parts in plan.minibatches]
    assert max(counts) - min(counts) <= 1
    for parts in plan.minibatches:  # largest first: no rank is behind by more than one group
        loads = [sum(sizes[i] for i in part) for part in parts]
        assert max(loads) - min(loads) <= max(sizes[i] for part in parts for i in part)
    assert [plan.of_rank(r) for r in range(ranks)] == [
        [list(parts[r]) for parts in plan.minibatches] for r in range(ranks)
    ]


def test_another_seed_gives_other_minibatches_and_the_same_seed_the_same():
    groups = [GroupSize(10)] * 32
    plans = [plan_step(groups, num_minibatches=4, num_ranks=2, seed=s) for s in (1, 1, 2)]
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_a_step_without_groups_has_no_minibatch():
    assert plan_step([], num_minibatches=4, num_ranks=2, seed=0).minibatches == ()
