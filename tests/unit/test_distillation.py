"""A teacher's signal: expected gradients over a whole small vocabulary, exact KLs."""

import itertools

import numpy as np
import pytest
import torch

from areal_ray.algorithms.distillation import full_kl, reverse_kl_rewards, topk_kl
from areal_ray.algorithms.gae import token_gae
from areal_ray.algorithms.losses import policy_loss
from areal_ray.algorithms.normalise import normalise
from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import NormConfig
from tests.support.columns import column, columns_of, finite_differences, gradient

LOGITS = column(0.4, -0.3, 1.0, -2.0, 0.0)
TEACHER = torch.log_softmax(column(0.1, 1.2, -0.5, 0.3, -1.0), 0)


def _log_policy(logits):
    return torch.log_softmax(logits, -1)


def _kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


def _expected_gradient(objective, advantages):
    """Of the objective's loss, over every token of the vocabulary by its probability."""
    policy = _log_policy(LOGITS)
    return gradient(
        lambda x: policy_loss(
            objective,
            columns_of(_log_policy(x), policy, advantages, range(5), token_weights=policy.exp()),
        )[0],
        LOGITS,
    )


@pytest.mark.parametrize("kind", ["opd", "grpo"])
def test_distillation_follows_the_gradient_of_the_reverse_kl(kind):
    signal = reverse_kl_rewards(TEACHER.numpy(), _log_policy(LOGITS).numpy())
    found = _expected_gradient(ObjectiveConfig(kind=kind), torch.from_numpy(signal))
    exact = gradient(lambda x: _kl(_log_policy(x), TEACHER), LOGITS)
    torch.testing.assert_close(found, exact)
    assert exact.abs().max() > 0.1


_PAIRS = [(a, b) for a in range(3) for b in range(3)]
_TWO_STEPS = column(0.4, -0.3, 1.0, 0.2, 0.0, -0.5, 1.5, -1.0, 0.3, 0.0, 0.7, -0.2)
_TEACHER_STEPS = column(-0.4, 0.9, 0.1, 1.0, -0.2, 0.0, 0.0, 0.6, -0.8, -1.0, 0.5, 0.2)


def _answers(logits):
    """[9, 2] log-probs of both tokens of every answer; the second depends on the first."""
    first, second = _log_policy(logits[:3]), _log_policy(logits[3:].reshape(3, 3))
    return torch.stack([torch.stack([first[a], second[a, b]]) for a, b in _PAIRS])


def _mean_gradient(discount):
    """Of the objective over all answers, with rewards flowing back over tokens."""
    policy, teacher = _answers(_TWO_STEPS), _answers(_TEACHER_STEPS)
    signal = reverse_kl_rewards(teacher.numpy(), policy.numpy())
    advantages = [
        token_gae(row, np.zeros(2), discount=discount, gae_lambda=1.0)[0] for row in signal
    ]
    shares = policy.sum(1).exp().repeat_interleave(2)
    ids = np.repeat(np.arange(9), 2).tolist()

    def value(logits):
        columns = columns_of(
            _answers(logits).reshape(-1),
            policy.reshape(-1),
            torch.from_numpy(np.concatenate(advantages)),
            ids,
            token_weights=shares,
        )
        return policy_loss(ObjectiveConfig(kind="opd"), columns)[0]

    return gradient(value, _TWO_STEPS)


def test_over_whole_answers_the_reward_to_go_gives_the_gradient_of_their_kl():
    teacher = _answers(_TEACHER_STEPS).sum(1)
    exact = gradient(lambda x: _kl(_answers(x).sum(1), teacher), _TWO_STEPS)
    torch.testing.assert_close(_mean_gradient(1.0), exact)


def test_each_token_s_own_signal_gives_the_kls_at_prefixes_as_they_come():
    """Less noise, and blind to where a token leads."""
    held = _answers(_TWO_STEPS)[::3, 0].exp()

    def at_prefixes(logits):
        teacher = _TEACHER_STEPS
        first = _kl(_log_policy(logits[:3]), _log_policy(teacher[:3]))
        second = [
            _kl(_log_policy(logits[i : i + 3]), _log_policy(teacher[i : i + 3])) for i in (3, 6, 9)
        ]
        return first + (held * torch.stack(second)).sum()

    torch.testing.assert_close(_mean_gradient(0.0), gradient(at_prefixes, _TWO_STEPS))


def _batch_gradients(norm, count=3):
    """[5^count, 5] of the loss of every batch of tokens, and the [5^count, 1] chance of each."""
    policy = _log_policy(LOGITS)
    signal = reverse_kl_rewards(TEACHER.numpy(), policy.numpy())
    objective, every, alike = ObjectiveConfig(kind="opd"), np.ones(count, bool), np.zeros(count)
    found, chances = [], []
    for batch in map(list, itertools.product(range(5), repeat=count)):
        advantages = normalise(signal[batch], every, alike.astype(int), norm)
        given = (policy[batch], torch.from_numpy(advantages), range(count))

        def value(logits, batch=batch, given=given):
            return policy_loss(objective, columns_of(_log_policy(logits)[batch], *given))[0]

        found.append(gradient(value, LOGITS))
        chances.append(policy[batch].sum().exp())
    return torch.stack(found), torch.stack(chances)[:, None]


def test_the_step_s_mean_as_baseline_keeps_the_direction_and_takes_noise_away():
    """The mean holds a third of the token itself here, of a real step next to nothing."""
    means, noise = [], []
    for norm in (ObjectiveConfig(kind="opd").advantage_norm, NormConfig()):
        gradients, chances = _batch_gradients(norm)
        means.append((chances * gradients).sum(0))
        noise.append((chances * (gradients - means[-1]).square()).sum())
    exact = gradient(lambda x: _kl(_log_policy(x), TEACHER), LOGITS)
    torch.testing.assert_close(means[0], 2 / 3 * exact)
    torch.testing.assert_close(means[1], exact)
    assert noise[0] < 0.7 * noise[1]


def test_beside_rewards_the_gradients_add_up():
    rewards = column(1.0, 0.0, -1.0, 0.5, 2.0)
    signal = torch.from_numpy(
        reverse_kl_rewards(TEACHER.numpy(), _log_policy(LOGITS).numpy(), weight=0.3)
    )
    found = _expected_gradient(ObjectiveConfig(kind="opd"), rewards + signal)
    exact = gradient(
        lambda x: 0.3 * _kl(_log_policy(x), TEACHER) - (_log_policy(x).exp() * rewards).sum(),
        LOGITS,
    )
    torch.testing.assert_close(found, exact)


def test_differentiating_the_sampled_gap_would_teach_nothing():
    """Why the signal goes into the reward."""
    policy = _log_policy(LOGITS)
    noise = gradient(lambda x: (policy.exp() * (_log_policy(x) - TEACHER)).sum(), LOGITS)
    torch.testing.assert_close(noise, torch.zeros_like(LOGITS))


def test_the_signal_can_be_weighted_and_cut():
    teacher, policy = np.array([-1.0, -9.0, -0.1]), np.array([-2.0, -1.0, -0.1])
    np.testing.assert_allclose(reverse_kl_rewards(teacher, policy), [1.0, -8.0, 0.0])
    found = reverse_kl_rewards(teacher, policy, weight=0.5, clip=2.0)
    np.testing.assert_allclose(found, [0.5, -1.0, 0.0])


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_full_kl_is_exact_with_its_gradient(direction):
    teacher = TEACHER[None]

    def exact(logits):
        pair = (_log_policy(logits), TEACHER)
        return _kl(*(pair if direction == "reverse" else pair[::-1]))

    def found(logits):
        return full_kl(logits[None], teacher, direction=direction).sum()

    assert found(LOGITS).item() == pytest.approx(exact(LOGITS).item())
    torch.testing.assert_close(gradient(found, LOGITS), gradient(exact, LOGITS))
    torch.testing.assert_close(gradient(found, LOGITS), finite_differences(found, LOGITS))


def test_the_temperature_divides_both():
    found = full_kl(LOGITS[None], TEACHER[None], temperature=2.0).item()
    expected = _kl(_log_policy(LOGITS / 2), _log_policy(TEACHER / 2)).item()
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_top_k_list_with_its_rest_approaches_the_exact_kl_from_below(direction):
    policy = _log_policy(LOGITS)
    exact = full_kl(LOGITS[None], TEACHER[None], direction=direction).item()
    order = TEACHER.argsort(descending=True)
    found = [
        topk_kl(policy[order[:k]][None], TEACHER[order[:k]][None], direction=direction).item()
        for k in range(1, 6)
    ]
    assert found == sorted(found)
    assert 0.0 < found[0] < exact - 1e-3
    assert found[3] == pytest.approx(exact)  # the rest is a single token
    assert found[4] == pytest.approx(exact)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_a_top_k_gradient_agrees_with_finite_differences(direction):
    chosen = torch.tensor([0, 3])

    def value(logits):
        listed = _log_policy(logits)[chosen][None]
        return topk_kl(listed, TEACHER[chosen][None], direction=direction).sum()

    slope = gradient(value, LOGITS)
    torch.testing.assert_close(slope, finite_differences(value, LOGITS))
    assert slope.abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_certain_and_impossible_tokens_stay_finite(dtype, direction):
    extremes = torch.tensor([[0.0, -1e4], [-1e4, 0.0], [-1e4, -1e4], [-0.7, -0.7]], dtype=dtype)
    for teacher in extremes:
        for of in (topk_kl, full_kl):
            student = extremes.clone().requires_grad_(True)
            value = of(student, teacher.expand(4, 2), direction=direction)
            value.sum().backward()
            assert torch.isfinite(value).all()
            assert torch.isfinite(student.grad).all()
            assert (value > -1e-4).all()
