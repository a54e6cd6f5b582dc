"""Learning from pairs and from a teacher: each peer beside ours."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from areal_ray.algorithms.distillation import full_kl
from areal_ray.algorithms.preference import bradley_terry_loss, dpo_loss, sequence_log_ratios
from benchmarks.parity.case import Case, Pairs, both
from benchmarks.parity.inputs import ROWS, WIDTH, Inputs
from benchmarks.parity.peers import Peers

PAIRS = ROWS // 2
BETA = 0.1


def preference_cases(peers: Peers) -> Iterator[Case]:
    """DPO, reward models, distillation, supervised."""
    if peers.trl:
        for what, kind, theirs, averaged in (
            ("DPO sigmoid", "sigmoid", "sigmoid", False),
            ("DPO sigmoid, length-normalised", "sigmoid", "sigmoid_norm", True),
            ("DPO hinge", "hinge", "hinge", False),
        ):
            yield Case(what, "trl", _dpo(kind, averaged, 0.0, _trl(peers.trl, theirs)))
        yield Case("IPO", "trl", _dpo("ipo", True, 0.0, _trl(peers.trl, "ipo")))
        yield Case("KL to a teacher, reverse", "trl", _distilled("reverse", peers.trl))
        yield Case("KL to a teacher, forward", "trl", _distilled("forward", peers.trl))
    if peers.openrlhf:
        for what, kind, smoothing in (
            ("DPO sigmoid", "sigmoid", 0.0),
            ("DPO, label smoothing 0.1", "sigmoid", 0.1),
            ("IPO, sums of log-probs", "ipo", 0.0),
        ):
            reason = (
                "ours takes averages a token, as its authors did (and trl); OpenRLHF sums"
                if kind == "ipo"
                else ""
            )
            theirs = _openrlhf(peers.openrlhf, kind == "ipo", smoothing)
            yield Case(what, "openrlhf", _dpo(kind, kind == "ipo", smoothing, theirs), reason)
        yield Case("reward model (Bradley-Terry)", "openrlhf", _scores(peers.openrlhf))
        yield Case("supervised, token mean", "openrlhf", _supervised(peers.openrlhf))


def _dpo(kind: str, averaged: bool, smoothing: float, theirs: Any) -> Any:
    """The first half of the rows are the better answers."""

    def run(inputs: Inputs) -> Pairs:
        weights = torch.full((PAIRS,), 1.0 / PAIRS, dtype=torch.float64)

        def ours(logprobs: Tensor) -> Tensor:
            ratios = sequence_log_ratios(
                inputs.flat(logprobs),
                inputs.flat(inputs.reference),
                inputs.ids,
                ROWS,
                length_normalised=averaged,
            )
            chosen, rejected = ratios.chunk(2)
            return dpo_loss(
                chosen, rejected, weights, beta=BETA, kind=kind, label_smoothing=smoothing
            )[0]

        return both(ours, lambda x: theirs(x, inputs), inputs.logprobs, inputs.mask)

    return run


def _openrlhf(openrlhf: SimpleNamespace, is_ipo: bool, smoothing: float) -> Any:
    loss = openrlhf.loss.DPOLoss(BETA, label_smoothing=smoothing, ipo=is_ipo)

    def of(logprobs: Tensor, inputs: Inputs) -> Tensor:
        sums = [(x * inputs.mask).sum(-1).chunk(2) for x in (logprobs, inputs.reference)]
        return loss(*sums[0], *sums[1])[0]

    return of


def _trl(trl: SimpleNamespace, name: str) -> Any:
    """DPOTrainer's own `_compute_loss`; the model is a table of log-probs."""

    def of(logprobs: Tensor, inputs: Inputs) -> Tensor:
        told = _told(logprobs * inputs.mask)
        trainer = SimpleNamespace(
            model=lambda **given: told,
            ref_model=lambda **given: _told(inputs.reference * inputs.mask),
            accelerator=_Alone(),
            aux_loss_enabled=False,
            ld_alpha=None,
            precompute_ref_logps=False,
            f_divergence_type="reverse_kl",
            loss_types=[name],
            loss_weights=[1.0],
            beta=BETA,
            label_smoothing=0.0,
            use_weighting=False,
            args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
            _metrics={"eval": _Lists()},
            _total_train_tokens=0,
            is_vision_dataset=False,
        )
        trainer.model = _Model(told)
        # It shifts by one token: the first predicts nothing.
        mask = torch.cat([torch.zeros(ROWS, 1), inputs.mask], -1)
        ids = torch.zeros(ROWS, WIDTH + 1, dtype=torch.long)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
        return trl.dpo._compute_loss(trainer, trainer.model, batch, return_outputs=False)

    return of


class _Model:
    training = False
    peft_config = None

    def __init__(self, told: SimpleNamespace) -> None:
        self._told = told
        self.is_gradient_checkpointing = False

    def __call__(self, **given: Any) -> SimpleNamespace:
        return self._told


class _Alone:
    """One process's accelerator."""

    device = torch.device("cpu")

    def gather(self, found: Tensor) -> Tensor:
        return found

    gather_for_metrics = gather


class _Lists(dict):
    def __missing__(self, key: str) -> list:
        return self.setdefault(key, [])


def _told(logprobs: Tensor) -> SimpleNamespace:
    nothing = torch.zeros(ROWS, WIDTH)
    return SimpleNamespace(
        log_probs=logprobs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )


def _scores(openrlhf: SimpleNamespace) -> Any:
    def run(inputs: Inputs) -> Pairs:
        every = torch.ones(ROWS, 1)
        weights = torch.full((PAIRS,), 1.0 / PAIRS, dtype=inputs.rewards.dtype)
        return both(
            lambda scores: bradley_terry_loss(*scores[:, 0].chunk(2), weights)[0],
            lambda scores: openrlhf.loss.PairWiseLoss()(*scores[:, 0].chunk(2)),
            3.0 * inputs.rewards[:, None],
            every,
        )

    return run


def _supervised(openrlhf: SimpleNamespace) -> Any:
    def run(inputs: Inputs) -> Pairs:
        return both(
            lambda logprobs: -inputs.flat(logprobs).sum() / len(inputs.ids),
            lambda logprobs: openrlhf.loss.SFTLoss()(logprobs, inputs.mask),
            inputs.logprobs,
            inputs.mask,
        )

    return run


def _distilled(direction: str, trl: SimpleNamespace) -> Any:
    """The columns of the batch stand for the logits of 24 tokens over a vocabulary of 40."""

    def run(inputs: Inputs) -> Pairs:
        beta = 1.0 if direction == "reverse" else 0.0
        return both(
            lambda student: full_kl(student, inputs.values, direction=direction).sum(),
            lambda student: trl.gkd.generalized_jsd_loss(
                student, inputs.values, beta=beta, reduction="sum"
            ),
            inputs.token_advantages,
            torch.ones_like(inputs.mask),
        )

    return run
