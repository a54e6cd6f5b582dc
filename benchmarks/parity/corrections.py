"""Weights and masks between the proximal and the behaviour policy, each peer's beside ours."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from areal_ray.algorithms.correction import behaviour_weights
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import RejectionSamplingConfig
from benchmarks.parity.case import Case, Pairs
from benchmarks.parity.inputs import Inputs
from benchmarks.parity.peers import Peers
from benchmarks.parity.policy import LossOf, against, openrlhf_loss, skyrl_loss, verl_config


def correction_cases(peers: Peers) -> Iterator[Case]:
    """Weights and masks between the proximal and the behaviour policy."""
    settings = {
        "TIS, upper 2": {"action": "clamp", "upper": 2.0},
        "IcePop, 0.5 to 2": {"lower": 0.5, "upper": 2.0},
    }
    for what, bounds in settings.items():
        objective = ObjectiveConfig(kind="decoupled_ppo", rejection_sampling=bounds)
        if peers.verl:
            yield Case(what, "verl", against(objective, _verl_corrected(peers.verl, objective)))
        if peers.openrlhf:
            mode = "clip" if bounds.get("action") else "mask"
            limits = (bounds.get("lower", 0.0), bounds["upper"])
            theirs = openrlhf_loss(
                peers.openrlhf,
                objective,
                is_correction_level="token",
                is_correction_mode=mode,
                is_correction_threshold=limits,
            )
            yield Case(what, "openrlhf", against(objective, theirs))
        if peers.skyrl:
            # Its ratio is capped by 1e9 where the mask alone is wanted.
            theirs = skyrl_loss(
                peers.skyrl,
                objective,
                tis_ratio_type="token",
                token_tis_ratio_clip_high=2.0 if "action" in bounds else 1e9,
                token_mask_is_threshold_low=bounds.get("lower"),
                token_mask_is_threshold_high=bounds["upper"] if "lower" in bounds else None,
            )
            yield Case(what, "skyrl", against(objective, theirs))
    if peers.verl:
        yield from _verl_masks(peers.verl)
    if peers.openrlhf:
        yield from _openrlhf_gates(peers.openrlhf)


def _verl_corrected(
    verl: SimpleNamespace, objective: ObjectiveConfig
) -> Callable[[Inputs], LossOf]:
    bounds = objective.rejection_sampling
    spec = bounds.upper if bounds.lower is None else f"{bounds.lower}_{bounds.upper}"

    def of(inputs: Inputs) -> LossOf:
        weights, _ = verl.correction.compute_rollout_correction_weights(
            inputs.proximal - inputs.behaviour, inputs.mask, "token", spec
        )
        return lambda logprobs: verl.core.compute_policy_loss_vanilla(
            old_log_prob=inputs.proximal,
            log_prob=logprobs,
            advantages=inputs.advantages,
            response_mask=inputs.mask,
            config=verl_config(verl, objective),
            rollout_is_weights=weights,
        )[0]

    return of


def _verl_masks(verl: SimpleNamespace) -> Iterator[Case]:
    """What is kept by each of verl's names for a rejection, and by ours."""
    rules = {
        "token_k1": ({"metric": "kl_k1", "lower": -0.4, "upper": 0.4}, "0.67032_1.49182"),
        "token_k2": ({"metric": "kl_k2", "upper": 0.1}, "0.1"),
        "token_k3": ({"metric": "kl_k3", "upper": 0.1}, "0.1"),
        "seq_sum_k2": ({"metric": "kl_k2", "upper": 3.5, **_level("sum")}, "3.5"),
        "seq_mean_k2": ({"metric": "kl_k2", "upper": 0.18, **_level("mean")}, "0.18"),
        "seq_max_k2": ({"metric": "kl_k2", "upper": 0.8, **_level("max")}, "0.8"),
    }
    for name, (ours, threshold) in rules.items():
        config = RejectionSamplingConfig(**ours)

        def run(inputs: Inputs, name=name, config=config, threshold=threshold) -> Pairs:
            drift = inputs.proximal - inputs.behaviour
            theirs, _ = verl.correction.compute_rollout_rejection_mask(
                drift, inputs.mask, name, threshold
            )
            return [(_kept(inputs, config), inputs.flat(theirs))]

        reason = ""
        if name == "token_k3":
            reason = (
                "ours is k3 of KL(proximal, behaviour), exp(-d) - 1 + d, as in AReaL, and rejects "
                "first what has become less likely; verl's is of the KL the other way round"
            )
        yield Case(f"kept by {name}", "verl", run, reason)

    def sequences(inputs: Inputs) -> Pairs:
        drift = (inputs.proximal - inputs.behaviour) / 4
        theirs, _ = verl.correction.compute_rollout_correction_weights(
            drift, inputs.mask, "sequence", 2.0
        )
        config = RejectionSamplingConfig(action="clamp", upper=2.0, **_level("sum"))
        ours = behaviour_weights(
            inputs.flat(inputs.behaviour + drift),
            inputs.flat(inputs.behaviour),
            torch.ones(len(inputs.ids), dtype=torch.bool),
            config,
            inputs.ids,
        )
        return [(ours.weights, inputs.flat(theirs))]

    yield Case("TIS of sequences, upper 2", "verl", sequences)


def _openrlhf_gates(openrlhf: SimpleNamespace) -> Iterator[Case]:
    kpop = ObjectiveConfig(kind="kpop", rejection_sampling={"metric": "binary_kl", "upper": 0.05})
    theirs = openrlhf_loss(
        openrlhf,
        kpop,
        is_correction_level="token",
        is_correction_gating="binary_kl",
        is_correction_threshold=(0.0, 0.05),
    )
    yield Case(
        "KPop, upper 0.05",
        "openrlhf",
        against(kpop, theirs),
        "KPop takes the larger of the two KLs of the coin toss; OpenRLHF has the one from the "
        "behaviour policy's side",
    )
    bounds = {"lower": 0.95, "upper": 1.05, **_level("mean")}
    whole = ObjectiveConfig(kind="decoupled_ppo", rejection_sampling=bounds)
    theirs = openrlhf_loss(
        openrlhf,
        whole,
        is_correction_level="seq",
        is_correction_threshold=(0.95, 1.05),
    )
    yield Case(
        "mask of sequences by their mean ratio",
        "openrlhf",
        against(whole, theirs),
        "the same sequences are kept; ours then weighs all their tokens by the geometric mean "
        "that was judged (as AReaL), OpenRLHF each token by its own ratio",
    )


def _level(aggregation: str) -> dict[str, str]:
    return {"level": "sequence", "aggregation": aggregation}


def _kept(inputs: Inputs, config: RejectionSamplingConfig) -> Tensor:
    kept = behaviour_weights(
        inputs.flat(inputs.proximal),
        inputs.flat(inputs.behaviour),
        torch.ones(len(inputs.ids), dtype=torch.bool),
        config,
        inputs.ids,
    ).kept
    return kept.to(inputs.mask.dtype)
