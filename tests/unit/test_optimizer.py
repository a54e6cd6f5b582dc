"""Learning-rate schedules in closed form, and the update that leaves bad gradients alone."""

import math

import pytest
import torch

from areal_ray.engines.optimizer import GuardedOptimizer, learning_rate
from areal_ray.engines.train_config import OptimizerConfig
from areal_ray.errors import EngineError


def _rates(steps, total, **fields):
    config = OptimizerConfig(lr=1.0, **fields)
    return [learning_rate(step, total, config) for step in range(steps)]


def test_warm_up_rises_in_equal_parts_to_the_peak():
    assert _rates(6, 6, warmup_steps=3) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_linear_falls_to_zero_at_the_end_and_stays_there():
    rates = _rates(8, 6, warmup_steps=2, lr_scheduler_type="linear")
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25, 0, 0])


def test_cosine_is_at_half_in_the_middle():
    rates = _rates(9, 8, lr_scheduler_type="cosine")
    assert rates[0] == 1.0
    assert rates[4] == pytest.approx(0.5)
    assert rates[8] == pytest.approx(0.0, abs=1e-12)


def _one(gradient, **fields):
    parameter = torch.nn.Parameter(torch.tensor([[1.0, 2.0]]))
    bias = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = GuardedOptimizer([parameter, bias], OptimizerConfig(**fields))
    parameter.grad, bias.grad = torch.tensor([gradient]), torch.zeros(1)
    return parameter, bias, optimizer


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    parameter, bias, optimizer = _one([1.0, bad])
    stats = optimizer.update(0.1)
    assert not stats.was_taken
    assert parameter.tolist() == [[1.0, 2.0]]
    assert bias.tolist() == [1.0]
    assert optimizer.state_dict()["state"] == {}


def test_the_norm_is_reported_before_clipping():
    _, _, optimizer = _one([3.0, 4.0], gradient_clipping=0.5)
    stats = optimizer.update(0.1)
    assert stats.was_taken
    assert stats.grad_norm == pytest.approx(5.0)


def test_weight_decay_shrinks_matrices_and_spares_vectors():
    parameter, bias, optimizer = _one([0.0, 0.0], weight_decay=0.5)
    optimizer.update(0.1)
    assert parameter.tolist()[0] == pytest.approx([0.95, 1.9])
    assert bias.tolist() == [1.0]


def test_the_first_step_of_adam_is_the_learning_rate():
    parameter, _, optimizer = _one([0.3, -0.2], weight_decay=0.0)
    optimizer.update(0.125)
    assert parameter.tolist()[0] == pytest.approx([0.875, 2.125], rel=1e-5)


def test_an_optimizer_that_cannot_work_here_says_so():
    with pytest.raises(EngineError, match="adamw_8bit with parameters on cpu; must be adamw"):
        _one([1.0, 1.0], name="adamw_8bit")


def test_a_part_of_a_gradient_is_clipped_by_the_norm_of_the_whole():
    (whole, _, together), (part, _, alone) = (_one([3.0, 4.0]) for _ in range(2))
    part.grad = torch.tensor([[3.0, 0.0]])
    together.update(0.1)
    assert alone.update(0.1, grad_norm=5.0).grad_norm == 5.0
    assert float(part.grad[0, 0]) == pytest.approx(float(whole.grad[0, 0]))


def test_a_restored_optimizer_keeps_its_moments_and_the_settings_it_has_now():
    _, _, before = _one([3.0, 4.0], betas=(0.5, 0.6))
    before.update(0.1)
    _, _, now = _one([3.0, 4.0], betas=(0.8, 0.9), weight_decay=0.2, eps=1e-4)
    now.load_state_dict(before.state_dict())
    groups = now.inner.param_groups
    assert [(g["betas"], g["weight_decay"], g["eps"]) for g in groups] == [
        ((0.8, 0.9), 0.2, 1e-4),
        ((0.8, 0.9), 0.0, 1e-4),
    ]
    held = [state["exp_avg"].flatten().tolist() for state in now.inner.state.values()]
    assert held == [s["exp_avg"].flatten().tolist() for s in before.inner.state.values()]


def test_a_flat_gradient_is_read_and_written_back_whole():
    parameter, bias, optimizer = _one([3.0, 4.0])
    bias.grad = None
    flat = optimizer.flat_gradient()
    assert sorted(flat.tolist()) == [0.0, 3.0, 4.0]
    optimizer.set_flat_gradient(flat * 2)
    assert parameter.grad.tolist() == [[6.0, 8.0]]
    assert bias.grad.tolist() == [0.0]


def test_betas_outside_their_range_are_refused():
    with pytest.raises(ValueError, match=r"betas: is \[0\.9, 1\.0\]"):
        OptimizerConfig(betas=(0.9, 1.0))
