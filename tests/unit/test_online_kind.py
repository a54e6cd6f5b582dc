"""kind: online: what a recipe of it needs, refuses and gets."""

import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from areal_ray.agents.slot_stream import SlotStream
from areal_ray.core.trajectory import Outcome, Trajectory, decode_group
from areal_ray.errors import RecipeError
from areal_ray.gateway.sessions import ReadyGroup
from areal_ray.gateway_access import GatewayAccess, gateway_problems, taken_address
from areal_ray.plan import plan_run
from areal_ray.preflight import preflight
from areal_ray.recipe import load_recipe
from areal_ray.rewards.reward import ABSTAIN
from areal_ray.run_folder import RunFolder
from areal_ray.runtime.ready_group import as_group, num_rewarded

RECIPE = Path(__file__).resolve().parents[2] / "recipes/online/calculator.yaml"


def test_the_recipe_has_gateways_and_a_reward_actor_and_no_agent_actors():
    from areal_ray.actors import layout_of

    recipe = load_recipe(RECIPE)
    assert recipe.scoring is not None
    assert recipe.scoring.score == ABSTAIN
    roles = {bundle.role for bundle in layout_of(recipe).bundles}
    assert roles == {"rollout", "learner", "reward", "gateway", "param-sync"}
    assert not list(gateway_problems(recipe))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tasks={source: 'a:b'}", "tasks: is given; kind: online has no use for it"),
        ("agent.max_turns=3", "agent: is given with kind: online"),
        ("admission.at_consumption=wait", "must be drop or mask"),
        ("gateway.port=70000", "gateway.port"),
        ("kind=rl", "gateway: is given; kind: rl has no use for it"),
    ],
)
def test_what_makes_no_sense_with_it_is_refused_by_name(override, said):
    with pytest.raises(RecipeError) as refused:
        load_recipe(RECIPE, [override])
    assert said in str(refused.value)


def test_a_weak_admin_key_is_refused_before_anything_starts_and_none_is_ever_shown(monkeypatch):
    monkeypatch.setenv("AREAL_RAY_ADMIN_KEY", "short")
    (told,) = gateway_problems(load_recipe(RECIPE))
    assert "AREAL_RAY_ADMIN_KEY: has 5 characters" in told
    access = GatewayAccess(("http://127.0.0.1:1",), "ar_secret-secret-secret")
    assert "secret" not in access.lines()  # the user has it
    assert "secret" not in repr(access)
    monkeypatch.delenv("AREAL_RAY_ADMIN_KEY")
    assert "ar_secret-secret-secret" in access.lines()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("gateway.host=300.1.1.1", "300.1.1.1:0 cannot be listened on"),
        ("gateway.host=192.0.2.7", "192.0.2.7:0 cannot be listened on"),  # of no machine
        ("gateway={port: 65530, replicas: 10}", "must be at most 65526"),
    ],
)
def test_an_address_that_cannot_be_had_is_told_before_anything_starts(override, said):
    (told,) = gateway_problems(load_recipe(RECIPE, [override]))
    assert told.startswith("gateway.")
    assert said in told


def test_a_port_that_is_taken_is_told_and_one_that_is_free_soon_is_waited_for(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        recipe = load_recipe(RECIPE, [f"gateway.port={port}", f"cluster.fileroot={tmp_path}"])
        (told,) = taken_address(recipe)
        assert f"127.0.0.1:{port} cannot be listened on: Address already in use" in told
        with pytest.raises(RecipeError, match="Address already in use"):
            preflight(recipe)
        assert not list(gateway_problems(recipe))
        threading.Timer(0.3, taken.close).start()
        assert not list(taken_address(recipe))


def test_a_plan_beside_the_run_that_goes_on_says_what_that_has_and_finds_nothing_wrong(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        recipe = load_recipe(
            RECIPE,
            [f"gateway.port={port}", f"cluster.fileroot={tmp_path}", "cluster.num_cpus=8"],
        )
        held = RunFolder.claim(recipe.folder, recipe.to_yaml())
        planned = plan_run(recipe)
        assert not planned.problems
        assert [line.split(": ")[1] for line in planned.held] == [
            "name",
            "gateway.host, gateway.port",
        ]
        held.release()
        assert len(plan_run(recipe).held) == 1
    assert not plan_run(recipe).held


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), "waits for its groups as long as it takes"),
        (("deadlines.groups_s=90",), "waits for its groups 90 s"),
    ],
)
def test_a_quiet_run_waits_unless_its_recipe_says_how_long(overrides, told, tmp_path):
    recipe = load_recipe(RECIPE, [f"cluster.fileroot={tmp_path}", "cluster.num_cpus=8", *overrides])
    assert told in plan_run(recipe).table


def test_other_kinds_give_up_on_groups_that_do_not_come():
    deadlines = load_recipe("recipes/calculator/grpo.yaml").deadlines
    assert deadlines.groups_s is None
    assert deadlines.groups_limit_s(is_online=False) == 1800
    assert deadlines.groups_limit_s(is_online=True) is None


def test_slots_have_no_end_and_no_name_comes_twice_over_a_resumption():
    stream = SlotStream()
    first = [stream.next() for _ in range(3)]
    stream.retry(first[0].task.id, 0, 0)
    again = SlotStream()
    again.load_state_dict(stream.state_dict())
    names = [draw.task.id for draw in (*first, *(again.next() for _ in range(3)))]
    assert len(set(names)) == 6


def row(session: str, reward: float | None) -> Trajectory:
    return Trajectory(
        token_ids=np.arange(4, dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        behaviour_logprobs=np.array([0, 0, -1, -2], np.float32),
        versions=np.array([-1, -1, 3, 5], np.int32),
        turn_ids=np.array([-1, -1, 0, 0], np.int16),
        task_id="t",
        group_id="g-0-x",
        episode_id=session,
        reward=reward,
        outcome=Outcome.UNSCORED if reward is None else Outcome.OK,
        failure="no reward" if reward is None else "",
    )


@pytest.mark.parametrize("has_reward_function", [False, True])
def test_sessions_become_a_group_and_those_without_a_reward_are_left_to_who_scores(
    has_reward_function,
):
    ready = ReadyGroup("g-0-x", "t", ("s1", "s2"), (row("s1", 0.5), row("s2", None)), num_turns=3)
    assert num_rewarded(ready) == 1
    made, payload = as_group(ready, "0/slot-7/0", has_reward_function=has_reward_function)
    group = decode_group(payload)
    assert group.group_id == made.group_id == "0/slot-7/0"
    assert (made.sessions, made.session_group) == (("s1", "s2"), "g-0-x")
    assert (made.oldest_version, made.newest_version, made.num_turns) == (3, 5, 3)
    assert (made.num_tokens, made.num_sampled_tokens) == (8, 4)
    assert [t.reward for t in group.trajectories] == [0.5, None]
    expected = Outcome.OK if has_reward_function else Outcome.UNSCORED
    assert [t.outcome for t in group.trajectories] == [Outcome.OK, expected]


def test_a_session_that_filled_its_context_is_truncated_also_where_it_is_yet_to_be_scored():
    full = replace(row("s1", None), details={"limit_reached": "full"})
    ready = ReadyGroup("g-0-x", "t", ("s1", "s2"), (full, row("s2", None)), num_turns=3)
    made, payload = as_group(ready, "0/slot-7/0", has_reward_function=True)
    assert made.outcomes == {"truncated": 1, "ok": 1}
    assert [t.failure for t in decode_group(payload).trajectories] == ["full", ""]
