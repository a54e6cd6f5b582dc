"""A publish between real actors: what arrives, what is committed, what late joiners get."""

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from areal_ray.errors import PublishError
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from areal_ray.runtime.publish_report import Committed
from areal_ray.runtime.weights_config import WeightsConfig
from tests.support.weight_actors import TINY, LearnerStandIn, ReplicaStandIn, tensors
from tests.support.weight_crew import WeightCrew, assert_live

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def crew(ray_session: None) -> Iterator[WeightCrew]:
    # 64-byte buckets: `embed` and `head` are far larger than one, `bias` far smaller.
    with WeightCrew(2, bucket_bytes=64) as crew:
        yield crew


@pytest.fixture(scope="module")
def second_learner(crew: WeightCrew) -> Any:
    return crew.spawn(LearnerStandIn, TINY)


@pytest.fixture(scope="module")
def spare(crew: WeightCrew) -> Any:
    """A replica that is no member of the crew's publishes."""
    replica = crew.spawn(ReplicaStandIn, TINY)
    crew.pid(replica)  # has started
    return replica


def _load(replica: Any, committed: Committed) -> None:
    """What a late or pinned replica does with a committed version."""
    load = replica.weights_load.remote(committed.plan, committed.version, committed.snapshot)
    assert len(ray.get(load, timeout=30)) == committed.plan.num_buckets
    ray.get(replica.weights_swap.remote(committed.version, committed.check), timeout=30)


def _next(crew: WeightCrew) -> int:
    return crew.version() + 1


def test_every_replica_holds_the_learners_weights_after_a_publish(crew: WeightCrew) -> None:
    for version in (_next(crew), _next(crew) + 1):
        report = crew.publish(version)
        assert report.version == version == crew.version()
        assert report.replicas == ("rollout-0", "rollout-1")
        assert report.quarantined == {}
        assert 0.0 < report.stage_s <= report.seconds
        crew.assert_holds("rollout-0", version)
        crew.assert_holds("rollout-1", version)


def test_the_learners_default_torch_group_is_left_free(crew: WeightCrew) -> None:
    crew.publish(_next(crew))
    assert ray.get(crew.learner.default_group_is_free.remote())


def test_only_the_version_after_the_committed_one_can_be_published(crew: WeightCrew) -> None:
    version = crew.version()
    for wrong in (version - 1, version, version + 2):
        with pytest.raises(PublishError, match=f"version {wrong}; must be {version + 1}"):
            crew.publish(wrong)
    assert crew.version() == version


def test_a_transposed_view_arrives_as_the_matrix_it_shows(crew: WeightCrew) -> None:
    version = _next(crew)
    tall = torch.arange(88, dtype=torch.float32).reshape(8, 11)
    ray.get(crew.learner.train.remote(version))
    ray.get(crew.learner.replace.remote("embed", tall))
    ray.get(crew.learner.transpose.remote("embed"))
    ray.get(crew.sync.publish.remote(version), timeout=60)
    expected = tensors(TINY, version) | {"embed": tall.T}
    assert_live(crew.replicas["rollout-0"], version, expected)
    ray.get(crew.learner.replace.remote("embed", torch.zeros(11, 8)))


def test_a_late_joiner_gets_the_committed_weights_although_the_learner_trained_on(
    crew: WeightCrew,
) -> None:
    version = _next(crew)
    crew.publish(version)
    ray.get(crew.learner.train.remote(version + 5))
    late = crew.replica()
    assert_live(late, version, tensors(TINY, version))
    committed = ray.get(crew.sync.committed.remote())
    assert committed.version == version
    crew.enlist(**crew.replicas, late=late)
    report = crew.publish(version + 1)
    assert report.replicas == ("rollout-0", "rollout-1", "late")
    assert_live(late, version + 1, tensors(TINY, version + 1))
    crew.enlist()


def test_a_pinned_replica_keeps_its_version_while_the_others_go_on(
    crew: WeightCrew, spare: Any
) -> None:
    version = _next(crew)
    crew.publish(version)
    held = ray.get(crew.sync.committed.remote())
    crew.publish(version + 1)
    _load(spare, held)
    assert_live(spare, version, tensors(TINY, version))
    crew.assert_holds("rollout-0", version + 1)


def test_a_replica_of_another_model_is_set_aside_with_the_tensor_named(crew: WeightCrew) -> None:
    version = _next(crew)
    other = crew.spawn(ReplicaStandIn, TINY | {"embed": (8, 11)})
    crew.enlist(**crew.replicas, other=other)
    report = crew.publish(version)
    reason = report.quarantined["other"]
    assert "1 tensor is of another shape: embed is sent as (11, 8), expected (8, 11)" in reason
    crew.assert_holds("rollout-1", version)
    assert ray.get(other.live.remote())[0] == 0
    crew.enlist()


def test_a_replica_whose_bytes_differ_discards_them_and_is_back_in_the_next_publish(
    crew: WeightCrew,
) -> None:
    version = _next(crew)
    ray.get(crew.replicas["rollout-0"].fail_at.remote("flip"))
    report = crew.publish(version)
    assert report.replicas == ("rollout-1",)
    assert "digests differ" in report.quarantined["rollout-0"]
    assert ray.get(crew.replicas["rollout-0"].live.remote())[0] == version - 1
    assert ray.get(crew.replicas["rollout-0"].staged_version.remote()) == -1
    back = crew.publish_until_all_are_back()
    crew.assert_holds("rollout-0", back)


def test_twenty_groups_leave_no_actor_and_no_socket_behind(crew: WeightCrew) -> None:
    def sockets() -> list[int]:
        members = [crew.learner, *crew.replicas.values()]
        return ray.get([member.sockets.remote() for member in members])

    crew.publish(_next(crew))
    before = sockets()
    for _ in range(20):
        crew.enlist()  # a group of a fresh name for the next publish
        crew.publish(_next(crew))
    # Ray may open a connection of its own meanwhile; a leak would be at least one a group.
    assert all(now <= then + 5 for now, then in zip(sockets(), before, strict=True))
    assert ray.util.list_named_actors(all_namespaces=True) == []


def test_a_publish_of_a_tiny_model_takes_milliseconds_once_the_group_stands(
    crew: WeightCrew,
) -> None:
    crew.enlist()
    crew.publish(_next(crew))
    seconds = sorted(crew.publish(_next(crew)).seconds for _ in range(7))
    # Three calls, two of them in turn. The bound is wide since the cores are shared.
    assert seconds[0] < 0.25


@pytest.mark.parametrize(
    "weights",
    [
        {"transport": "object_store"},
        {"snapshot": "always"},
        {"dtype": "bfloat16"},
    ],
    ids=lambda weights: "-".join(weights.values()),
)
def test_each_way_of_sending_brings_the_same_weights(
    crew: WeightCrew, second_learner: Any, spare: Any, weights: dict[str, str]
) -> None:
    sync = crew.spawn(ParamSyncActor, WeightsConfig(timeout_s=20.0, bucket_bytes=512, **weights))
    ray.get(sync.set_members.remote(second_learner, crew.replicas), timeout=30)
    ray.get(second_learner.train.remote(3))
    report = ray.get(sync.publish.remote(1), timeout=60)
    assert report.replicas == ("rollout-0", "rollout-1")
    expected = tensors(TINY, 3)
    if "dtype" in weights:
        expected = {name: t.to(torch.bfloat16).float() for name, t in expected.items()}
        assert any((expected[name] != t).any() for name, t in tensors(TINY, 3).items())
    assert_live(crew.replicas["rollout-1"], 1, expected)
    _load(spare, ray.get(sync.committed.remote(), timeout=30))
    assert_live(spare, 1, expected)


def test_bfloat16_weights_travel_as_they_are(
    crew: WeightCrew, second_learner: Any, spare: Any
) -> None:
    sync = crew.spawn(ParamSyncActor, WeightsConfig(timeout_s=20.0))
    ray.get(second_learner.begin.remote("bfloat16"))
    ray.get(sync.set_members.remote(second_learner, {"spare": spare}), timeout=30)
    ray.get(second_learner.train.remote(2))
    report = ray.get(sync.publish.remote(1), timeout=60)
    elements = sum(tensor.numel() for tensor in tensors(TINY, 2).values())
    assert 2 * elements <= report.bytes < 2 * elements + 16 * len(TINY)
    assert_live(spare, 1, {name: t.float() for name, t in tensors(TINY, 2, "bfloat16").items()})
    ray.get(second_learner.begin.remote("float32"))


def test_before_the_first_publish_there_is_nothing_to_catch_up_with(crew: WeightCrew) -> None:
    sync = crew.spawn(ParamSyncActor, WeightsConfig(), 7)
    committed = ray.get(sync.committed.remote(), timeout=60)
    assert (committed.version, committed.plan, committed.snapshot) == (7, None, ())


def test_a_snapshot_outlives_the_learner_where_one_is_always_taken(
    crew: WeightCrew, spare: Any
) -> None:
    sync = crew.spawn(ParamSyncActor, WeightsConfig(timeout_s=20.0, snapshot="always"))
    learner = crew.spawn(LearnerStandIn, TINY)
    ray.get(sync.set_members.remote(learner, {}), timeout=30)
    ray.get(learner.train.remote(4), timeout=60)
    ray.get(sync.publish.remote(1), timeout=60)
    ray.kill(learner)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(learner.pid.remote(), timeout=30)
    _load(spare, ray.get(sync.committed.remote(), timeout=30))
    assert_live(spare, 1, tensors(TINY, 4))
