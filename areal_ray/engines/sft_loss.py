"""SftLoss: what a micro-batch of given conversations costs, by its answers or by a teacher."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_ray.algorithms.distillation import full_kl, topk_kl
from areal_ray.algorithms.packing import MicroBatch, TrainSequence
from areal_ray.algorithms.surrogates import TokenSums
from areal_ray.engines.frozen import FrozenModel
from areal_ray.engines.row_forward import RowForward
from areal_ray.engines.sft import OfflineDistillationConfig

_CHUNK_TOKENS = 512
"""Logits of both models are made for so many tokens at a time, and again in the backward pass."""


class SftLoss:
    """Mean negative log-prob of the trained tokens; or KL to a teacher, that loss beside it."""

    def __init__(
        self,
        forward: RowForward,
        teacher: FrozenModel | None,
        config: OfflineDistillationConfig | None,
    ) -> None:
        self._forward = forward
        self._teacher = teacher
        self._config = config

    def micro_batches(self, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
        """Passes that every model here can read."""
        teacher = None if self._teacher is None else self._teacher.forward
        return self._forward.micro_batches(sequences, beside=teacher)

    def __call__(self, micro: MicroBatch, num_tokens: int) -> tuple[Tensor, TokenSums]:
        """[] loss and sums for metrics.

        Args:
            micro: Rows of one conversation each.
            num_tokens: Trained tokens over all ranks.
        """
        if self._config is None:
            scored = self._forward(micro, 1.0)
            sums = {
                "tokens": torch.tensor(len(micro.targets)),
                "entropy": scored.entropy.sum(),
                "correct": scored.is_argmax.sum(),
            }
            return -scored.logprobs.sum() / num_tokens, sums
        return self._distilled(micro, num_tokens, self._config)

    def _distilled(
        self, micro: MicroBatch, num_tokens: int, config: OfflineDistillationConfig
    ) -> tuple[Tensor, TokenSums]:
        assert self._teacher is not None, "the recipe gives kind distill a teacher"
        states, told = self._forward.states(micro), self._teacher.states(micro)
        targets = torch.from_numpy(micro.targets).to(states.device)
        columns = [
            checkpoint(self._chunk, *chunk, use_reentrant=False)
            for chunk in zip(
                *(torch.split(t, _CHUNK_TOKENS) for t in (states, told, targets)), strict=True
            )
        ]
        gaps, logprobs, is_right = (torch.cat(c) for c in zip(*columns, strict=True))
        loss = (gaps.sum() - config.answer_weight * logprobs.sum()) / num_tokens
        sums = {
            "tokens": torch.tensor(len(targets)),
            "correct": is_right.sum(),
            "teacher_kl": gaps.sum(),
            "judged_tokens": torch.tensor(len(targets)),
        }
        return loss, sums

    def _chunk(self, states: Tensor, told: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """[n] KL and log-prob of the given token, and [n] whether it is the likeliest."""
        config, teacher = self._config, self._teacher
        assert config is not None, "checked by the caller"
        assert teacher is not None, "checked by the caller"
        student = _wide(self._forward.logits_of(states)) / config.temperature
        # A teacher's embedding may be padded beyond the student's vocabulary.
        wanted = _wide(teacher.logits_of(told))[:, : student.shape[-1]] / config.temperature
        if config.top_k is None or config.top_k >= student.shape[-1]:
            gaps = full_kl(student, wanted, direction=config.direction)
        else:
            listed = torch.log_softmax(wanted, -1).topk(config.top_k, dim=-1)
            own = torch.log_softmax(student, -1).gather(-1, listed.indices)
            gaps = topk_kl(own, listed.values, direction=config.direction)
        # What is said of the given tokens is at temperature 1, as it is sampled and scored.
        table = torch.log_softmax(student * config.temperature, -1)
        logprobs = table.gather(-1, targets[:, None])[:, 0]
        return gaps, logprobs, (logprobs >= table.amax(-1)).detach()


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
