"""Learning from pairs of answers, one better than the other: DPO and reward models."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from areal_ray.algorithms.surrogates import TokenSums

DpoLoss = Literal["sigmoid", "ipo", "hinge"]


def sequence_log_ratios(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    length_normalised: bool = False,
) -> Tensor:
    """[S] float64: log pi - log pi_reference of whole answers, summed or averaged over tokens.

    Args:
        logprobs: [T] of the answers' tokens; carry the gradient.
        reference_logprobs: [T] constant.
        sequence_ids: [T] int64 below `num_sequences`: the answer a token belongs to.
        num_sequences: S; an answer without tokens has 0.
        length_normalised: Average; what "ipo" needs and length-normalised DPO means.
    """
    gaps = logprobs.double() - reference_logprobs.detach().double()
    totals = gaps.new_zeros(num_sequences).index_add(0, sequence_ids, gaps)
    if not length_normalised:
        return totals
    counts = gaps.new_zeros(num_sequences).index_add(0, sequence_ids, torch.ones_like(gaps))
    return totals / counts.clamp(min=1.0)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    pair_weights: Tensor,
    *,
    beta: float,
    kind: DpoLoss = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, TokenSums]:
    """The loss of pairs, summed; D = chosen - rejected.

    sigmoid: -log sigmoid(beta * D) (Rafailov et al., arXiv:2305.18290, eq. 7); with smoothing e,
    (1 - e) of that and e of the loss of the pair turned round (cDPO, Mitchell, 2023).
    ipo: (D - 1 / (2 * beta))^2 (Azar et al., arXiv:2310.12036, eq. 17), D of averages a token.
    hinge: max(0, 1 - beta * D) (SLiC, arXiv:2305.10425).

    Args:
        chosen: [P] of the better answers, from `sequence_log_ratios`; carry the gradient.
        rejected: [P] of the worse.
        pair_weights: [P] 1 / pairs over all ranks and micro-batches makes the sum the mean.
        beta: Strength of the pull to the reference, > 0.
        kind: See above.
        label_smoothing: Share of pairs believed to be the wrong way round, in 0..0.5; of sigmoid.
    """
    if not 0.0 <= label_smoothing < 0.5 or (label_smoothing and kind != "sigmoid"):
        raise ValueError(
            f"label_smoothing: is {label_smoothing:g} with kind '{kind}'; must be 0, or below 0.5 "
            "with kind 'sigmoid'"
        )
    margin = chosen - rejected
    if kind == "ipo":
        losses = (margin - 1.0 / (2.0 * beta)).square()
    elif kind == "hinge":
        losses = torch.relu(1.0 - beta * margin)
    else:
        straight, turned = logsigmoid(beta * margin), logsigmoid(-beta * margin)
        losses = -(1.0 - label_smoothing) * straight
        if label_smoothing:
            losses = losses - label_smoothing * turned
    sums = _pair_sums(beta * chosen, beta * rejected)
    return (losses * pair_weights).sum(), sums


def bradley_terry_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, pair_weights: Tensor
) -> tuple[Tensor, TokenSums]:
    """-log sigmoid(score of the better - score of the worse), summed over pairs.

    Bradley and Terry, 1952; Ouyang et al., arXiv:2203.02155, eq. 1. Shapes as in `dpo_loss`.
    """
    losses = -logsigmoid(chosen_scores - rejected_scores)
    return (losses * pair_weights).sum(), _pair_sums(chosen_scores, rejected_scores)


def _pair_sums(chosen: Tensor, rejected: Tensor) -> TokenSums:
    """Sums for metrics, to be divided by `pairs`; a tie is half right."""
    chosen, rejected = chosen.detach(), rejected.detach()
    right = (chosen > rejected).sum() + 0.5 * (chosen == rejected).sum()
    return {
        "pairs": torch.tensor(len(chosen), device=chosen.device),
        "pair_accuracy": right,
        "chosen_reward": chosen.sum(),
        "rejected_reward": rejected.sum(),
        "reward_margin": (chosen - rejected).sum(),
    }
