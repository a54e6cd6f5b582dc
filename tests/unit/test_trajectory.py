"""Trajectories keep their invariants and travel byte for byte."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.core.trajectory import (
    Group,
    Outcome,
    StopReason,
    Trajectory,
    decode_group,
    edges_above,
    encode_group,
)


def trajectory(length=6, sampled=(3, 4), version=7, **more):
    mask = np.zeros(length, bool)
    mask[list(sampled)] = True
    facts = {
        "token_ids": np.arange(length, dtype=np.int32),
        "loss_mask": mask,
        "behaviour_logprobs": np.where(mask, -0.5, 0.0).astype(np.float32),
        "versions": np.where(mask, version, -1).astype(np.int32),
        "turn_ids": np.where(mask, 0, -1).astype(np.int16),
        "task_id": "t", "group_id": "g", "episode_id": "e",
    }  # fmt: skip
    return Trajectory(**{**facts, **more})


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=9),
    text=st.text(max_size=20),
    reward=st.none() | st.floats(-5, 5),
)
def test_a_group_reads_back_as_it_was_written(lengths, text, reward):
    rng = np.random.default_rng(sum(lengths))
    members = tuple(
        trajectory(
            n,
            sampled=tuple(range(n // 2, n)),
            token_ids=rng.integers(0, 2**31 - 1, n).astype(np.int32),
            episode_id=f"e{i}",
            final_text=text,
            reward=reward,
            outcome=Outcome.TRUNCATED,
            stop_reason=StopReason.LENGTH,
            details={"why": text},
            branch_id=i % 3,
            parent_branch_id=i % 3 - 1,
        )
        for i, n in enumerate(lengths)
    )
    back = decode_group(encode_group(Group("g", "t", members)))
    assert (back.group_id, back.task_id, len(back.trajectories)) == ("g", "t", len(lengths))
    for got, sent in zip(back.trajectories, members, strict=True):
        for name in ("token_ids", "loss_mask", "behaviour_logprobs", "versions", "turn_ids"):
            np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
            assert getattr(got, name).dtype == getattr(sent, name).dtype
        assert (got.reward, got.outcome, got.details) == (sent.reward, sent.outcome, sent.details)
        assert (got.branch_id, got.parent_branch_id) == (sent.branch_id, sent.parent_branch_id)


def test_siblings_that_share_a_prompt_travel_in_under_a_kilobyte_each():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 400, 30)
    members = []
    for i in range(8):
        ids = np.concatenate([prompt, rng.integers(0, 400, 16)]).astype(np.int32)
        mask = np.arange(46) >= 36
        logprobs = np.where(mask, -rng.random(46), 0).astype(np.float32)
        members.append(
            trajectory(46, sampled=tuple(range(36, 46)), token_ids=ids, episode_id=f"e{i}",
                       behaviour_logprobs=logprobs)
        )  # fmt: skip
    assert len(encode_group(Group("g", "t", tuple(members)))) / 8 < 250


@pytest.mark.parametrize("cut", [1, 15, -1])
def test_a_cut_buffer_is_refused(cut):
    with pytest.raises(ValueError, match="encoded group"):
        decode_group(encode_group(Group("g", "t", (trajectory(),)))[:cut])


def test_a_sampled_token_without_a_logprob_is_refused():
    logprobs = np.array([0, 0, 0, np.nan, -1, 0], np.float32)
    with pytest.raises(ValueError, match="no finite behaviour log-prob"):
        trajectory(behaviour_logprobs=logprobs)


def test_a_sampled_token_without_a_version_is_refused():
    with pytest.raises(ValueError, match="no version"):
        trajectory(versions=np.full(6, -1, np.int32))


def test_prompt_placeholders_never_count_as_a_version():
    mixed = trajectory(sampled=(3, 4, 5), versions=np.array([-1, -1, -1, 7, 7, 8], np.int32))
    assert (mixed.oldest_version, mixed.newest_version) == (7, 8)
    silent = trajectory(sampled=(), versions=np.full(6, -1, np.int32))
    assert silent.oldest_version == -1
    assert Group("g", "t", (silent, mixed)).oldest_version == 7
    assert Group("g", "t", (silent,)).oldest_version == -1


@pytest.mark.parametrize(
    ("parents", "edges"),
    [
        ({}, {}),
        ({0: -1}, {0: 0}),
        ({0: -1, 1: 0, 2: 0, 3: 2}, {0: 0, 1: 1, 2: 1, 3: 2}),
        ({3: 2, 2: 0, 1: 0, 0: -1}, {0: 0, 1: 1, 2: 1, 3: 2}),  # whatever the order
        ({0: -1, 4: -1, 5: 4}, {0: 0, 4: 0, 5: 1}),  # a history that was rewritten, and its call
    ],
)
def test_calls_of_sub_agents_are_counted_along_the_tree(parents, edges):
    assert edges_above(parents) == edges


def test_branches_that_call_each_other_are_refused():
    with pytest.raises(ValueError, match="circle"):
        edges_above({0: 1, 1: 0})
