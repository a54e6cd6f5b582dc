"""RlStep: one RL step of a rank: groups to columns, updates of policy and critic, metrics.

Ranks are exact: all counts and statistics are summed over ranks first, so any number of ranks
takes the same step as one. Waits for: the other ranks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from areal_ray.algorithms.aggregation import GlobalCounts, token_weights
from areal_ray.algorithms.correction import loglinear_proximal, m2po_kept, mismatch_sums
from areal_ray.algorithms.losses import TokenColumns, policy_loss
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.packing import MicroBatch
from areal_ray.core.trajectory import Group
from areal_ray.engines.frozen import sequence_logprobs
from areal_ray.engines.judge import Judge, Verdict
from areal_ray.engines.process_group import RankGroup
from areal_ray.engines.protocols import StepStats
from areal_ray.engines.row_forward import RowForward
from areal_ray.engines.step_batch import TrainBatch, train_batch
from areal_ray.engines.train_metrics import (
    Progress,
    TokenTally,
    count_metrics,
    sum_counts,
    token_metrics,
    work_metrics,
)
from areal_ray.engines.train_rows import TrainCounts, collect_lines


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """One rank's share of an update, on the device; columns as in `TrainBatch`."""

    batch: TrainBatch
    totals: TrainCounts
    verdict: Verdict
    micro_batches: list[MicroBatch]
    behaviour_logprobs: Tensor
    advantages: Tensor
    token_weights: Tensor
    staleness: Tensor
    """[N] versions behind the learner."""
    reference_logprobs: Tensor | None
    start_logprobs: Tensor | None
    """[N] of the policy at the start of the step, where a pass has been made."""
    is_empty: bool
    """No rank has anything to learn from."""


class RlStep:
    """What a train engine does with groups; holds no weights of its own."""

    def __init__(
        self,
        forward: RowForward,
        objective: ObjectiveConfig,
        judge: Judge,
        temperature: float,
        ranks: RankGroup,
    ) -> None:
        """Keep what a step needs; load nothing."""
        self._forward = forward
        self._objective = objective
        self._temperature = temperature
        self._judge = judge
        self._ranks = ranks
        self._like = forward.new_column(0)

    def run(
        self,
        minibatches: Sequence[Sequence[Group]],
        version: int,
        oldest_version: int | None,
        progress: Progress,
        update: Callable[[], None],
    ) -> StepStats:
        """An optimizer update for each minibatch.

        Args:
            minibatches: [minibatch] this rank's whole groups.
            version: The learner's, to measure staleness.
            oldest_version: Tokens of older versions do not train; None keeps all.
            progress: Of this step, still at its beginning.
            update: Updates the policy with the gradient that was gathered, and `progress`.
        """
        started = time.monotonic()
        objective = self._objective
        shares = [collect_lines(g, objective, version, oldest_version) for g in minibatches]
        verdicts = self._judge(shares)
        batches = [
            train_batch(share, verdict.advantages, verdict.equal_groups, objective)
            for share, verdict in zip(shares, verdicts, strict=True)
        ]
        totals = sum_counts([batch.counts for batch in batches], self._ranks)
        prepared = [
            self._prepare(*parts, version) for parts in zip(batches, totals, verdicts, strict=True)
        ]
        proximal_started = time.monotonic()
        prepared = self._with_start_logprobs(prepared)
        proximal_s = time.monotonic() - proximal_started
        tally = TokenTally()
        for verdict in verdicts:
            tally.add_numbers(verdict.sums)
        for minibatch in prepared:
            self._train(minibatch, progress.taken / len(prepared), tally, update)
            progress.empty += minibatch.is_empty
        num_tokens = sum(t.tokens for t in totals)
        work = [m for p in prepared for m in p.micro_batches if not p.is_empty]
        sums = tally.over_ranks(self._ranks)
        (oldest,) = self._ranks.max_numbers(
            [float(max((b.max_staleness for b in batches), default=0))]
        )
        metrics = {
            "learner/loss": sums.get("loss", 0.0) / max(1, len(prepared) - progress.empty),
            **token_metrics(sums),
            "mismatch/fresh_tokens": sums.get("fresh_tokens", 0.0),
            **count_metrics(totals, int(oldest)),
            "learner/proximal_s": proximal_s,
            **progress.metrics(),
            **work_metrics(work, num_tokens, started, self._ranks),
        }
        return StepStats(metrics, num_tokens, progress.taken)

    def _prepare(
        self, batch: TrainBatch, totals: TrainCounts, verdict: Verdict, version: int
    ) -> _Minibatch:
        objective = self._objective
        assert objective.aggregation is not None, "filled in by the kind"
        weights = token_weights(
            objective.aggregation,
            batch.sequence_tokens,
            batch.rollout_tokens,
            GlobalCounts(totals.tokens, totals.sequences, totals.rollouts),
            objective.fixed_length_tokens,
        )
        chosen = torch.from_numpy(batch.chosen).to(self._like.device)
        start, reference = verdict.start_logprobs, None
        if objective.has_kl("loss"):
            reference = self._judge.reference_logprobs(batch.sequences)
        is_silent = totals.teaching_tokens == 0 and not objective.has_other_gradient
        return _Minibatch(
            batch=batch,
            totals=totals,
            verdict=verdict,
            micro_batches=self._forward.micro_batches(batch.sequences),
            behaviour_logprobs=torch.from_numpy(batch.behaviour_logprobs).to(self._like),
            advantages=torch.from_numpy(batch.advantages).to(self._like),
            token_weights=torch.from_numpy(weights).to(self._like),
            staleness=torch.from_numpy(version - batch.versions).to(self._like.device),
            reference_logprobs=reference,
            start_logprobs=None if start is None else start[chosen],
            is_empty=totals.tokens == 0 or is_silent,
        )

    def _with_start_logprobs(self, minibatches: Sequence[_Minibatch]) -> list[_Minibatch]:
        """Log-probs at the start of the step, where an update will come before their use.

        The first minibatch needs none: its own forward pass is the proximal policy's. M2PO wants
        those of a whole minibatch before any of it trains.
        """
        objective = self._objective
        if not objective.needs_proximal or objective.prox_logp_method != "recompute":
            return list(minibatches)
        first = 0 if objective.m2_threshold is not None else 1
        found = list(minibatches[:first])
        for minibatch in minibatches[first:]:
            if minibatch.start_logprobs is None:
                column = sequence_logprobs(
                    self._forward, minibatch.batch.sequences, self._temperature
                )
                minibatch = replace(minibatch, start_logprobs=column)
            found.append(minibatch)
        return found

    def _train(
        self,
        minibatch: _Minibatch,
        done: float,
        tally: TokenTally,
        update: Callable[[], None],
    ) -> None:
        """`done`: share of the step's minibatches that have updated the policy."""
        if not minibatch.is_empty:
            kept = self._m2_kept(minibatch)
            for micro in minibatch.micro_batches:
                loss = self._loss_of(minibatch, micro, kept, done, tally)
                self._forward.backward(loss, is_last=micro is minibatch.micro_batches[-1])
            update()
        value_share, returns = minibatch.verdict.value_share, minibatch.verdict.returns
        if value_share is not None and returns is not None and minibatch.totals.tokens:
            tally.add_numbers(self._judge.fit(value_share, returns, minibatch.totals.tokens))

    def _loss_of(
        self,
        minibatch: _Minibatch,
        micro: MicroBatch,
        m2_kept: Tensor | None,
        done: float,
        tally: TokenTally,
    ) -> Tensor:
        objective = self._objective
        has_bonus = objective.entropy_coef > 0.0
        scored = self._forward(micro, self._temperature, entropy_gradient=has_bonus)
        if micro.is_empty:
            return scored.logprobs.sum()
        at = torch.from_numpy(micro.origins).to(scored.logprobs.device)
        behaviour = minibatch.behaviour_logprobs[at]
        start = minibatch.start_logprobs
        proximal = None if start is None or done == 0.0 else start[at]
        known = scored.logprobs.detach() if done == 0.0 else proximal
        if known is not None:
            tally.add(mismatch_sums(known, behaviour, minibatch.staleness[at]))
        if objective.prox_logp_method == "loglinear" and done > 0.0:
            age = minibatch.staleness[at]
            proximal = loglinear_proximal(behaviour, scored.logprobs, -age, 0, done)
        ids = np.unique(minibatch.batch.sequence_ids[micro.origins], return_inverse=True)[1]
        reference = minibatch.reference_logprobs
        columns = TokenColumns(
            logprobs=scored.logprobs,
            behaviour_logprobs=behaviour,
            advantages=minibatch.advantages[at],
            token_weights=minibatch.token_weights[at],
            sequence_ids=torch.from_numpy(ids).to(at.device),
            proximal_logprobs=proximal,
            reference_logprobs=None if reference is None else reference[at],
            entropy=scored.entropy if has_bonus else None,
            m2_kept=None if m2_kept is None else m2_kept[at],
        )
        loss, sums = policy_loss(objective, columns)
        tally.add({**sums, "loss": loss, "entropy": scored.entropy.sum()})
        return loss

    def _m2_kept(self, minibatch: _Minibatch) -> Tensor | None:
        """[N] which of this rank's tokens M2PO keeps, judged over those of all ranks."""
        start, threshold = minibatch.start_logprobs, self._objective.m2_threshold
        if threshold is None or start is None:
            return None
        every, own = self._ranks.joined(torch.stack([start, minibatch.behaviour_logprobs]))
        is_there = torch.ones_like(every[0], dtype=torch.bool)
        return m2po_kept(every[0], every[1], is_there, threshold)[own]
