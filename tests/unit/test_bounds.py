"""When new weights are refused, what a run goes back to, and what a recipe may ask for."""

import asyncio
from pathlib import Path

import pytest

from areal_ray.core.bounds import BoundsConfig, GateConfig, GoodVersion, GoodVersions
from areal_ray.core.queue import Ticket, TrajectoryQueue
from areal_ray.core.versions import AdmissionConfig
from areal_ray.errors import RecipeError
from areal_ray.recipe import load_recipe

DIGITS = Path(__file__).resolve().parents[1] / "support/digits.yaml"
ONLINE = Path(__file__).resolve().parents[2] / "recipes/online/calculator.yaml"


@pytest.mark.parametrize(
    ("limits", "score", "good", "is_refused"),
    [
        ({"min": 0.5}, 0.5, 0.9, False),
        ({"min": 0.5}, 0.49, None, True),
        ({"max_drop": 0.1}, 0.8, 0.9, False),  # 0.9 - 0.8 is a little more than 0.1
        ({"max_drop": 0.1}, 0.79, 0.9, True),
        ({"max_drop": 0.0}, 0.9, 0.9, False),
        ({"max_drop": 0.1}, 0.0, None, False),
        ({"min": 0.5, "max_drop": 0.1}, 0.45, 0.5, True),
    ],
)
def test_the_gate_refuses_what_scores_too_low_or_falls_too_far(limits, score, good, is_refused):
    assert bool(GateConfig(**limits).refusal(score, good)) is is_refused


def test_what_every_so_many_steps_made_is_judged_and_the_last():
    gate = GateConfig(min=0.1, every_steps=3)
    assert [step for step in range(1, 9) if gate.is_due(step, 8)] == [3, 6, 8]


@pytest.mark.parametrize(
    ("kl", "is_refused"), [(0.5, False), (0.51, True), (float("nan"), True), (None, False)]
)
def test_weights_too_far_from_the_reference_are_refused(kl, is_refused):
    metrics = {} if kl is None else {"learner/kl_reference_nats": kl}
    assert bool(BoundsConfig(max_kl_nats=0.5).kl_refusal(metrics)) is is_refused
    assert not BoundsConfig().kl_refusal(metrics)


def test_a_run_goes_back_to_the_newest_good_weights_and_behind_those_that_were_disowned():
    good = GoodVersions(GoodVersion(0))
    assert good.disown() is None  # nothing is before them
    good.keep(GoodVersion(1, 0.5))
    good.promote()
    assert good.disown() is None  # version 2 was never taken for good
    assert good.go_back() == GoodVersion(1, 0.5)
    assert good.disown() == 1  # they are what the step began with
    assert good.go_back() == GoodVersion(0)
    good.keep(GoodVersion(5))
    good.keep(GoodVersion(6))
    assert good.disown() == 6
    assert good.newest == GoodVersion(5)


def test_no_step_begins_before_enough_rewarded_episodes_wait():
    config = AdmissionConfig(groups_per_step=1, n_samples=4, max_head_offpolicyness=2)
    queue = TrajectoryQueue[None](config, capacity=9, least_rewarded=5)

    def ticket(number, rewarded):
        return Ticket(f"g{number}", "t", None, (0,), 10, num_rewarded=rewarded)

    async def scenario():
        await queue.put(ticket(1, 4))
        taking = asyncio.ensure_future(queue.take(0))
        await asyncio.sleep(0.01)
        assert not taking.done()
        assert queue.lacks_rewarded == 1
        await queue.put(ticket(2, 2))
        taken = await taking
        assert [t.group_id for t in taken.tickets] == ["g1"]
        assert queue.lacks_rewarded == 3

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("recipe", "overrides", "said"),
    [
        (DIGITS, ["bounds.gate={min: 0.5}"], "bounds.gate: is given without the section eval"),
        (DIGITS, ["bounds.gate={}"], "has neither min nor max_drop"),
        (DIGITS, ["bounds.max_kl_nats=0.1"], "without objective.kl"),
        (DIGITS, ["bounds.min_rewarded_sessions=25"], "must be at most 24"),
        (ONLINE, ["evaluation.tasks.source=a:b"], "reward: is missing with the section evaluation"),
        (ONLINE, ["agent.max_turns=3"], "agent: is given with kind: online"),
    ],
)
def test_bounds_that_cannot_be_held_are_refused_by_name(recipe, overrides, said):
    with pytest.raises(RecipeError) as refused:
        load_recipe(recipe, overrides)
    assert said in str(refused.value)


def test_kind_online_may_have_held_out_tasks_that_agents_of_the_run_attempt():
    from areal_ray.actors import layout_of

    recipe = load_recipe(
        ONLINE,
        [
            "evaluation.tasks.source=recipes.calculator.tasks:held_out",
            "reward.score=recipes.calculator.reward:exact",
            "agent.run=recipes.calculator.agent:solve",
            "bounds.gate={max_drop: 0.05}",
        ],
    )
    roles = [bundle.role for bundle in layout_of(recipe).bundles]
    assert roles.count("evaluation") == roles.count("evaluation-agent") == 1
    assert "agent" not in roles
