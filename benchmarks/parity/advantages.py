"""Advantages, returns and length penalties of each peer beside ours."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_ray.algorithms.gae import token_gae
from areal_ray.algorithms.normalise import normalise
from areal_ray.algorithms.objective_parts import NormConfig
from areal_ray.algorithms.shaping import overlong_penalty
from benchmarks.parity.case import Case, Pairs
from benchmarks.parity.inputs import ROWS, Inputs
from benchmarks.parity.peers import Peers

EPSILON = "they add 1e-6 to the standard deviation; ours adds nothing and calls a small spread none"
POPULATION = (
    "by default ours divides by the population's deviation (n), theirs by the sample's (n - 1), so "
    "in groups of 4 ours are 1.155 times as large; unbiased: true is theirs"
)
SINGLE = (
    "of a group of one ours is 0, since nothing is known of how good the reward is; theirs is the "
    "reward itself"
)


def advantage_cases(peers: Peers) -> Iterator[Case]:
    """Group statistics, then whole steps, then GAE."""
    if peers.verl:
        verl = peers.verl.core
        yield from _groups("verl", verl.compute_grpo_outcome_advantage, "norm_adv_by_std_in_grpo")
        yield Case("RLOO", "verl", _outcome(_ours_rloo, verl.compute_rloo_outcome_advantage))
        yield from _steps(verl)
        yield from _gae("verl", verl.compute_gae_advantage_return, "lam", "mask")
    if peers.skyrl:
        skyrl = peers.skyrl.core
        yield from _groups("skyrl", skyrl.compute_grpo_outcome_advantage, "grpo_norm_by_std")
        yield Case("RLOO", "skyrl", _outcome(_ours_rloo, skyrl.compute_rloo_outcome_advantage))
        yield from _gae("skyrl", skyrl.compute_gae_advantage_return, "lambd", "solid_mask")
    if peers.openrlhf:
        yield Case("DAPO's length penalty", "openrlhf", _penalty(peers.openrlhf))


def _score_rows(inputs: Inputs) -> Tensor:
    """[B, T] the row's reward at its last trained token."""
    rows = torch.zeros_like(inputs.mask)
    last = inputs.mask.shape[1] - 1 - inputs.mask.flip(-1).argmax(-1)
    rows[torch.arange(ROWS), last] = inputs.rewards
    return rows


def _ours(inputs: Inputs, config: NormConfig, groups: np.ndarray | None = None) -> np.ndarray:
    rewards = inputs.rewards.double().numpy()
    groups = inputs.groups if groups is None else groups
    return normalise(rewards, np.ones(ROWS, bool), groups, config)


def _ours_rloo(inputs: Inputs) -> np.ndarray:
    return _ours(inputs, NormConfig(mean="leave_one_out"))


def _outcome(ours: Any, theirs: Any, **keys: Any) -> Any:
    """Advantages of rows, one number for all tokens of each."""

    def run(inputs: Inputs) -> Pairs:
        groups = keys.get("index", inputs.groups)
        given = {**keys, "index": groups}
        found, _ = theirs(_score_rows(inputs), inputs.mask.clone(), **given)
        mine = torch.from_numpy(ours(inputs))[:, None].expand_as(found)
        return [(inputs.flat(mine), inputs.flat(found))]

    return run


def _groups(peer: str, theirs: Any, switch: str) -> Iterator[Case]:
    for what, config, by_std, reason in (
        ("GRPO advantages, unbiased: true", NormConfig(mean="group", std="group", unbiased=True),
         True, EPSILON),
        ("GRPO advantages, default", NormConfig(mean="group", std="group"), True, POPULATION),
        ("Dr. GRPO advantages", NormConfig(mean="group"), False, ""),
    ):  # fmt: skip
        ours = _with(config)
        yield Case(what, peer, _outcome(ours, theirs, **{switch: by_std}), reason)
    alone = np.arange(ROWS)
    ours = _with(NormConfig(mean="group"), alone)
    keys = {switch: False, "index": alone}
    yield Case("groups of one sample", peer, _outcome(ours, theirs, **keys), SINGLE)


def _with(config: NormConfig, groups: np.ndarray | None = None) -> Any:
    return lambda inputs: _ours(inputs, config, groups)


def _steps(verl: Any) -> Iterator[Case]:
    """REINFORCE++ and its baseline form: normalised over all tokens of the step."""
    whole = NormConfig(mean="batch", std="batch", unbiased=True)

    def plain(inputs: Inputs) -> Pairs:
        found, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
            inputs.token_rewards, inputs.solid_mask, config=SimpleNamespace(gamma=1.0)
        )
        rewards = inputs.token_rewards.double().numpy()
        ahead = [
            token_gae(row[kept], np.zeros(kept.sum()), discount=1.0, gae_lambda=1.0)[0]
            for row, kept in zip(rewards, inputs.solid_mask.bool().numpy(), strict=True)
        ]
        flat = np.concatenate(ahead)
        every = np.ones(len(flat), bool)
        ours = normalise(flat, every, np.zeros(len(flat), int), whole)
        return [(torch.from_numpy(ours), inputs.flat(found, inputs.solid_mask))]

    def baseline(inputs: Inputs) -> Pairs:
        found, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
            _score_rows(inputs), inputs.mask.clone(), index=inputs.groups
        )
        centred = torch.from_numpy(_ours(inputs, NormConfig(mean="group")))
        flat = inputs.flat(centred[:, None].expand_as(found)).numpy()
        every = np.ones(len(flat), bool)
        ours = normalise(flat, every, np.zeros(len(flat), int), whole)
        return [(torch.from_numpy(ours), inputs.flat(found))]

    yield Case("REINFORCE++ advantages, unbiased: true", "verl", plain)
    yield Case("REINFORCE++ baseline advantages, unbiased: true", "verl", baseline)


def _gae(peer: str, theirs: Any, name: str, mask_name: str) -> Iterator[Case]:
    """GAE with discount 0.97 and lambda 0.9: returns, and advantages whitened by the peer."""

    def run(inputs: Inputs) -> Pairs:
        mask = getattr(inputs, mask_name)
        rewards, values = inputs.token_rewards * mask, inputs.values * mask
        advantages, returns = theirs(
            token_level_rewards=rewards,
            values=values,
            response_mask=mask,
            gamma=0.97,
            **{name: 0.9},
        )
        pairs = [
            token_gae(reward, value, discount=0.97, gae_lambda=0.9, trained=kept)
            for reward, value, kept in zip(
                rewards.double().numpy(), values.double().numpy(), mask.bool().numpy(), strict=True
            )
        ]
        ours = [torch.from_numpy(np.stack(column)) for column in zip(*pairs, strict=True)]
        flat = inputs.flat(ours[0], mask).numpy()
        config = NormConfig(mean="batch", std="batch", unbiased=True)
        white = normalise(flat, np.ones(len(flat), bool), np.zeros(len(flat), int), config)
        return [
            (inputs.flat(ours[1], mask), inputs.flat(returns, mask)),
            (torch.from_numpy(white), inputs.flat(advantages, mask)),
        ]

    gaps = "with gaps" if mask_name == "mask" else "without gaps"
    yield Case(f"GAE, returns and whitened advantages, {gaps}", peer, run)


def _penalty(openrlhf: SimpleNamespace) -> Any:
    def run(inputs: Inputs) -> Pairs:
        lengths = inputs.solid_mask.sum(-1).long()
        episodes = SimpleNamespace(response_length=lengths, rewards=inputs.rewards.clone())
        openrlhf.length.apply_overlong_penalty([episodes], 36, 12, 0.5)
        cost = overlong_penalty(lengths.numpy(), tokens=12, limit=36, factor=0.5)
        return [(inputs.rewards.double() + torch.from_numpy(cost), episodes.rewards)]

    return run
