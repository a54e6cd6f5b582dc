"""The policy loss of all objectives: closed forms, finite differences, invariances."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.algorithms.aggregation import GlobalCounts, token_weights
from areal_ray.algorithms.correction import m2po_kept
from areal_ray.algorithms.losses import TokenColumns, policy_loss, ppo_clip_loss
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import KlConfig, RejectionSamplingConfig
from tests.support.columns import (
    column,
    columns_of,
    every,
    every_objective,
    finite_differences,
    gradient,
    ones,
)

OBJECTIVES = every_objective()
SEQUENCES = [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(-2.0, 8.0, 6.0), (1.0, 1.5, -1.2), (-1.0, 0.5, 0.8), (2.0, 8.0, -2.4), (1.0, 0.5, -0.5)],
)
def test_clip_and_dual_clip_hold_the_right_side(advantage, ratio, expected):
    loss, _ = ppo_clip_loss(
        column(math.log(ratio)), column(0.0), column(advantage), every(1), ones(1), c_clip=3.0
    )
    assert loss.item() == pytest.approx(expected)


def test_without_dual_clip_a_bad_token_made_likely_is_not_bounded():
    loss, _ = ppo_clip_loss(column(math.log(8.0)), column(0.0), column(-2.0), every(1), ones(1))
    assert loss.item() == pytest.approx(16.0)


def test_the_upper_clip_may_differ_from_the_lower():
    loss, sums = ppo_clip_loss(
        column(math.log(1.25), math.log(0.7)),
        column(0.0, 0.0),
        column(1.0, -1.0),
        every(2),
        ones(2),
        clip_range=(0.8, 1.28),
    )
    assert loss.item() == pytest.approx(-1.25 + 0.8)
    assert sums["clipped"].item() == 1


def test_a_token_counts_as_clipped_where_the_clip_takes_its_gradient():
    at = torch.log(column(1.5, 1.5, 1.5, 0.5, 0.5, 0.5, 1.1))
    advantages = column(1.0, -1.0, 0.0, 1.0, -1.0, 0.0, 1.0)
    flat = (torch.zeros_like(at), advantages, every(7), ones(7))
    slope = gradient(lambda x: ppo_clip_loss(x, *flat)[0], at)
    held = (slope == 0.0) & (advantages != 0.0)
    assert held.tolist() == [True, False, False, False, True, False, False]
    assert ppo_clip_loss(at, *flat)[1]["clipped"].item() == int(held.sum())


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_the_gradient_at_the_sampling_policy_is_reinforce(name, is_recomputed):
    at = column(-1.0, -0.2, -3.0, -0.7, -2.0, -1.5)
    advantages = column(2.0, 2.0, 2.0, -1.0, -1.0, 0.5)
    weights = column(0.1, 0.1, 0.1, 0.3, 0.3, 0.05)

    def value(logprobs):
        proximal = at if is_recomputed else None
        columns = columns_of(
            logprobs, at, advantages, SEQUENCES, token_weights=weights, proximal_logprobs=proximal
        )
        return policy_loss(OBJECTIVES[name], columns)[0]

    torch.testing.assert_close(gradient(value, at), -advantages * weights)


# The ratios of CISPO and TOPR are constants: test_surrogates has their gradients in closed form.
_DIFFERENTIABLE = [n for n, o in OBJECTIVES.items() if o.loss not in ("cispo", "topr")]


@pytest.mark.parametrize("name", _DIFFERENTIABLE)
def test_gradients_agree_with_finite_differences(name):
    objective = OBJECTIVES[name]
    generator = torch.Generator().manual_seed(3)
    draw = (torch.rand((4, 12, 6), generator=generator, dtype=torch.float64) - 0.5) * 1.6
    for drift, move, level, advantages in zip(*draw, strict=True):
        proximal = level - 1.0
        behaviour = proximal - drift

        def value(logprobs, proximal=proximal, behaviour=behaviour, advantages=advantages):
            columns = columns_of(
                logprobs, behaviour, advantages, SEQUENCES, proximal_logprobs=proximal
            )
            return policy_loss(objective, columns)[0]

        at = proximal + move
        torch.testing.assert_close(
            gradient(value, at), finite_differences(value, at), atol=1e-6, rtol=1e-5
        )


def test_kl_and_entropy_have_their_gradients_beside_the_surrogate():
    objective = ObjectiveConfig(
        kl=KlConfig(kl_ctl=0.3, estimator="k3", where="loss"), entropy_coef=0.1
    )
    at, reference = column(-1.0, -2.0, -0.5), column(-1.4, -1.0, -0.5)

    def value(logprobs):
        columns = columns_of(
            logprobs,
            at.detach(),
            column(1.0, -1.0, 0.0),
            entropy=-logprobs * logprobs.exp(),
            reference_logprobs=reference,
        )
        return policy_loss(objective, columns)[0]

    torch.testing.assert_close(gradient(value, at), finite_differences(value, at))
    gap = at - reference
    kl = torch.exp(-gap) - 1 + gap
    expected = (-column(1.0, -1.0, 0.0) + 0.3 * kl + 0.1 * at * at.exp()).sum() / 3
    assert value(at).item() == pytest.approx(expected.item())


@st.composite
def _batches(draw):
    lengths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    numbers = st.floats(-1.2, 1.2)
    total = sum(lengths)
    found = [draw(st.lists(numbers, min_size=total, max_size=total)) for _ in range(5)]
    order = draw(st.permutations(range(len(lengths))))
    cuts = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    return lengths, found, order, cuts


def _whole(lengths, found, objective):
    logprobs, proximal, behaviour, advantages, reference = (column(*x) - 1.5 for x in found)
    own = np.repeat(lengths, lengths)
    counts = GlobalCounts(tokens=sum(lengths), sequences=len(lengths), rollouts=len(lengths))
    weights = token_weights(objective.aggregation, own, own, counts, fixed_length=7)
    return TokenColumns(
        logprobs.requires_grad_(True),
        behaviour,
        advantages,
        torch.from_numpy(weights),
        torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        proximal_logprobs=proximal,
        reference_logprobs=reference,
        m2_kept=m2po_kept(proximal, behaviour, every(sum(lengths)), 0.04),
    )


@given(_batches(), st.sampled_from(sorted(OBJECTIVES)))
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(batch, name):
    lengths, found, order, cuts = batch
    objective = OBJECTIVES[name].model_copy(
        update={"kl": KlConfig(kl_ctl=0.1, estimator="k2", where="loss")}
    )
    whole = _whole(lengths, found, objective)
    loss, sums = policy_loss(objective, whole)
    loss.backward()
    expected, whole.logprobs.grad = whole.logprobs.grad.clone(), None

    parts, starts = [[]], np.concatenate([[0], np.cumsum(lengths)])
    for sequence, is_cut in zip(order, cuts, strict=True):
        parts[-1].append(sequence)
        parts += [[]] if is_cut else []
    total, tokens = 0.0, 0
    for part in filter(None, parts):
        at = torch.from_numpy(np.concatenate([np.arange(*starts[s : s + 2]) for s in part]))
        ids = torch.from_numpy(np.repeat(np.arange(len(part)), [lengths[s] for s in part]))
        names = [n for n in TokenColumns.__slots__ if getattr(whole, n) is not None]
        columns = {n: getattr(whole, n)[at] for n in names} | {"sequence_ids": ids}
        part_loss, part_sums = policy_loss(objective, TokenColumns(**columns))
        part_loss.backward()
        total, tokens = total + part_loss.item(), tokens + part_sums["tokens"].item()
    assert total == pytest.approx(loss.item(), abs=1e-9)
    assert tokens == sums["tokens"].item()
    torch.testing.assert_close(whole.logprobs.grad, expected, atol=1e-9, rtol=0)


EXTREMES = (0.0, -1e4, -1.0, -20.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_finite_input_makes_a_nan_or_an_infinity(dtype, name):
    objective = OBJECTIVES[name].model_copy(
        update={
            "kl": KlConfig(kl_ctl=0.1, estimator="k3", where="loss"),
            "entropy_coef": 0.1,
        }
    )
    rows = torch.tensor(
        [(a, b, c, d) for a in EXTREMES for b in EXTREMES for c in EXTREMES for d in (-3, 0, 1e3)]
    ).to(dtype)
    logprobs, behaviour, proximal, advantages = (
        rows[:, i].clone().requires_grad_(i == 0) for i in range(4)
    )
    columns = columns_of(
        logprobs,
        behaviour,
        advantages,
        [i // 3 for i in range(len(rows))],
        proximal_logprobs=proximal,
        reference_logprobs=behaviour,
        entropy=logprobs.abs(),
    )
    loss, sums = policy_loss(objective, columns)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
    assert all(torch.isfinite(value) for value in sums.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_micro_batch_without_tokens_contributes_zero(name):
    logprobs = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.float64)
    loss, sums = policy_loss(OBJECTIVES[name], columns_of(logprobs, nothing, nothing, []))
    loss.backward()
    assert loss.item() == 0.0
    assert all(value.item() == 0.0 for value in sums.values())


def test_an_overflowing_ratio_stays_finite():
    logprobs = column(500.0).requires_grad_(True)
    loss, _ = ppo_clip_loss(logprobs, column(0.0), column(-1.0), every(1), ones(1))
    loss.backward()
    assert math.isfinite(loss.item())
    assert math.isfinite(logprobs.grad.item())


def _weighted(**bounds):
    objective = ObjectiveConfig(
        kind="decoupled_ppo", rejection_sampling=RejectionSamplingConfig(**bounds)
    )
    proximal = torch.log(column(0.5, 1.2, 9.0, 0.9))
    return policy_loss(
        objective,
        columns_of(proximal, torch.zeros_like(proximal), -ones(4), proximal_logprobs=proximal),
    )


def test_behaviour_weights_are_reported_before_and_after_their_bounds():
    loss, sums = _weighted(action="clamp", upper=2.0)
    assert sums["raw_weight"].item() / 4 == pytest.approx(2.9)
    assert sums["max_raw_weight"].item() == pytest.approx(9.0)
    assert sums["outside"].item() / 4 == 0.25
    assert sums["kept"].item() == 4
    assert sums["used_weight"].item() / 4 == loss.item() == pytest.approx(1.15)


def test_a_masked_token_still_counts_in_the_denominator():
    loss, sums = _weighted(upper=5.0, lower=0.5 - 1e-9)
    assert sums["raw_weight"].item() / 4 == pytest.approx(2.9)
    # (0.5 + 1.2 + 0.9) over 4 tokens, not over the 3 that are left
    assert sums["used_weight"].item() / 4 == loss.item() == pytest.approx(0.65)
    assert (sums["kept"].item(), sums["outside"].item(), sums["tokens"].item()) == (3, 1, 4)


def test_the_behaviour_weight_carries_no_gradient():
    def value(logprobs):
        columns = columns_of(logprobs, column(-1.5), column(2.0))
        return policy_loss(ObjectiveConfig(kind="decoupled_ppo"), columns)[0]

    assert gradient(value, column(-1.0)).item() == pytest.approx(-2.0 * math.exp(0.5))


def test_m2po_drops_what_moved_furthest_and_keeps_the_denominator():
    at = column(-1.0, -1.0, -1.0, -1.0)
    behaviour = at - column(0.1, -0.1, 0.1, 2.0)

    def value(logprobs):
        return policy_loss(ObjectiveConfig(kind="m2po"), columns_of(logprobs, behaviour, ones(4)))[
            0
        ]

    ratios = torch.exp(at - behaviour)
    expected = -ratios / 4 * column(1, 1, 1, 0)
    torch.testing.assert_close(gradient(value, at), expected)
    sums = policy_loss(ObjectiveConfig(kind="m2po"), columns_of(at, behaviour, ones(4)))[1]
    assert (sums["kept"].item(), sums["outside"].item()) == (3, 1)


def test_of_two_corrections_a_token_must_pass_both():
    objective = ObjectiveConfig(kind="decoupled_ppo", m2_threshold=0.5)
    proximal = torch.log(column(1.0, 6.0, 1.1))  # the second is above 5
    columns = columns_of(
        proximal,
        torch.zeros_like(proximal),
        -ones(3),
        proximal_logprobs=proximal,
        m2_kept=torch.tensor([True, True, False]),
    )
    loss, sums = policy_loss(objective, columns)
    assert loss.item() == pytest.approx(1.0 / 3)
    assert (sums["kept"].item(), sums["outside"].item()) == (1, 2)


def test_kl_of_the_metrics_is_the_k3_estimate_and_stays_finite():
    def kl(gap):
        sums = ppo_clip_loss(column(gap), column(0.0), column(1.0), every(1), ones(1))[1]
        return sums["policy_kl"].item()

    assert kl(-0.5) == pytest.approx(0.10653, abs=1e-5)
    assert kl(0.5) == pytest.approx(0.14872, abs=1e-5)
    assert math.isfinite(kl(500.0))


def test_each_kl_of_the_metrics_is_named_after_its_policy():
    at, proximal, behaviour = column(-1.0), column(-1.2), column(-1.7)
    columns = columns_of(at, behaviour, ones(1), proximal_logprobs=proximal)
    sums = policy_loss(ObjectiveConfig(kind="decoupled_ppo"), columns)[1]
    assert sums["policy_kl"].item() == pytest.approx(math.exp(0.2) - 1.2)
    assert sums["behaviour_kl"].item() == pytest.approx(math.exp(0.5) - 1.5)
    sums = policy_loss(ObjectiveConfig(kind="grpo"), columns)[1]
    assert "policy_kl" not in sums
    assert sums["behaviour_kl"].item() == pytest.approx(math.exp(0.7) - 1.7)


def test_a_kl_in_the_loss_teaches_without_any_advantage():
    """One step on the exact expectation over a vocabulary lowers the exact KL."""
    logits, reference = column(0.4, -0.3, 1.0), torch.log_softmax(column(0.0, 1.0, -1.0), 0)
    objective = ObjectiveConfig(kl=KlConfig(kl_ctl=1.0, estimator="k3", where="loss"))

    def exact(logits):
        policy = torch.log_softmax(logits, 0)
        return (policy.exp() * (policy - reference)).sum()

    def value(logits):
        policy = torch.log_softmax(logits, 0)
        columns = columns_of(
            policy,
            policy.detach(),
            torch.zeros_like(policy),
            token_weights=policy.detach().exp(),
            reference_logprobs=reference,
        )
        return policy_loss(objective, columns)[0]

    slope = gradient(value, logits)
    assert slope.abs().max() > 0.05
    assert exact(logits - 0.1 * slope) < exact(logits) - 1e-3


def test_half_precision_columns_are_summed_in_float32():
    generator = torch.Generator().manual_seed(1)
    draw = (-torch.rand((3, 300), generator=generator)).to(torch.bfloat16)
    logprobs, behaviour, advantages = draw.clone().requires_grad_(True)
    columns = columns_of(logprobs, behaviour, advantages)
    loss, sums = policy_loss(ObjectiveConfig(), columns)
    wide = columns_of(*draw.float(), token_weights=columns.token_weights.float())
    expected, expected_sums = policy_loss(ObjectiveConfig(), wide)
    assert loss.item() == expected.item()
    assert sums["ratio"].item() == expected_sums["ratio"].item()
    assert loss.dtype == torch.float32
