"""Judge: from the lines of a whole step to the advantage of each token.

One advantage a trajectory where that is all there is; token by token where a critic, a discount
or another model's log-probs have a say. Alike on every rank; collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.packing import TrainSequence
from areal_ray.engines.advantage_columns import (
    ShareScores,
    Signals,
    line_lengths,
    score_step,
    step_normalised,
    token_advantages,
)
from areal_ray.engines.critic import Critic, ValueShare
from areal_ray.engines.frozen import FrozenModel, sequence_logprobs
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.row_forward import RowForward
from areal_ray.engines.train_rows import RowShare, train_sequences
from areal_ray.errors import EngineError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rank's share of a minibatch is worth; columns over its M trained tokens."""

    advantages: NDArray[np.float64]
    """[M]"""
    equal_groups: int
    """Groups that teach nothing by their rewards."""
    returns: NDArray[np.float64] | None = None
    """[M] what the critic should have said."""
    value_share: ValueShare | None = None
    """What it said."""
    start_logprobs: Tensor | None = None
    """[M] of the policy at the start of the step, where they were needed."""
    sums: dict[str, float] = field(default_factory=dict)
    """For metrics."""


class Judge:
    """Holds the models that have a say beside the policy."""

    def __init__(
        self,
        objective: ObjectiveConfig,
        forward: RowForward,
        *,
        temperature: float,
        reference: FrozenModel | None,
        teacher: FrozenModel | None,
        critic: Critic | None,
        ranks: RankGroup,
    ) -> None:
        """Take over loaded models.

        Raises:
            EngineError: The objective reads a model that is not there.
        """
        for name, is_needed, model in (
            ("reference", objective.needs_reference, reference),
            ("teacher", objective.needs_teacher, teacher),
        ):
            if is_needed and model is None:
                raise EngineError(
                    f"learner: the objective of kind '{objective.kind}' reads a {name} model, and "
                    f"none was given. Add the recipe section {name}."
                )
        self._objective = objective
        self._forward = forward
        self._temperature = temperature
        self._reference = reference
        self._teacher = teacher
        self._critic = critic
        self._ranks = ranks

    def __call__(self, shares: Sequence[RowShare]) -> list[Verdict]:
        """Advantages of all minibatches of a step. Collective."""
        objective = self._objective
        scores = score_step(shares, objective, self._ranks.sum_numbers)
        if self._critic is not None:
            self._critic.begin_step()
        needs_tokens = objective.has_token_rewards or objective.gae.discount < 1.0
        by_token = needs_tokens or self._critic is not None
        make = self._by_token if by_token else self._by_trajectory
        verdicts = [make(*pair) for pair in zip(shares, scores, strict=True)]
        columns = step_normalised(
            shares, [v.advantages for v in verdicts], objective, self._ranks.sum_numbers
        )
        return [replace(v, advantages=c) for v, c in zip(verdicts, columns, strict=True)]

    def _by_trajectory(self, share: RowShare, scores: ShareScores) -> Verdict:
        advantages = np.repeat(scores.by_line, line_lengths(share.lines))
        return Verdict(advantages, scores.equal_groups, sums=scores.sums)

    def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> Tensor:
        """[N] of the reference model."""
        assert self._reference is not None, "checked at the start"
        return self._reference.logprobs(sequences, self._temperature)

    def fit(
        self, share: ValueShare, returns: NDArray[np.float64], num_tokens: int
    ) -> dict[str, float]:
        """One update of the critic, `num_tokens` over all ranks; sums for metrics. Collective."""
        assert self._critic is not None, "who judged the share"
        loss = self._critic.fit(share, returns, num_tokens)
        return {"value_loss": loss, "value_updates": 1.0 if self._ranks.rank == 0 else 0.0}

    def _by_token(self, share: RowShare, scores: ShareScores) -> Verdict:
        objective = self._objective
        sequences = train_sequences(share.lines)
        start: Tensor | None = None
        if objective.has_token_rewards:
            start = sequence_logprobs(self._forward, sequences, self._temperature)
        values = self._critic.judge(share.lines) if self._critic is not None else None
        signals = Signals(
            policy=_numbers(start),
            reference=self._asked(self._reference, sequences, objective.has_kl("reward")),
            teacher=self._asked(self._teacher, sequences, objective.needs_teacher),
            values=None if values is None else values.values,
            bootstraps=None if values is None else values.bootstraps,
        )
        found = token_advantages(share, scores.by_line, signals, objective)
        return Verdict(
            found.advantages,
            scores.equal_groups,
            returns=None if values is None else found.returns,
            value_share=values,
            start_logprobs=start,
            sums=scores.sums | found.sums,
        )

    def _asked(
        self, model: FrozenModel | None, sequences: Sequence[TrainSequence], is_read: bool
    ) -> NDArray[np.float64] | None:
        if model is None or not is_read:
            return None
        return _numbers(model.logprobs(sequences, self._temperature))


def _numbers(column: Tensor | None) -> NDArray[np.float64] | None:
    return None if column is None else column.double().cpu().numpy()
