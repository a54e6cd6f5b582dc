"""Policy losses of each peer beside ours: value and gradient."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from areal_ray.algorithms.aggregation import GlobalCounts, token_weights
from areal_ray.algorithms.losses import TokenColumns, policy_loss
from areal_ray.algorithms.objective import ObjectiveConfig
from benchmarks.parity.case import Case, Pairs, both
from benchmarks.parity.inputs import ROWS, WIDTH, Inputs
from benchmarks.parity.peers import Peers

LossOf = Callable[[Tensor], Tensor]
VERL_AGGREGATION = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum",
    "fixed_length": "seq-mean-token-sum-norm",
}
SKYRL_AGGREGATION = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "fixed_length": "seq_mean_token_sum_norm",
}
SUBJECTS: dict[str, tuple[dict[str, Any], str]] = {
    "PPO clip, token mean": ({"kind": "decoupled_ppo", "behaviour_weight": "none"}, "vanilla"),
    "DAPO: clip 0.2 and 0.28": (
        {"kind": "dapo", "clip_centre": "proximal", "behaviour_weight": "none"},
        "vanilla",
    ),
    "dual clip, c = 3": (
        {"kind": "decoupled_ppo", "behaviour_weight": "none", "c_clip": 3.0},
        "vanilla",
    ),
    "GRPO, sequence mean": (
        {"kind": "grpo", "clip_centre": "proximal", "behaviour_weight": "none"},
        "vanilla",
    ),
    "Dr. GRPO, fixed length": (
        {"kind": "dr_grpo", "clip_centre": "proximal", "behaviour_weight": "none"},
        "vanilla",
    ),
    "GSPO": ({"kind": "gspo"}, "gspo"),
    "SAPO": ({"kind": "sapo"}, "sapo"),
    "CISPO": ({"kind": "cispo"}, "cispo"),
}
"""What each peer has; the first is ours, the second verl's name. All against the same old policy:
what a peer calls old is our behaviour, or proximal where the clip is centred there."""


def policy_cases(peers: Peers) -> Iterator[Case]:
    """Each loss beside those of the peers that have it."""
    for what, (keys, name) in SUBJECTS.items():
        objective = ObjectiveConfig(**keys)
        if peers.verl:
            yield Case(what, "verl", against(objective, _verl(peers.verl, objective, name)))
        if (
            peers.openrlhf
            and name in ("vanilla", "gspo")
            and objective.aggregation
            in (
                "token_mean",
                "sequence_mean",
            )
        ):
            yield Case(
                what, "openrlhf", against(objective, openrlhf_loss(peers.openrlhf, objective))
            )
        if peers.skyrl:
            yield Case(what, "skyrl", against(objective, skyrl_loss(peers.skyrl, objective)))
        if peers.trl:
            yield Case(what, "trl", against(objective, _trl(peers.trl, objective)))
    if peers.verl:
        plain = ObjectiveConfig(kind="rloo", behaviour_weight="none")
        yield Case("REINFORCE, sequence sum", "verl", against(plain, _verl_reinforce(peers.verl)))


def old_of(inputs: Inputs, objective: ObjectiveConfig) -> Tensor:
    """[B, T] what the ratio is taken against."""
    return inputs.proximal if objective.clip_centre == "proximal" else inputs.behaviour


def our_loss(inputs: Inputs, objective: ObjectiveConfig) -> LossOf:
    """The whole loss of the batch, as the train engine computes it."""
    assert objective.aggregation is not None
    counts = GlobalCounts(len(inputs.ids), ROWS, ROWS)
    weights = token_weights(
        objective.aggregation, inputs.lengths, inputs.lengths, counts, fixed_length=WIDTH
    )

    def loss(logprobs: Tensor) -> Tensor:
        columns = TokenColumns(
            logprobs=inputs.flat(logprobs),
            behaviour_logprobs=inputs.flat(inputs.behaviour),
            advantages=inputs.flat(inputs.advantages),
            token_weights=torch.from_numpy(weights).to(logprobs.dtype),
            sequence_ids=inputs.ids,
            proximal_logprobs=inputs.flat(inputs.proximal),
        )
        return policy_loss(objective, columns)[0]

    return loss


def against(
    objective: ObjectiveConfig, theirs: Callable[[Inputs], LossOf]
) -> Callable[[Inputs], Pairs]:
    """Our loss beside theirs, on the shared inputs."""

    def run(inputs: Inputs) -> Pairs:
        mine = our_loss(inputs, objective)
        return both(mine, theirs(inputs), inputs.logprobs, inputs.mask)

    return run


def _bounds(objective: ObjectiveConfig) -> tuple[float, float]:
    lowest, highest = objective.clip_range
    return 1.0 - lowest, highest - 1.0


def verl_config(verl: SimpleNamespace, objective: ObjectiveConfig) -> Any:
    """verl's dual clip is always on; a bound of 1e9 turns it off."""
    low, high = _bounds(objective)
    return verl.Config(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=objective.c_clip or 1e9,
    )


def _verl(
    verl: SimpleNamespace, objective: ObjectiveConfig, name: str
) -> Callable[[Inputs], LossOf]:
    loss = verl.core.get_policy_loss_fn(name)

    def of(inputs: Inputs) -> LossOf:
        return lambda logprobs: loss(
            old_log_prob=old_of(inputs, objective),
            log_prob=logprobs,
            advantages=inputs.advantages,
            response_mask=inputs.mask,
            loss_agg_mode=VERL_AGGREGATION[objective.aggregation],
            config=verl_config(verl, objective),
        )[0]

    return of


def _verl_reinforce(verl: SimpleNamespace) -> Callable[[Inputs], LossOf]:
    return lambda inputs: (
        lambda logprobs: verl.core.compute_policy_loss_reinforce(
            rollout_log_prob=inputs.behaviour,
            log_prob=logprobs,
            advantages=inputs.advantages,
            response_mask=inputs.mask,
            loss_agg_mode="seq-mean-token-sum",
            config=verl_config(verl, ObjectiveConfig()),
        )[0]
    )


def openrlhf_loss(
    openrlhf: SimpleNamespace, objective: ObjectiveConfig, **correction: Any
) -> Callable[[Inputs], LossOf]:
    """Its `PolicyLoss`; `correction` are its keys of that name."""
    low, high = _bounds(objective)
    loss = openrlhf.loss.PolicyLoss(
        low,
        high,
        dual_clip=objective.c_clip,
        token_level_loss=objective.aggregation == "token_mean",
        policy_loss_type="gspo" if objective.loss == "gspo" else "ppo",
        **correction,
    )
    return lambda inputs: (
        lambda logprobs: loss(
            logprobs,
            old_of(inputs, objective),
            inputs.advantages,
            action_mask=inputs.mask,
            rollout_log_probs=inputs.behaviour,
        )[0]
    )


def skyrl_loss(
    skyrl: SimpleNamespace, objective: ObjectiveConfig, **correction: Any
) -> Callable[[Inputs], LossOf]:
    """Its losses are sums; how they are aggregated is put into the advantages beforehand."""
    low, high = _bounds(objective)
    names = {"ppo_clip": "dual_clip" if objective.c_clip else "regular"}
    name = names.get(objective.loss, objective.loss)
    config = skyrl.Config(policy_loss_type=name, eps_clip_low=low, eps_clip_high=high)
    config.loss_reduction = SKYRL_AGGREGATION[objective.aggregation]
    config.cispo.cispo_eps_clip_low, config.cispo.cispo_eps_clip_high = low, high
    for key, value in correction.items():
        setattr(config.off_policy_correction, key, value)
    loss = skyrl.core.PolicyLossRegistry.get(name)

    def of(inputs: Inputs) -> LossOf:
        scaled = skyrl.core.apply_loss_reduction_to_advantages_minibatch(
            inputs.advantages, inputs.mask, config.loss_reduction, ROWS, WIDTH
        )
        return lambda logprobs: loss(
            logprobs,
            old_of(inputs, objective),
            scaled,
            config,
            loss_mask=inputs.mask,
            rollout_logprobs=inputs.behaviour if correction else None,
        )[0]

    return of


def _trl(trl: SimpleNamespace, objective: ObjectiveConfig) -> Callable[[Inputs], LossOf]:
    """GRPOTrainer's own `_compute_loss`, on a trainer that holds settings and no model."""
    low, high = _bounds(objective)
    names = {"token_mean": "bnpo", "sequence_mean": "grpo", "fixed_length": "dr_grpo"}
    name = (
        names[objective.aggregation] if objective.loss in ("ppo_clip", "gspo") else objective.loss
    )
    trainer = SimpleNamespace(
        loss_type=name,
        epsilon_low=low,
        # Of CISPO trl's epsilon_high is the bound itself, not its distance from 1.
        epsilon_high=1.0 + high if name == "cispo" else high,
        importance_sampling_level="sequence" if objective.loss == "gspo" else "token",
        args=SimpleNamespace(
            delta=objective.c_clip,
            sapo_temperature_pos=objective.sapo_tau_pos,
            sapo_temperature_neg=objective.sapo_tau_neg,
            steps_per_generation=1,
        ),
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        max_completion_length=WIDTH,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"eval": _Lists()},
    )

    def of(inputs: Inputs) -> LossOf:
        nothing = torch.zeros(ROWS, 0)
        batch = {
            "prompt_ids": nothing,
            "prompt_mask": nothing,
            "completion_ids": inputs.mask,
            "completion_mask": inputs.mask,
            "advantages": inputs.advantages,
            "old_per_token_logps": old_of(inputs, objective),
            "num_items_in_batch": inputs.mask.sum(),
        }

        def loss(logprobs: Tensor) -> Tensor:
            given = (logprobs, torch.zeros_like(logprobs), None)
            trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: given
            return trl.grpo._compute_loss(trainer, None, batch)

        return loss

    return of


class _Lists(dict):
    def __missing__(self, key: str) -> list:
        return self.setdefault(key, [])
