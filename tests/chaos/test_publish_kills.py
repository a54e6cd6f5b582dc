"""Members of a publish are killed, halted and broken; nobody is left between two versions."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import ray

from areal_ray.errors import PublishError
from areal_ray.runtime.membership import NoReplicaLeft
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from tests.support.weight_actors import LearnerStandIn, tensors
from tests.support.weight_crew import PATIENCE_S, WeightCrew, answer, assert_live

pytestmark = pytest.mark.usefixtures("ray_session")

BROAD = {"embed": (1024, 4096), "bias": (3,), "head": (4096, 512)}
"""25 MB, 385 buckets of 64 KiB: long enough on the wire to be hit there."""

TIMEOUT_S = 2.0
HANG_BOUND_S = TIMEOUT_S + 3.0 + 5.0
"""Deadline, grace, and what a loaded machine adds."""


@pytest.fixture(scope="module", params=[pytest.param("memory", marks=pytest.mark.extended), "wire"])
def crew(ray_session: None, request: pytest.FixtureRequest) -> Iterator[WeightCrew]:
    """Replicas on the learner's node, or as on other nodes."""
    how = {"bucket_bytes": 65536, "shares_memory": request.param == "memory"}
    with WeightCrew(3, shapes=BROAD, timeout_s=TIMEOUT_S, **how) as crew:
        yield crew


def test_a_receiver_killed_while_staging_is_named_and_the_others_are_updated(
    crew: WeightCrew,
) -> None:
    version = crew.publish_until_all_are_back() + 1
    ray.get(crew.replicas["rollout-1"].fail_at.remote("die"))
    report = crew.publish(version)
    assert report.version == version == crew.version()
    assert report.replicas == ("rollout-0", "rollout-2")
    assert list(report.quarantined) == ["rollout-1"]
    assert "rollout-1 died" in report.quarantined["rollout-1"]
    crew.assert_holds("rollout-0", version)
    crew.assert_holds("rollout-2", version)
    # Ray has restarted it, and it caught up by itself before it took a call: with what was
    # committed then, which on a slow machine is the version before.
    crew.assert_whole("rollout-1", version - 1, version)
    back = crew.publish_until_all_are_back()
    crew.publish(back + 1)
    for name in crew.replicas:
        crew.assert_holds(name, back + 1)


def test_a_receiver_killed_amid_the_buckets_leaves_no_replica_with_half_a_version(
    crew: WeightCrew,
) -> None:
    version = crew.publish_until_all_are_back() + 1
    pid = crew.pid(crew.replicas["rollout-2"])
    killer = threading.Timer(0.03, os.kill, (pid, signal.SIGKILL))
    ray.get(crew.learner.train.remote(version))
    killer.start()
    report = ray.get(crew.sync.publish.remote(version), timeout=60)
    killer.join()
    # Too late is possible on a fast machine; then the kill hits a whole replica.
    assert set(report.replicas) | set(report.quarantined) == set(crew.replicas)
    assert {"rollout-0", "rollout-1"} <= set(report.replicas)
    crew.assert_holds("rollout-0", version)
    crew.assert_holds("rollout-1", version)
    crew.assert_whole("rollout-2", version - 1, version)  # it may be back before the commit
    back = crew.publish_until_all_are_back()
    crew.assert_holds("rollout-2", back)


def test_a_replica_restarted_between_two_publishes_takes_part_in_the_next(
    crew: WeightCrew,
) -> None:
    version = crew.publish_until_all_are_back() + 1
    old = answer(crew.replicas["rollout-1"].incarnation)
    ray.kill(crew.replicas["rollout-1"], no_restart=False)
    end = time.monotonic() + PATIENCE_S
    while answer(crew.replicas["rollout-1"].incarnation) == old:
        assert time.monotonic() < end
        time.sleep(0.1)
    crew.assert_holds("rollout-1", version - 1)
    report = crew.publish(version)
    assert report.replicas == tuple(crew.replicas)
    assert report.quarantined == {}
    for name in crew.replicas:
        crew.assert_holds(name, version)


def test_a_receiver_that_hangs_is_named_in_bounded_time_and_restarted(crew: WeightCrew) -> None:
    version = crew.publish_until_all_are_back() + 1
    old = ray.get(crew.replicas["rollout-0"].incarnation.remote())
    crew.stop(crew.replicas["rollout-0"])
    ray.get(crew.learner.train.remote(version))
    started_s = time.monotonic()
    publishing = crew.sync.publish.remote(version)
    time.sleep(0.5)
    health = ray.get(crew.sync.health.remote(), timeout=5)
    assert health.version == version - 1
    assert health.doing.startswith("stage for")
    report = ray.get(publishing, timeout=60)
    # One deadline to find it out, and at most one group more for the others.
    assert time.monotonic() - started_s < 2 * HANG_BOUND_S
    assert report.replicas == ("rollout-1", "rollout-2")
    assert "did not answer weights_stage" in report.quarantined["rollout-0"]
    crew.assert_holds("rollout-1", version)
    back = crew.publish_until_all_are_back()
    assert ray.get(crew.replicas["rollout-0"].incarnation.remote()) != old
    crew.assert_holds("rollout-0", back)


def test_a_replica_that_breaks_in_the_swap_never_samples_from_half_of_each_version(
    crew: WeightCrew,
) -> None:
    version = crew.publish_until_all_are_back() + 1
    ray.get(crew.replicas["rollout-0"].fail_at.remote("break"))
    report = crew.publish(version)
    assert report.replicas == ("rollout-1", "rollout-2")
    assert "device lost while loading; restarted" in report.quarantined["rollout-0"]
    crew.assert_holds("rollout-1", version)
    back = crew.publish_until_all_are_back()
    crew.assert_holds("rollout-0", back)


def test_with_every_replica_dead_nothing_is_committed_until_one_is_back(crew: WeightCrew) -> None:
    version = crew.publish_until_all_are_back() + 1
    for replica in crew.replicas.values():
        ray.get(replica.fail_at.remote("die"))
    with pytest.raises(NoReplicaLeft, match=f"stays {version - 1}"):
        crew.publish(version)
    assert crew.version() == version - 1
    for name in crew.replicas:
        crew.assert_holds(name, version - 1)
    back = crew.publish_until_all_are_back()
    for name in crew.replicas:
        crew.assert_holds(name, back)


def test_a_learner_that_halts_is_named_in_bounded_time_and_may_publish_later(
    crew: WeightCrew,
) -> None:
    version = crew.publish_until_all_are_back() + 1
    pid = crew.pid(crew.learner)
    ray.get(crew.learner.train.remote(version))
    crew.stop(crew.learner)
    started_s = time.monotonic()
    with pytest.raises(PublishError, match=rf"learner did not answer.*stays {version - 1}"):
        ray.get(crew.sync.publish.remote(version), timeout=60)
    assert time.monotonic() - started_s < 2 * HANG_BOUND_S
    for name in crew.replicas:
        crew.assert_holds(name, version - 1)
        assert ray.get(crew.replicas[name].staged_version.remote()) == -1
    os.kill(pid, signal.SIGCONT)
    ray.get(crew.learner.pid.remote(), timeout=30)
    assert crew.publish(version).replicas == tuple(crew.replicas)


def test_a_learner_killed_while_sending_leaves_everyone_at_the_old_version(
    crew: WeightCrew,
) -> None:
    sync = crew.spawn(ParamSyncActor, crew.config)
    learner = crew.spawn(LearnerStandIn, BROAD)
    pid = crew.pid(learner)
    ray.get(sync.set_members.remote(learner, crew.replicas))
    ray.get(learner.train.remote(50))
    ray.get(sync.publish.remote(1), timeout=60)
    ray.get(learner.train.remote(51))
    threading.Timer(0.02, os.kill, (pid, signal.SIGKILL)).start()
    started_s = time.monotonic()
    with pytest.raises(PublishError, match=r"learner died.*The committed version stays 1"):
        ray.get(sync.publish.remote(2), timeout=60)
    assert time.monotonic() - started_s < HANG_BOUND_S
    assert ray.get(sync.version.remote()) == 1
    for replica in crew.replicas.values():
        assert_live(replica, 1, tensors(BROAD, 50))
        assert ray.get(replica.staged_version.remote()) == -1
