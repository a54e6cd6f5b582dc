"""One comparison, and how far two results lie apart."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.parity.inputs import Inputs

Pairs = list[tuple[Tensor, Tensor]]
"""Ours and theirs: values, gradients, weights, whatever there is."""


@dataclass(frozen=True, slots=True)
class Case:
    """Something that we and a peer both compute."""

    what: str
    peer: str
    run: Callable[[Inputs], Pairs]
    differs: str = ""
    """Why the numbers differ on purpose; empty: they must agree."""


def with_gradient(
    loss_of: Callable[[Tensor], Tensor], logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Loss, and its gradient at the tokens whose mask is 1."""
    leaf = logprobs.clone().requires_grad_()
    loss = loss_of(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient[mask.bool()]


def both(
    ours: Callable[[Tensor], Tensor],
    theirs: Callable[[Tensor], Tensor],
    logprobs: Tensor,
    mask: Tensor,
) -> Pairs:
    """Loss and gradient of each."""
    return list(
        zip(with_gradient(ours, logprobs, mask), with_gradient(theirs, logprobs, mask), strict=True)
    )


def distance(pairs: Pairs) -> float:
    """The largest |ours - theirs|, each pair in units of the largest of either."""
    found = 0.0
    for ours, theirs in pairs:
        ours, theirs = ours.double(), theirs.double()
        scale = max(float(ours.abs().max()), float(theirs.abs().max()), 1e-12)
        found = max(found, float((ours - theirs).abs().max()) / scale)
    return found
