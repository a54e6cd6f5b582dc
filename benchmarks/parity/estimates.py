"""KL estimators, aggregation and the critic's loss of each peer beside ours."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from areal_ray.algorithms.aggregation import GlobalCounts, token_weights
from areal_ray.algorithms.kl import kl_estimate
from areal_ray.algorithms.values import clipped_value_loss
from benchmarks.parity.case import Case, Pairs, both
from benchmarks.parity.inputs import ROWS, WIDTH, Inputs
from benchmarks.parity.peers import Peers
from benchmarks.parity.policy import SKYRL_AGGREGATION, VERL_AGGREGATION

FAR = (
    "where policy and reference lie 12 nats apart ours takes the estimate at a distance of 10 and "
    "keeps its gradient, so that the token is drawn back; theirs cuts the value at 10, gradient 0"
)


def estimate_cases(peers: Peers) -> Iterator[Case]:
    """KL, then aggregation, then values."""
    for kind in ("k1", "k2", "k3"):
        for peer, estimate in _estimators(peers, kind):
            yield Case(f"KL {kind}, value and gradient", peer, _kl(kind, estimate))
    for peer, estimate in _estimators(peers, "k3"):
        yield Case("KL k3, 12 nats away", peer, _kl("k3", estimate, shift=12.0), FAR)
    yield from _aggregation_cases(peers)
    yield from _value_cases(peers)


def _estimators(
    peers: Peers, kind: str
) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    if peers.verl:
        yield "verl", lambda policy, other: peers.verl.core.kl_penalty(policy, other, kind)
    if peers.openrlhf:
        yield (
            "openrlhf",
            lambda policy, other: peers.openrlhf.utils.compute_approx_kl(
                policy, other, kl_estimator=kind
            ),
        )
    if peers.skyrl:
        yield (
            "skyrl",
            lambda policy, other: peers.skyrl.core.compute_approx_kl(
                policy, other, kl_estimator_type=kind
            ),
        )


def _kl(kind: str, estimate: Any, shift: float = 0.0) -> Any:
    def run(inputs: Inputs) -> Pairs:
        other = inputs.reference + shift
        found = both(
            lambda policy: kl_estimate(inputs.flat(policy), inputs.flat(other), kind).sum(),
            lambda policy: inputs.flat(estimate(policy, other)).sum(),
            inputs.logprobs,
            inputs.mask,
        )
        ours = kl_estimate(inputs.flat(inputs.logprobs), inputs.flat(other), kind)
        return [*found, (ours, inputs.flat(estimate(inputs.logprobs, other)))]

    return run


def _aggregation_cases(peers: Peers) -> Iterator[Case]:
    if peers.verl:
        for name, theirs in VERL_AGGREGATION.items():
            yield Case(f"aggregation {name}", "verl", _aggregated(name, _verl(peers.verl, theirs)))
    if peers.skyrl:
        for name, theirs in SKYRL_AGGREGATION.items():
            yield Case(f"aggregation {name}", "skyrl", _aggregated(name, _sky(peers.skyrl, theirs)))
        yield Case(
            "aggregation sequence_mean, a row without trained tokens",
            "skyrl",
            _aggregated("sequence_mean", _sky(peers.skyrl, "sequence_mean"), num_empty=3),
            "ours is the mean over sequences that train, as in verl and OpenRLHF; SkyRL and trl "
            "count the empty ones",
        )
    if peers.openrlhf:
        for name in ("token_mean", "sequence_mean"):
            yield Case(
                f"aggregation {name}, also with rows without trained tokens",
                "openrlhf",
                _aggregated(name, _open(peers.openrlhf, name), num_empty=3),
            )


def _aggregated(name: str, theirs: Any, num_empty: int = 0) -> Any:
    """The same token losses, and where the mask leaves whole rows out."""

    def run(inputs: Inputs) -> Pairs:
        mask = inputs.mask.clone()
        mask[:num_empty] = 0
        lengths = mask.sum(-1).long()[torch.arange(ROWS)[:, None].expand_as(mask)[mask.bool()]]
        counts = GlobalCounts(len(lengths), ROWS - num_empty, ROWS - num_empty)
        weights = token_weights(name, lengths.numpy(), lengths.numpy(), counts, WIDTH)
        losses = inputs.token_advantages
        ours = (inputs.flat(losses, mask) * torch.from_numpy(weights)).sum()
        return [(ours, theirs(losses, mask))]

    return run


def _verl(verl: SimpleNamespace, mode: str) -> Any:
    return lambda losses, mask: verl.core.agg_loss(losses, mask, mode)


def _sky(skyrl: SimpleNamespace, mode: str) -> Any:
    scale = skyrl.core.apply_loss_reduction_to_advantages_minibatch
    return lambda losses, mask: (scale(losses, mask, mode, ROWS, WIDTH) * mask).sum()


def _open(openrlhf: SimpleNamespace, name: str) -> Any:
    is_token = name == "token_mean"
    return lambda losses, mask: openrlhf.loss.aggregate_loss(losses, mask, is_token)


def _value_cases(peers: Peers) -> Iterator[Case]:
    if peers.verl:
        yield Case("critic's clipped loss", "verl", _values(_verl_values(peers.verl)))
    if peers.openrlhf:
        loss = peers.openrlhf.loss.ValueLoss(clip_eps=0.5)
        yield Case("critic's clipped loss", "openrlhf", _values(loss))


def _verl_values(verl: SimpleNamespace) -> Any:
    return lambda values, old, returns, mask: verl.core.compute_value_loss(
        values, returns, old, mask, 0.5
    )[0]


def _values(theirs: Any) -> Any:
    """Values, old values and returns are three of the random columns."""

    def run(inputs: Inputs) -> Pairs:
        old, returns = inputs.token_advantages, inputs.reference
        every = torch.ones(len(inputs.ids), dtype=torch.bool)
        weights = torch.full((len(inputs.ids),), 1.0 / len(inputs.ids), dtype=old.dtype)
        return both(
            lambda values: clipped_value_loss(
                inputs.flat(values), inputs.flat(old), inputs.flat(returns), every, weights
            )[0],
            lambda values: theirs(values, old, returns, inputs.mask),
            inputs.values,
            inputs.mask,
        )

    return run
