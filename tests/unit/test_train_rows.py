"""From groups to token columns: who trains, who counts, who is too old."""

from dataclasses import replace

import numpy as np
import pytest

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.core.trajectory import Group, Outcome, StopReason
from areal_ray.engines.advantage_columns import line_lengths, score_step
from areal_ray.engines.step_batch import train_batch
from areal_ray.engines.train_rows import collect_lines
from tests.support.tiny_groups import random_group

GRPO = ObjectiveConfig(kind="grpo", skip_zero_advantage=False)


def _group(rewards, seed=0, **shape):
    rng = np.random.default_rng(seed)
    return random_group(rng, siblings=len(rewards), rewards=rewards, **shape)


def _change(group, place, **fields):
    trajectories = list(group.trajectories)
    trajectories[place] = replace(trajectories[place], **fields)
    return Group(group.group_id, group.task_id, tuple(trajectories))


def _batch(*groups, objective=GRPO, version=0, oldest=None):
    share = collect_lines(groups, objective, version, oldest)
    (scores,) = score_step([share], objective, list)
    advantages = np.repeat(scores.by_line, line_lengths(share.lines))
    return train_batch(share, advantages, scores.equal_groups, objective)


def _advantages(batch):
    """Advantage of each computed sequence."""
    starts = np.cumsum([0, *(s.num_trained for s in batch.sequences)])[:-1]
    return batch.advantages[starts].tolist()


def test_each_group_is_centred_on_its_own_mean_whatever_its_size():
    batch = _batch(
        _group([1.0, 0.0]), _group([1.0, 1.0, 0.0], 1), _group([1.0], 2),
        objective=ObjectiveConfig(kind="dr_grpo", skip_zero_advantage=False),
    )  # fmt: skip
    assert _advantages(batch) == pytest.approx([0.5, -0.5, 1 / 3, 1 / 3, -2 / 3, 0.0])
    assert batch.counts.equal_groups == 1


def test_all_columns_belong_to_the_trained_tokens_in_order():
    group = _group([1.0, 0.0, 0.0])
    batch = _batch(group)
    expected = [t.behaviour_logprobs[t.loss_mask] for t in group.trajectories]
    np.testing.assert_array_equal(batch.behaviour_logprobs, np.concatenate(expected))
    lengths = [len(column) for column in expected]
    assert batch.sequence_tokens.tolist() == np.repeat(lengths, lengths).tolist()
    assert batch.counts.tokens == sum(lengths)
    assert batch.counts.sequences == 3


def test_what_could_not_be_scored_neither_trains_nor_counts_nor_moves_its_siblings():
    without = _batch(_group([1.0, 0.0, 0.0]))
    with_it = _batch(_group([1.0, 0.0, 0.0, None]))
    assert _advantages(with_it) == _advantages(without)
    assert with_it.counts.left_out == 1
    assert with_it.counts.sequences == 3
    assert len(with_it.sequences) == 3


@pytest.mark.parametrize("reward", [1.0, 100.0])
def test_a_truncated_episode_that_is_masked_does_not_count_in_its_groups_statistics(reward):
    group = _change(_group([1.0, 0.0, reward]), 2, outcome=Outcome.TRUNCATED)
    objective = ObjectiveConfig(mask_truncated=True, skip_zero_advantage=False)
    batch = _batch(group, objective=objective)
    assert _advantages(batch) == pytest.approx([1.0, -1.0])
    tokens = sum(t.num_sampled_tokens for t in group.trajectories[:2])
    assert batch.counts.tokens == tokens  # the denominator leaves it out too
    kept = _batch(group)
    assert kept.counts.sequences == 3


def test_an_episode_with_branches_counts_once_and_all_its_branches_train():
    group = _group([1.0, 0.0])
    branch = replace(group.trajectories[0], branch_id=1)
    batch = _batch(Group(group.group_id, group.task_id, (*group.trajectories, branch)))
    assert _advantages(batch) == pytest.approx([1.0, -1.0, 1.0])


def test_zero_advantage_is_not_computed_and_still_counts():
    groups = [_group([1.0, 0.0]), _group([1.0, 1.0], 1)]
    full = _batch(*groups)
    skipping = _batch(*groups, objective=ObjectiveConfig())
    assert len(full.sequences) == 4
    assert len(skipping.sequences) == 2
    assert skipping.counts == full.counts
    assert full.counts.teaching_tokens < full.counts.tokens


def test_tokens_of_too_old_versions_leave_loss_and_denominator_and_are_counted():
    group = _group([1.0, 0.0])
    first = group.trajectories[0]
    versions = np.where(first.loss_mask, np.where(first.turn_ids == 0, 3, 5), -1)
    group = _change(group, 0, versions=versions.astype(np.int32))
    group = _change(
        group, 1, versions=np.where(group.trajectories[1].loss_mask, 4, -1).astype(np.int32)
    )
    batch = _batch(group, version=6, oldest=4)
    old = int((first.turn_ids == 0).sum())
    total = sum(t.num_sampled_tokens for t in group.trajectories)
    assert batch.counts.stale_tokens == old
    assert batch.counts.tokens == total - old
    assert batch.sequences[0].trained.tolist() == (first.turn_ids == 1).tolist()
    assert batch.max_staleness == 2
    everything = _batch(group, version=6)
    assert everything.counts.stale_tokens == 0
    assert everything.counts.mixed_sequences == 1
    assert everything.max_staleness == 3


def test_staleness_is_measured_on_sampled_tokens_alone():
    group = _group([1.0, 0.0], turns=(2, 1), prompt_tokens=3)
    for place, trajectory in enumerate(group.trajectories):
        sampled = np.where(trajectory.turn_ids == 0, 7, 8)
        versions = np.where(trajectory.loss_mask, sampled, -1).astype(np.int32)
        group = _change(group, place, versions=versions)
    batch = _batch(group, version=9)
    assert batch.max_staleness == 2
    first = sum(int((t.turn_ids == 0).sum()) for t in group.trajectories)
    assert batch.counts.staleness == 2 * first + (batch.counts.tokens - first)


def test_an_episode_that_is_too_old_altogether_disappears_but_keeps_its_say_in_the_baseline():
    group = _group([1.0, 0.0, 0.0])
    versions = np.where(group.trajectories[0].loss_mask, 5, -1).astype(np.int32)
    group = _change(group, 0, versions=versions)
    batch = _batch(group, version=6, oldest=5)
    assert len(batch.sequences) == 1
    assert _advantages(batch) == pytest.approx([2**0.5])


def test_no_groups_make_an_empty_batch():
    batch = _batch()
    assert batch.sequences == []
    assert len(batch.behaviour_logprobs) == len(batch.advantages) == 0
    assert batch.counts.tokens == 0


def test_of_a_truncated_episode_only_what_the_limit_cut_is_bootstrapped():
    """Branch 0 split and ended, a sub-agent ran into its token limit, the last turn is branch 2's;
    the other episode ended by itself."""
    group = _group([1.0, 0.0])
    main, other = group.trajectories
    turns = main.turn_ids
    branches = [
        replace(
            main,
            branch_id=number,
            turn_ids=np.where(turns >= 0, turns + 2 * number, -1).astype(np.int16),
            outcome=Outcome.TRUNCATED,
            stop_reason=reason,
        )
        for number, reason in enumerate((StopReason.STOP, StopReason.LENGTH, StopReason.STOP))
    ]
    whole = Group(group.group_id, group.task_id, (*branches, other))
    lines = collect_lines([whole], GRPO, 0, None).lines
    assert [line.is_truncated for line in lines] == [False, True, True, False]
