"""What each algorithm's name stands for, what is refused, and that saved values read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import (
    DistillationConfig,
    GaeConfig,
    KlConfig,
    NormConfig,
    RejectionSamplingConfig,
    RewardShapingConfig,
)
from areal_ray.algorithms.presets import CLIPS, PRESETS

# loss, clip centre, behaviour weight, aggregation, lowest and highest ratio,
# reward_norm mean/std, advantage_norm mean/std; by the papers, see docs/algorithms.md
EXPECTED = {
    "grpo": "ppo_clip behaviour none sequence_mean 0.8 1.2 group/group none/none",
    "ppo": "ppo_clip behaviour none token_mean 0.8 1.2 none/none batch/batch",
    "decoupled_ppo": "ppo_clip proximal mask token_mean 0.8 1.2 group/group none/none",
    "reinforce": "reinforce behaviour clamp token_mean - - none/none none/none",
    "reinforce_pp": "ppo_clip behaviour none token_mean 0.8 1.2 none/none batch/batch",
    "reinforce_pp_baseline": "ppo_clip behaviour none token_mean 0.8 1.2 group/none batch/batch",
    "rloo": "reinforce behaviour clamp sequence_sum - - leave_one_out/none none/none",
    "dr_grpo": "ppo_clip behaviour none fixed_length 0.8 1.2 group/none none/none",
    "lite_ppo": "ppo_clip behaviour none token_mean 0.8 1.2 group/batch none/none",
    "dapo": "ppo_clip behaviour none token_mean 0.8 1.28 group/group none/none",
    "gspo": "gspo behaviour none sequence_mean 0.9997 1.0004 group/group none/none",
    "sapo": "sapo behaviour none sequence_mean - - group/group none/none",
    "cispo": "cispo behaviour none token_mean 0 5 group/group none/none",
    "m2po": "ppo_clip behaviour none token_mean 0 10001 group/group none/none",
    "icepop": "ppo_clip proximal mask token_mean 0.8 1.2 group/group none/none",
    "kpop": "ppo_clip proximal mask token_mean 0.8 1.2 group/group none/none",
    "topr": "topr behaviour none token_mean - - group/none none/none",
    "opd": "reinforce behaviour clamp token_mean - - none/none batch/none",
}


@pytest.mark.parametrize("kind", PRESETS)
def test_each_name_stands_for_the_parts_of_its_paper(kind):
    o = ObjectiveConfig(kind=kind)
    clip = [f"{bound:g}" for bound in o.clip_range] if o.loss in CLIPS else ["-", "-"]
    norms = [f"{norm.mean}/{norm.std}" for norm in (o.reward_norm, o.advantage_norm)]
    found = [o.loss, o.clip_centre, o.behaviour_weight, o.aggregation, *clip]
    assert " ".join([*found, *norms]) == EXPECTED[kind]


def test_the_bounds_that_algorithms_are_named_after():
    def bounds(kind):
        return ObjectiveConfig(kind=kind).rejection_sampling

    assert bounds("grpo") is None
    assert bounds("decoupled_ppo") == RejectionSamplingConfig(upper=5.0)
    assert bounds("icepop") == RejectionSamplingConfig(lower=0.5, upper=5.0)
    assert bounds("kpop") == RejectionSamplingConfig(metric="binary_kl", upper=2.0)
    assert bounds("rloo") == RejectionSamplingConfig(action="clamp", upper=2.0)
    assert ObjectiveConfig(kind="m2po").m2_threshold == 0.04
    assert ObjectiveConfig(kind="opd").distillation == DistillationConfig()


@pytest.mark.parametrize("kind", PRESETS)
def test_saved_values_read_back_the_same(kind):
    objective = ObjectiveConfig(kind=kind).with_limit(512)
    assert ObjectiveConfig(**objective.model_dump()) == objective
    assert ObjectiveConfig(**objective.model_dump(mode="json")) == objective


@given(
    st.sampled_from(sorted(PRESETS)),
    st.fixed_dictionaries(
        {},
        optional={
            "eps_clip": st.floats(0.01, 1.0),
            "eps_clip_higher": st.floats(0.01, 3.0),
            "behaviour_weight": st.sampled_from(["none", "full", "clamp", "mask"]),
            "clip_centre": st.sampled_from(["behaviour", "proximal"]),
            "loss": st.sampled_from(["ppo_clip", "reinforce", "gspo", "sapo", "cispo", "topr"]),
            "aggregation": st.sampled_from(["token_mean", "rollout_mean"]),
            "rejection_sampling": st.fixed_dictionaries(
                {},
                optional={
                    "action": st.sampled_from(["mask", "clamp"]),
                    "metric": st.sampled_from(["ratio", "kl_k3", "binary_kl"]),
                    "upper": st.floats(1.0, 9.0),
                    "lower": st.none() | st.floats(0.0, 0.9),
                    "level": st.sampled_from(["token", "sequence"]),
                },
            ),
            "reward_norm": st.sampled_from([{"mean": "group"}, {"std": "none"}, {"std": "batch"}]),
        },
    ),
)
def test_what_is_accepted_reads_back_and_keeps_what_was_said(kind, said):
    try:
        objective = ObjectiveConfig(kind=kind, **said)
    except ValidationError:
        return
    assert ObjectiveConfig(**objective.model_dump()) == objective
    saved = objective.model_dump()
    for name, value in said.items():
        if isinstance(value, dict):
            assert saved[name] is None or value.items() <= saved[name].items()
        else:
            assert saved[name] == value
    bounds = objective.rejection_sampling
    assert (bounds is not None) == (objective.behaviour_weight in ("clamp", "mask"))


def test_a_part_of_a_section_leaves_the_rest_as_the_name_says():
    kpop = ObjectiveConfig(kind="kpop", rejection_sampling={"upper": 1.0})
    assert kpop.rejection_sampling == RejectionSamplingConfig(metric="binary_kl", upper=1.0)
    icepop = ObjectiveConfig(kind="icepop", rejection_sampling={"upper": 3.0})
    assert icepop.rejection_sampling == RejectionSamplingConfig(lower=0.5, upper=3.0)
    rloo = ObjectiveConfig(kind="rloo", rejection_sampling={"upper": 3.0})
    assert (rloo.behaviour_weight, rloo.rejection_sampling.upper) == ("clamp", 3.0)
    grpo = ObjectiveConfig(kind="grpo", reward_norm={"mean": "group"})
    assert grpo.reward_norm == NormConfig(mean="group", std="none"), "a norm given is a whole one"
    # Bounds of another metric begin anew.
    other = ObjectiveConfig(kind="icepop", rejection_sampling={"metric": "kl_k3", "upper": 0.5})
    assert other.rejection_sampling == RejectionSamplingConfig(metric="kl_k3", upper=0.5)


def test_bounds_of_a_recipe_are_judged_by_the_metric_of_their_kind():
    """A recipe's section is read before its kind fills it up; 0.5 is no bound of a ratio."""
    half = RejectionSamplingConfig(upper=0.5)
    kpop = ObjectiveConfig(kind="kpop", rejection_sampling=half).rejection_sampling
    assert (kpop.metric, kpop.upper) == ("binary_kl", 0.5)
    with pytest.raises(
        ValidationError, match=r"rejection_sampling\.upper: is 0\.5 with metric 'rat"
    ):
        ObjectiveConfig(kind="icepop", rejection_sampling=half)
    lower = RejectionSamplingConfig(lower=0.5)
    with pytest.raises(
        ValidationError, match=r"rejection_sampling\.lower: is 0\.5 with metric 'binary_kl'"
    ):
        ObjectiveConfig(kind="kpop", rejection_sampling=lower)


def test_a_teacher_judges_each_token_by_itself_unless_told_otherwise():
    assert ObjectiveConfig(kind="opd").gae.discount == 0.0
    assert ObjectiveConfig(kind="opd", gae={"unit": "turn"}).gae.discount == 0.0
    joint = ObjectiveConfig(kind="opd", gae={"discount": 1.0}, distillation={"rl_weight": 1.0})
    assert joint.gae.discount == 1.0
    assert ObjectiveConfig(kind="grpo").gae.discount == 1.0


def test_bounds_imply_their_weight():
    for action in ("mask", "clamp"):
        objective = ObjectiveConfig(kind="decoupled_ppo", rejection_sampling={"action": action})
        assert objective.behaviour_weight == action


def test_the_behaviour_weight_is_never_lost_by_omission():
    moved = ObjectiveConfig(kind="grpo", clip_centre="proximal")
    assert moved.behaviour_weight == "mask"
    assert moved.rejection_sampling == RejectionSamplingConfig(upper=5.0)
    plain = ObjectiveConfig(kind="grpo", loss="reinforce")
    assert plain.behaviour_weight == "clamp"
    ratio = ObjectiveConfig(kind="rloo", loss="ppo_clip", clip_centre="proximal")
    assert (ratio.behaviour_weight, ratio.rejection_sampling.upper) == ("mask", 5.0)
    asked = ObjectiveConfig(kind="grpo", clip_centre="proximal", behaviour_weight="none")
    assert (asked.behaviour_weight, asked.rejection_sampling) == ("none", None)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "sapo", "cispo", "topr"])
def test_a_ratio_in_place_of_a_score_brings_the_behaviour_weight_itself(loss):
    rloo = ObjectiveConfig(kind="rloo", loss=loss)
    assert (rloo.behaviour_weight, rloo.rejection_sampling) == ("none", None)
    assert rloo.reward_norm.mean == "leave_one_out"
    assert ObjectiveConfig(**rloo.model_dump()) == rloo


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "grpo", "eps_clip": 0.1}, (0.9, 1.1)),  # has no upper clip of its own
        ({"kind": "dapo", "eps_clip": 0.1}, (0.9, 1.28)),
        ({"kind": "cispo", "eps_clip": 1.0}, (0.0, 5.0)),
        ({"kind": "dapo", "eps_clip": 0.1, "eps_clip_higher": 0.3}, (0.9, 1.3)),
        ({"kind": "dapo", "eps_clip_higher": 0.3}, (0.8, 1.3)),
    ],
)
def test_a_lower_clip_of_one_s_own_leaves_the_upper_as_the_name_says(fields, expected):
    assert ObjectiveConfig(**fields).clip_range == pytest.approx(expected)


def test_a_loss_other_than_the_kind_s_brings_its_own_clip():
    assert ObjectiveConfig(kind="grpo", loss="gspo").clip_range == pytest.approx((0.9997, 1.0004))
    clipped = {"kind": "rloo", "loss": "ppo_clip", "behaviour_weight": "none"}
    assert ObjectiveConfig(**clipped).clip_range == pytest.approx((0.8, 1.2))
    wide = ObjectiveConfig(**clipped, eps_clip_higher=0.3)
    assert wide.clip_range == pytest.approx((0.8, 1.3))
    for kind in ("dapo", "cispo"):
        without = ObjectiveConfig(kind=kind, loss="reinforce")
        assert (without.eps_clip, without.eps_clip_higher) == (None, None)


def test_lengths_are_those_of_the_sampling_limit():
    shaping = RewardShapingConfig(overlong_tokens=64)
    objective = ObjectiveConfig(kind="dr_grpo", reward_shaping=shaping).with_limit(512)
    assert objective.fixed_length_tokens == 512
    assert objective.reward_shaping.overlong_limit_tokens == 512
    given_length = ObjectiveConfig(kind="dr_grpo", fixed_length_tokens=100).with_limit(512)
    assert given_length.fixed_length_tokens == 100
    assert ObjectiveConfig(kind="grpo").with_limit(512) == ObjectiveConfig(kind="grpo")


def test_what_an_objective_reads():
    grpo, decoupled = ObjectiveConfig(kind="grpo"), ObjectiveConfig(kind="decoupled_ppo")
    assert (grpo.needs_proximal, decoupled.needs_proximal) == (False, True)
    assert ObjectiveConfig(kind="m2po").needs_proximal
    assert ObjectiveConfig(kind="rloo").needs_proximal
    assert ObjectiveConfig(kind="opd").needs_teacher
    in_loss = ObjectiveConfig(kl=KlConfig(kl_ctl=0.1, where="loss", estimator="k2"))
    assert in_loss.needs_reference
    assert not grpo.needs_reference
    assert [o.may_skip for o in (grpo, in_loss)] == [True, False]
    assert not ObjectiveConfig(entropy_coef=0.1).may_skip
    assert ObjectiveConfig(kind="rloo").has_group_baseline
    assert not ObjectiveConfig(kind="ppo").has_group_baseline


REFUSED = [
    ({"kind": "guess"}, "kind"),
    ({"kind": ["grpo"]}, "kind"),
    ({"rejection_sampling": "mask"}, "rejection_sampling"),
    ({"prox_logp_method": "guess"}, "prox_logp_method"),
    ({"c_clip": 1.0}, "greater than 1"),
    ({"eps_clip": 0.0}, "greater than 0"),
    ({"eps_clip": 1.5}, "less than or equal to 1"),
    ({"m2_threshold": 0.0}, "greater than 0"),
    ({"kind": "grpo", "behaviour_weight": "mask"}, "without rejection_sampling"),
    (
        {"kind": "kpop", "behaviour_weight": "clamp"},
        "has action 'mask' with behaviour_weight 'clamp'",
    ),
    ({"rejection_sampling": {}}, "whose ratio holds that factor already"),
    ({"kind": "gspo", "behaviour_weight": "full"}, "whose ratio holds that factor already"),
    ({"kind": "decoupled_ppo", "clip_centre": "behaviour"}, "or clip_centre 'proximal'"),
    ({"prox_logp_method": "loglinear"}, "need no proximal log-probs"),
    ({"kind": "rloo", "c_clip": 3.0}, "has no dual clip"),
    ({"kind": "sapo", "clip_centre": "proximal"}, "bounds the ratio against the sampling policy"),
    ({"kind": "rloo", "clip_centre": "proximal"}, "takes no ratio"),
    ({"kind": "cispo", "behaviour_weight": "full"}, "must be 'none'"),
    ({"kind": "grpo", "sapo_tau_pos": 2.0}, "loss 'ppo_clip', so nothing reads it"),
    ({"kind": "grpo", "fixed_length_tokens": 9}, "use aggregation 'fixed_length'"),
    (
        {"reward_shaping": RewardShapingConfig(overlong_limit_tokens=9)},
        "give overlong_tokens too",
    ),
    (
        {"kind": "opd", "kl": KlConfig(kl_ctl=0.1)},
        "both pull each token's reward towards another model",
    ),
    (
        {"gae": GaeConfig(gae_lambda=0.9, lambda_method="length_adaptive")},
        "lambda_method 'length_adaptive', so nothing reads it",
    ),
    ({"kind": "opd", "distillation": {"rl_weight": 1.0}}, "would teach its last token alone"),
    ({"kind": "rloo", "reward_norm": {"std": "batch"}}, "Add 'mean: leave_one_out' to keep it"),
    ({"kind": "rloo", "reward_norm": NormConfig(std="batch")}, "Add 'mean: leave_one_out'"),
    ({"kind": "ppo", "advantage_norm": {"std": "none"}}, "advantage_norm: gives std without mean"),
    ({"reward_norm": {"mean": "group", "unbiased": True}}, "is true with std 'none'"),
    ({"kind": "cispo", "behaviour_weight": "mask"}, "must be 'none'"),
    ({"advantage_norm": {"mean": "leave_one_out"}}, "is a baseline of rewards"),
    ({"kl": {"kl_ctl": 0.1, "estimator": "k1", "where": "loss"}}, "mean zero"),
    ({"kl": {"kl_ctl": 0.0}}, "greater than 0"),
    ({"kl": {}}, "kl_ctl"),
    ({"reward_norm": {"mean": "leave_one_out", "std": "group"}}, "next to nothing"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_an_objective_that_makes_no_sense_is_refused_with_the_reason(fields, message):
    with pytest.raises(ValidationError, match=message):
        ObjectiveConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action": "clamp", "metric": "kl_k3"}, "only a ratio is a weight"),
        (
            {"action": "clamp", "level": "sequence", "aggregation": "max"},
            "no weight for its other tokens",
        ),
        ({"upper": 0.9}, "must be >= 1"),
        ({"upper": 0.0}, "greater than 0"),
        ({"upper": 2.0, "lower": 2.0}, "must be below upper"),
        ({"lower": 1.5}, "must be in 0..1"),
        ({"lower": -0.5}, "must be in 0..1"),
        ({"metric": "kl_k3", "lower": 0.1}, "would reject the best tokens"),
        ({"metric": "binary_kl", "lower": 0.1}, "would reject the best tokens"),
        ({"metric": "kl_k1", "lower": 0.1}, "must be <= 0"),
    ],
)
def test_bounds_that_make_no_sense_are_refused_with_the_reason(fields, message):
    with pytest.raises(ValidationError, match=message):
        ObjectiveConfig(kind="decoupled_ppo", rejection_sampling=fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "sapo", "clip_centre": "proximal"},
        {"kind": "topr", "behaviour_weight": "clamp"},
        {"kind": "cispo", "rejection_sampling": {"upper": 2.0}},
    ],
)
def test_a_loss_that_bounds_its_ratio_itself_tells_of_nothing_that_was_not_said(fields):
    with pytest.raises(ValidationError) as refusal:
        ObjectiveConfig(**fields)
    told = str(refusal.value)
    assert ("clip_centre: is" in told) == ("clip_centre" in fields)
    assert ("behaviour_weight: is" in told) == ("clip_centre" not in fields)
    assert "Add the section" not in told


def test_all_problems_of_an_objective_are_told_at_once():
    with pytest.raises(ValidationError) as refusal:
        ObjectiveConfig(kind="grpo", fixed_length_tokens=9, sapo_tau_neg=2.0)
    assert "fixed_length_tokens: is 9" in str(refusal.value)
    assert "sapo_tau_neg: is 2 " in str(refusal.value)
