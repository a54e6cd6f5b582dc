"""Learning from a teacher: on the policy's own tokens, or on whole distributions.

On-policy distillation (Agarwal et al., arXiv:2306.13649; Thinking Machines, "On-policy
distillation", 2025) goes through the policy gradient: `reverse_kl_rewards` are constant rewards
of tokens, and E[reward * d log pi] is minus the gradient of KL(pi || teacher). Differentiating
the sampled log pi - log teacher itself would give E[d log pi] = 0: noise.

Summed over what follows each token (gae.discount 1) the rewards give the gradient of the KL
between whole answers; taken token by token (0, the default of kind opd) that of the KLs at the
prefixes the policy happens to sample, which is far less noisy.
"""

from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Direction = Literal["reverse", "forward"]
"""reverse: KL(student || teacher), seeks one mode. forward: KL(teacher || student), covers all."""

_LOWEST = -1e4
"""Log-prob that stands for an impossible token: -inf * 0 would be NaN."""
_FULLEST = -1e-6
"""Log of the most probability that the listed tokens of a top-k list may hold together."""


def reverse_kl_rewards(
    teacher_logprobs: NDArray[np.float64],
    policy_logprobs: NDArray[np.float64],
    *,
    weight: float = 1.0,
    clip: float | None = None,
) -> NDArray[np.float64]:
    """[T] weight * (log pi_teacher - log pi) of tokens the policy sampled, a constant reward.

    Args:
        teacher_logprobs: [T] the teacher's of those tokens.
        policy_logprobs: [T] of the policy that the gradient starts from.
        weight: Beside the advantage from rewards.
        clip: The difference is cut to -clip..clip first; biased, but bounded.
    """
    gap = np.asarray(teacher_logprobs, np.float64) - np.asarray(policy_logprobs, np.float64)
    return weight * (gap if clip is None else np.clip(gap, -clip, clip))


def full_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    direction: Direction = "reverse",
    temperature: float = 1.0,
) -> Tensor:
    """[N] exact KL of two next-token distributions in nats, with gradient to the student.

    Forward is classical distillation (Hinton et al., arXiv:1503.02531).

    Args:
        student_logits: [N, V]
        teacher_logits: [N, V] constant.
        direction: See `Direction`.
        temperature: Divides both logits.
    """
    student, teacher = (
        torch.log_softmax(_wide(logits), -1)
        for logits in (student_logits / temperature, teacher_logits.detach() / temperature)
    )
    return _kl(student.clamp_min(_LOWEST), teacher.clamp_min(_LOWEST), direction)


def topk_kl(
    student_logprobs: Tensor, teacher_logprobs: Tensor, *, direction: Direction = "forward"
) -> Tensor:
    """[N] KL over K listed tokens and all others taken as one event, in nats.

    Never above the exact KL (grouping loses information) and equal to it where K is all; unlike
    a sum over the list alone, it is never negative. The others hold at least 1e-6 together.

    Args:
        student_logprobs: [N, K] of the listed tokens, usually the teacher's likeliest; with
            gradient.
        teacher_logprobs: [N, K] constant.
        direction: See `Direction`.
    """
    student_logprobs, teacher_logprobs = _wide(student_logprobs), _wide(teacher_logprobs)
    student, teacher = (
        torch.cat([listed, _rest(listed)], dim=-1).clamp_min(_LOWEST)
        for listed in (student_logprobs, teacher_logprobs.detach())
    )
    return _kl(student, teacher, direction)


def _wide(values: Tensor) -> Tensor:
    """In float32 at least."""
    return values if values.dtype == torch.float64 else values.float()


def _rest(listed: Tensor) -> Tensor:
    """[N, 1] log-prob of all tokens that are not listed."""
    total = torch.logsumexp(listed, dim=-1, keepdim=True).clamp(max=_FULLEST)
    return torch.log(-torch.expm1(total))


def _kl(student: Tensor, teacher: Tensor, direction: Direction) -> Tensor:
    gap = student - teacher
    if direction == "reverse":
        return (student.exp() * gap).sum(-1)
    return -(teacher.exp() * gap).sum(-1)
