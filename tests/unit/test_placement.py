"""Layout and supply: the arithmetic of placement."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_ray.agents.episode import AgentConfig
from areal_ray.engines.train_config import LearnerConfig
from areal_ray.engines.vllm_generation_config import VllmGenerationConfig
from areal_ray.errors import PlacementError
from areal_ray.rewards.reward import RewardConfig
from areal_ray.runtime.cluster import check_ray_version
from areal_ray.runtime.placement import NodeSupply, assign, plan_layout, table
from areal_ray.runtime.rollout_config import RolloutConfig
from areal_ray.runtime.run_config import ClusterConfig

TWO_CORES = [NodeSupply("a", 2.0)]


def layout(rollouts=1, ranks=1, agents=1, rewards=1, *, cpus=0.2, gpus=0.0):
    return plan_layout(
        rollout=RolloutConfig(replicas=rollouts, num_cpus=cpus, num_gpus=gpus),
        learner=LearnerConfig(ranks=ranks, num_cpus=cpus, num_gpus=gpus),
        agent=AgentConfig(replicas=agents),
        reward=RewardConfig(score="m:f", replicas=rewards),
        has_evaluation=True,
    )


def test_each_rollout_replica_has_a_group_of_its_own_and_the_learner_has_one():
    groups = layout(rollouts=3, ranks=2).groups
    assert [len(groups[f"rollout-{i}"]) for i in range(3)] == [1, 1, 1]
    assert [b.name for b in groups["learner"]] == ["learner-0", "learner-1"]
    assert all(b.num_gpus == 0 for b in groups["services"])


def test_the_actors_of_a_small_run_fit_two_cores_by_default():
    plan = layout(rollouts=2, agents=2, rewards=2)
    placed = assign(plan, TWO_CORES, ClusterConfig())
    assert set(placed) == {bundle.name for bundle in plan.bundles}


def test_a_run_without_learner_has_no_learner_and_no_param_sync():
    plan = plan_layout(rollout=RolloutConfig(), agent=AgentConfig())
    assert [bundle.role for bundle in plan.bundles] == ["rollout", "agent"]


def split_layout(replicas=1):
    engine = VllmGenerationConfig(tensor_parallel=4)
    return plan_layout(
        rollout=RolloutConfig(engine=engine, replicas=replicas, num_gpus=4), has_evaluation=True
    )


def test_a_replica_that_is_split_over_gpus_has_a_bundle_for_each_on_one_node():
    plan = split_layout(2)
    assert plan.on_one_node == {"rollout-0", "rollout-1", "evaluation"}
    group = plan.groups["rollout-1"]
    assert [(b.role, b.num_gpus) for b in group] == [("rollout", 0.0), *[("rollout-part", 1.0)] * 4]
    assert plan.demand("num_gpus") == 12
    nodes = [NodeSupply("a", 8.0, 8.0), NodeSupply("b", 8.0, 4.0)]
    placed = assign(plan, nodes, ClusterConfig())
    assert set(placed) == {bundle.name for bundle in plan.bundles}
    for name in plan.on_one_node:
        assert len({placed[bundle.name] for bundle in plan.groups[name]}) == 1


def test_gpus_of_several_nodes_do_not_hold_a_replica_that_needs_one():
    nodes = [NodeSupply(name, 8.0, 3.0) for name in "abcd"]
    with pytest.raises(PlacementError, match=r"needs .* 4 GPUs on one node.*rollout\.replicas"):
        assign(split_layout(), nodes, ClusterConfig())


def test_too_many_cpus_are_told_with_demand_supply_and_the_key_to_change():
    with pytest.raises(PlacementError) as caught:
        assign(layout(rollouts=4, cpus=2.0), TWO_CORES, ClusterConfig())
    told = str(caught.value)
    assert "rollout 4 x 2" in told
    assert "the cluster has 2." in told
    assert "rollout.replicas" in told


def test_a_gpu_asked_of_a_machine_without_is_refused():
    with pytest.raises(PlacementError, match=r"needs 3 GPUs .* the cluster has 0"):
        assign(layout(gpus=1.0), TWO_CORES, ClusterConfig())
    with pytest.raises(PlacementError, match=r"cluster.n_gpus_per_node: is 1"):
        assign(layout(), TWO_CORES, ClusterConfig(n_gpus_per_node=1))


def test_fewer_nodes_than_asked_for_are_told():
    with pytest.raises(PlacementError, match=r"cluster.n_nodes: is 3; the cluster has 1"):
        assign(layout(), TWO_CORES, ClusterConfig(n_nodes=3))


def test_a_bundle_larger_than_any_node_is_named():
    nodes = [NodeSupply("a", 2.0), NodeSupply("b", 2.0)]
    with pytest.raises(PlacementError, match=r"rollout-0 needs 3 CPUs on one node"):
        assign(plan_layout(rollout=RolloutConfig(num_cpus=3.0)), nodes, ClusterConfig())


def test_the_table_has_a_line_for_each_actor_and_ends_with_demand_and_supply():
    plan = layout(rollouts=2)
    text = table(plan, assign(plan, TWO_CORES, ClusterConfig()), TWO_CORES)
    assert all(
        sum(line.startswith(b.name + " ") for line in text.splitlines()) == 1 for b in plan.bundles
    )
    assert text.splitlines()[-1].endswith("1 node with 2 CPUs and 0 GPUs")


@given(
    cpus=st.lists(st.integers(1, 16), min_size=1, max_size=5),
    replicas=st.integers(1, 6),
    each=st.sampled_from([0.1, 0.2, 0.5, 1.0, 2.0]),
)
def test_no_node_is_given_more_than_it_has(cpus, replicas, each):
    nodes = [NodeSupply(f"n{i}", float(count)) for i, count in enumerate(cpus)]
    plan = layout(rollouts=replicas, cpus=each)
    try:
        placed = assign(plan, nodes, ClusterConfig())
    except PlacementError:
        return
    for node in nodes:
        used = sum(b.num_cpus for b in plan.bundles if placed[b.name] == node.name)
        assert used <= node.num_cpus + 1e-3


@pytest.mark.parametrize("version", ["2.59.1", "2.6.0", "3.0.0", "2.61.0"])
def test_another_ray_than_the_one_this_is_written_for_is_refused(version):
    with pytest.raises(PlacementError, match=version):
        check_ray_version(version)


def test_a_patch_release_of_ray_is_accepted():
    check_ray_version("2.60.3")
