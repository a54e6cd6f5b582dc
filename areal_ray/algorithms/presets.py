"""Which parts each algorithm's name stands for. A recipe may replace any of them by its own key.

Formulas, sources and when to use which: docs/algorithms.md.
"""

from collections.abc import Mapping
from typing import Any, Literal

from areal_ray.algorithms.objective_parts import (
    DistillationConfig,
    GaeConfig,
    NormConfig,
    RejectionSamplingConfig,
)
from areal_ray.core.config import Config

ObjectiveKind = Literal[
    "grpo",
    "ppo",
    "decoupled_ppo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "dr_grpo",
    "lite_ppo",
    "dapo",
    "gspo",
    "sapo",
    "cispo",
    "m2po",
    "icepop",
    "kpop",
    "topr",
    "opd",
]
LossName = Literal["ppo_clip", "reinforce", "gspo", "sapo", "cispo", "topr"]
RATIO_LOSSES = ("ppo_clip", "gspo")
"""Those whose ratio may be taken against either policy."""
AggregationName = Literal[
    "token_mean", "sequence_mean", "sequence_sum", "fixed_length", "rollout_mean"
]
BehaviourWeight = Literal["none", "full", "clamp", "mask"]

_NOTHING = NormConfig()
_GROUP = NormConfig(mean="group", std="group")
_GROUP_MEAN = NormConfig(mean="group")
_BATCH = NormConfig(mean="batch", std="batch")
_BATCH_MEAN = NormConfig(mean="batch")
CLIPS: Mapping[LossName, Mapping[str, float]] = {
    "ppo_clip": {"eps_clip": 0.2},
    "gspo": {"eps_clip": 3e-4, "eps_clip_higher": 4e-4},
    "cispo": {"eps_clip": 1.0, "eps_clip_higher": 4.0},
}
"""The bounds that the losses with a clip were published with; other losses have none."""
_BASE: dict[str, Any] = {
    "loss": "ppo_clip",
    "clip_centre": "behaviour",
    "behaviour_weight": "none",
    "aggregation": "token_mean",
    "reward_norm": _GROUP,
    "advantage_norm": _NOTHING,
}
"""What the rows below differ from."""
_CLIPPED: dict[str, Any] = {**_BASE, **CLIPS["ppo_clip"]}
_DECOUPLED: dict[str, Any] = {
    **_CLIPPED,
    "clip_centre": "proximal",
    "behaviour_weight": "mask",
    "rejection_sampling": RejectionSamplingConfig(upper=5.0),
}
_SCORE: dict[str, Any] = {
    **_BASE,
    "loss": "reinforce",
    # Without a ratio in the loss the weight is all that corrects for an older sampling policy.
    "behaviour_weight": "clamp",
    "rejection_sampling": RejectionSamplingConfig(action="clamp", upper=2.0),
}

_SECTIONS = ("rejection_sampling", "distillation", "gae")
"""Completed from the preset where given in part; a norm given is a whole one."""

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # arXiv:2402.03300, eq. 3
    "grpo": {**_CLIPPED, "aggregation": "sequence_mean"},
    # arXiv:1707.06347, eq. 7, with a critic
    "ppo": {**_CLIPPED, "reward_norm": _NOTHING, "advantage_norm": _BATCH},
    # arXiv:2505.24298, sec. 5.2
    "decoupled_ppo": _DECOUPLED,
    # Williams, 1992
    "reinforce": {**_SCORE, "reward_norm": _NOTHING},
    # arXiv:2501.03262: normalised over the whole step
    "reinforce_pp": {**_CLIPPED, "reward_norm": _NOTHING, "advantage_norm": _BATCH},
    # arXiv:2501.03262, the form with a baseline: the group's mean, then the step's spread
    "reinforce_pp_baseline": {**_CLIPPED, "reward_norm": _GROUP_MEAN, "advantage_norm": _BATCH},
    # arXiv:2402.14740, eq. 8
    "rloo": {
        **_SCORE,
        "aggregation": "sequence_sum",
        "reward_norm": NormConfig(mean="leave_one_out"),
    },
    # arXiv:2503.20783, sec. 3.2
    "dr_grpo": {**_CLIPPED, "aggregation": "fixed_length", "reward_norm": _GROUP_MEAN},
    # arXiv:2508.08221, sec. 5
    "lite_ppo": {**_CLIPPED, "reward_norm": NormConfig(mean="group", std="batch")},
    # arXiv:2503.14476, eq. 8
    "dapo": {**_CLIPPED, "eps_clip_higher": 0.28},
    # arXiv:2507.18071, eq. 5 and 7
    "gspo": {**_BASE, **CLIPS["gspo"], "loss": "gspo", "aggregation": "sequence_mean"},
    # arXiv:2511.20347, eq. 5
    "sapo": {**_BASE, "loss": "sapo", "aggregation": "sequence_mean"},
    # arXiv:2506.13585, eq. 4 and 5
    "cispo": {**_BASE, **CLIPS["cispo"], "loss": "cispo"},
    # arXiv:2510.01161, sec. 4
    "m2po": {**_CLIPPED, "eps_clip": 1.0, "eps_clip_higher": 1e4, "m2_threshold": 0.04},
    # arXiv:2510.18855, sec. 3.3
    "icepop": {
        **_DECOUPLED,
        "rejection_sampling": RejectionSamplingConfig(lower=0.5, upper=5.0),
    },
    # AReaL's documentation of KPop
    "kpop": {
        **_DECOUPLED,
        "rejection_sampling": RejectionSamplingConfig(metric="binary_kl", upper=2.0),
    },
    # arXiv:2503.14286, eq. 7
    "topr": {**_BASE, "loss": "topr", "reward_norm": _GROUP_MEAN},
    # On-policy distillation: Agarwal et al., arXiv:2306.13649; Thinking Machines, 2025
    "opd": {
        **_SCORE,
        "reward_norm": _NOTHING,
        # A sampled token's signal is below 0 on average, by the whole KL: without a baseline every
        # step unlearns most of what was sampled. No scale, so that the gradient ends with the KL.
        "advantage_norm": _BATCH_MEAN,
        "distillation": DistillationConfig(),
        # The teacher judges each token by itself; what follows would be noise for most tokens.
        "gae": GaeConfig(discount=0.0),
    },
}


def filled_in(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an objective of a known kind with all parts its name stands for.

    Args:
        given: What a recipe says; null counts as nothing said.

    Raises:
        ValueError: A norm is given without a mean where the kind has one.
    """
    problems = _norm_problems(given)
    if problems:
        raise ValueError("\n".join(problems))
    preset = PRESETS[given.get("kind", "grpo")]
    said = {name: value for name, value in given.items() if value is not None}
    parts = {**preset, **_implied_parts(preset, said)}
    if said.get("loss", preset["loss"]) != preset["loss"]:  # a clip belongs to its loss
        parts = {name: part for name, part in parts.items() if "eps_clip" not in name}
        parts |= CLIPS.get(said["loss"], {})
    said |= _completed_sections(parts, said)
    bounds = said.get("rejection_sampling")
    if bounds is not None and "behaviour_weight" not in said:
        action = (
            bounds.get("action") if isinstance(bounds, dict) else getattr(bounds, "action", None)
        )
        parts["behaviour_weight"] = action or "mask"
    if said.get("behaviour_weight") in ("none", "full"):
        parts.pop("rejection_sampling", None)
    return {**given, **parts, **said}


def _norm_problems(given: Mapping[str, Any]) -> list[str]:
    """Norms given without a mean where the kind has one: its baseline would go unnoticed."""
    kind, problems = given.get("kind", "grpo"), []
    for name in ("reward_norm", "advantage_norm"):
        norm, mean = given.get(name), PRESETS[kind][name].mean
        said = norm.model_fields_set if isinstance(norm, NormConfig) else norm
        if mean != "none" and isinstance(said, (dict, set)) and said and "mean" not in said:
            problems.append(
                f"{name}: gives {' and '.join(sorted(said))} without mean, which kind '{kind}' has "
                f"as '{mean}'; a norm given is a whole one. Add 'mean: {mean}' to keep it, or "
                "'mean: none'."
            )
    return problems


def _implied_parts(preset: Mapping[str, Any], said: Mapping[str, Any]) -> Mapping[str, Any]:
    """The behaviour weight that a loss or centre other than the preset's needs.

    Only where nothing is said of the weight: it is never lost by omission, nor counted twice by
    a ratio in place of a score.
    """
    if "behaviour_weight" in said or "rejection_sampling" in said:
        return {}
    loss, centre = said.get("loss", preset["loss"]), said.get("clip_centre", preset["clip_centre"])
    is_score = preset["loss"] == "reinforce"
    if preset["behaviour_weight"] != "none" and not (is_score and loss != "reinforce"):
        return {}
    source = _CLIPPED
    if loss == "reinforce":
        source = _SCORE
    elif centre == "proximal" and loss in RATIO_LOSSES:
        source = _DECOUPLED
    return {name: source.get(name) for name in ("behaviour_weight", "rejection_sampling")}


def _completed_sections(
    preset: Mapping[str, Any], said: Mapping[str, Any]
) -> Mapping[str, dict[str, Any]]:
    """Sections given in part, with the preset's values for the rest of their keys.

    So `rejection_sampling: {upper: 3}` leaves KPop its metric. Bounds given for another metric
    begin anew: those of the preset's mean something else.
    """
    completed = {}
    for name in _SECTIONS:
        section, known = said.get(name), preset.get(name)
        if isinstance(section, Config):  # as a recipe gives it, its other keys at their defaults
            section = section.model_dump(exclude_unset=True)
        if not isinstance(section, dict) or known is None:
            continue
        ours = known.model_dump()
        if section.get("metric", ours.get("metric")) == ours.get("metric"):
            completed[name] = ours | section
    return completed
