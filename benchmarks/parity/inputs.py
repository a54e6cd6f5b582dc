"""Shared random inputs: a padded batch as the peers take it, and the same flat as we do."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ROWS, WIDTH, GROUP = 24, 40, 4


@dataclass(frozen=True, slots=True)
class Inputs:
    """[B, T] columns; where `mask` is 0 they hold numbers all the same, which must not matter."""

    logprobs: Tensor
    """Of the policy."""
    proximal: Tensor
    """At the start of the step, about 0.5 away."""
    behaviour: Tensor
    """As sampled, about 0.6 further."""
    reference: Tensor
    """Of the reference model."""
    advantages: Tensor
    """One number for each row."""
    token_advantages: Tensor
    """One for each token."""
    mask: Tensor
    """1 on tokens that train; with gaps, as where a tool spoke."""
    solid_mask: Tensor
    """The same rows without gaps."""
    rewards: Tensor
    """[B] of each row."""
    token_rewards: Tensor
    """A small one for each token of `solid_mask`, and `rewards` at the last."""
    values: Tensor
    """Of a critic."""
    groups: np.ndarray
    """[B] number of each row's group."""

    def flat(self, column: Tensor, mask: Tensor | None = None) -> Tensor:
        """[M] the entries where the mask is 1, row by row; carries the gradient."""
        return column[(self.mask if mask is None else mask).bool()]

    @property
    def ids(self) -> Tensor:
        """[M] int64 row of each trained token."""
        return self.flat(torch.arange(ROWS)[:, None].expand(ROWS, WIDTH))

    @property
    def lengths(self) -> np.ndarray:
        """[M] trained tokens of the row of each."""
        counts = self.mask.sum(-1).long()
        return counts[self.ids].numpy()


def make_inputs(dtype: torch.dtype, seed: int = 0) -> Inputs:
    """The same numbers whatever the dtype, rounded to it."""
    rng = np.random.default_rng(seed)

    def noise(scale: float) -> np.ndarray:
        return rng.normal(0.0, scale, (ROWS, WIDTH))

    logprobs = -np.abs(noise(1.0)) - 0.05
    proximal = np.minimum(logprobs + noise(0.5), -0.01)
    behaviour = np.minimum(proximal + noise(0.6), -0.01)
    reference = np.minimum(logprobs + noise(0.3), -0.01)
    lengths = rng.integers(6, WIDTH + 1, ROWS)
    solid = np.arange(WIDTH)[None, :] < lengths[:, None]
    gaps = solid & ((np.arange(WIDTH)[None, :] % 11) < 8)
    rewards = rng.random(ROWS).round(3)
    token_rewards = np.where(solid, noise(0.05), 0.0)
    token_rewards[np.arange(ROWS), lengths - 1] += rewards
    columns = {
        "logprobs": logprobs,
        "proximal": proximal,
        "behaviour": behaviour,
        "reference": reference,
        "advantages": np.repeat(rng.normal(0.0, 1.0, (ROWS, 1)), WIDTH, 1),
        "token_advantages": noise(1.0),
        "mask": gaps,
        "solid_mask": solid,
        "rewards": rewards,
        "token_rewards": token_rewards,
        "values": noise(0.5),
    }
    tensors = {
        name: torch.from_numpy(np.asarray(x, float)).to(dtype) for name, x in columns.items()
    }
    return Inputs(**tensors, groups=np.arange(ROWS) // GROUP)
