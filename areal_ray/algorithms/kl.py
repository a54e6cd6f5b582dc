"""Estimates of KL(policy || other) at single sampled tokens. Schulman, 2020.

With d = log pi - log other at a token that pi sampled, E the mean over such tokens, in nats:

| kind | value              | E[value]                | E[gradient], as a term of the loss       |
|------|--------------------|-------------------------|------------------------------------------|
| k1   | d                  | KL(pi, other), unbiased | 0: noise, never a loss                   |
| k2   | d * d / 2          | near it for small d     | that of KL(pi, other): right             |
| k3   | exp(-d) - 1 + d    | KL(pi, other), unbiased | that of KL(other, pi): pulls all the same|

Subtracted from the reward instead, k1 alone gives the gradient of KL(pi, other); k3 gives that
of KL(pi, other) - KL(other, pi). (See also arXiv:2506.09477 and arXiv:2510.01555.)
"""

from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KlKind = Literal["k1", "k2", "k3"]

_MAX_GAP = 10.0
"""Largest |d| an estimate is made of; one token of probability 0 must not drown a batch."""


@overload
def kl_estimate(logprobs: Tensor, base_logprobs: Tensor, kind: KlKind) -> Tensor:
    """Of tensors, with gradient."""


@overload
def kl_estimate(
    logprobs: NDArray[np.float64], base_logprobs: NDArray[np.float64], kind: KlKind
) -> NDArray[np.float64]:
    """Of arrays."""


def kl_estimate(
    logprobs: Tensor | NDArray[np.float64],
    base_logprobs: Tensor | NDArray[np.float64],
    kind: KlKind,
) -> Tensor | NDArray[np.float64]:
    """[T] the estimate of each token, in nats, with |d| cut to 10 first.

    Where it was cut the gradient is still there: that at the cut, so that a token far away is
    drawn back too.

    Args:
        logprobs: [T] log pi; a tensor may carry a gradient.
        base_logprobs: [T] the other policy's; constant.
        kind: See the table above.
    """
    if isinstance(logprobs, Tensor):
        gap = logprobs - torch.as_tensor(base_logprobs).detach()
        # Adds exactly 0, and the gradient of d.
        gap = gap.detach().clamp(-_MAX_GAP, _MAX_GAP) + (gap - gap.detach())
        return gap if kind == "k1" else gap * gap / 2 if kind == "k2" else torch.expm1(-gap) + gap
    bounded = np.clip(logprobs - np.asarray(base_logprobs), -_MAX_GAP, _MAX_GAP)
    return (
        bounded
        if kind == "k1"
        else bounded * bounded / 2
        if kind == "k2"
        else np.expm1(-bounded) + bounded
    )
