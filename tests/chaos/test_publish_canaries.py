"""Replicas that swap and do not hold the learner's weights: found, silenced, refreshed, counted."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from areal_ray.errors import PublishError
from areal_ray.runtime.membership import NoReplicaLeft
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from areal_ray.runtime.weights_config import WeightsConfig
from tests.support.weight_actors import TINY, ReplicaStandIn, tensors
from tests.support.weight_crew import PATIENCE_S, WeightCrew, answer, assert_live

pytestmark = pytest.mark.usefixtures("ray_session")

TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def crew(ray_session: None) -> Iterator[WeightCrew]:
    with WeightCrew(3, bucket_bytes=64, timeout_s=TIMEOUT_S) as crew:
        yield crew


def until_refreshed(crew: WeightCrew, name: str, version: int) -> None:
    """Wait until a replica serves a version with just its weights."""
    end = time.monotonic() + PATIENCE_S
    while answer(crew.replicas[name].is_halted):
        assert time.monotonic() < end, f"{name} stays halted"
        time.sleep(0.1)
    crew.assert_holds(name, version)


def test_a_replica_altered_in_the_swap_is_silenced_refreshed_and_back_in_the_next_publish(
    crew: WeightCrew,
) -> None:
    version = crew.publish_until_all_are_back() + 1
    old = answer(crew.replicas["rollout-1"].incarnation)
    ray.get(crew.replicas["rollout-1"].fail_at.remote("alter"))
    report = crew.publish(version)
    assert report.version == version == crew.version()
    assert report.replicas == ("rollout-0", "rollout-2")
    assert report.differing == ("rollout-1",)
    told = f"rollout-1 at version {version}: head is live with other bytes than those that arrived"
    assert told in report.quarantined["rollout-1"]
    assert any(told in line for line in report.events)
    until_refreshed(crew, "rollout-1", version)
    assert answer(crew.replicas["rollout-1"].incarnation) == old, "it was not refreshed in place"
    later = crew.publish(version + 1)
    assert later.replicas == tuple(crew.replicas)
    assert later.events == ("rollout-1 is refreshed", "rollout-1 takes part again")
    crew.assert_holds("rollout-1", version + 1)


def test_a_replica_that_differs_after_its_refresh_too_is_restarted(crew: WeightCrew) -> None:
    version = crew.publish_until_all_are_back() + 1
    old = answer(crew.replicas["rollout-0"].incarnation)
    ray.get(crew.replicas["rollout-0"].fail_at.remote("alter_always"))
    report = crew.publish(version)
    assert report.differing == ("rollout-0",)
    end = time.monotonic() + PATIENCE_S
    while answer(crew.replicas["rollout-0"].incarnation) == old:
        assert time.monotonic() < end
        time.sleep(0.1)
    until_refreshed(crew, "rollout-0", version)
    back = crew.publish_until_all_are_back()
    crew.assert_holds("rollout-0", back)


def test_a_version_that_most_did_not_prove_is_not_committed_and_is_on_the_next_try(
    crew: WeightCrew,
) -> None:
    version = crew.publish_until_all_are_back() + 1
    for name in ("rollout-0", "rollout-2"):
        ray.get(crew.replicas[name].fail_at.remote("alter"))
    with pytest.raises(NoReplicaLeft, match=rf"2 of 3 replicas .*stays {version - 1}"):
        crew.publish(version)
    assert crew.version() == version - 1
    report = crew.publish(version)  # waits for those two to be refreshed
    assert report.replicas == tuple(crew.replicas)
    for name in crew.replicas:
        crew.assert_holds(name, version)


def test_an_engine_that_does_not_compute_what_the_learner_does_ends_the_publish_by_name(
    crew: WeightCrew,
) -> None:
    sync = crew.spawn(ParamSyncActor, WeightsConfig(timeout_s=TIMEOUT_S))
    skewed = crew.spawn(ReplicaStandIn, TINY, is_skewed=True, restarts=-1)
    crew.pid(skewed)
    ray.get(sync.set_members.remote(crew.learner, {"skewed": skewed}), timeout=60)
    with pytest.raises(NoReplicaLeft, match="1 of 1 replicas do not sample"):
        ray.get(sync.publish.remote(1), timeout=60)
    with pytest.raises(PublishError, match=r"skewed: .*It was so twice; see weights\.canary"):
        publish_once_one_is_back(sync)
    assert ray.get(sync.version.remote()) == 0
    crew.enlist()  # the learner's meeting point, too


def publish_once_one_is_back(sync: Any) -> None:
    """As SyncService does while a replica restarts."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            ray.get(sync.publish.remote(1), timeout=60)
        except NoReplicaLeft:
            time.sleep(0.3)


def test_an_engine_that_cannot_read_its_weights_back_is_found_out_by_the_probe(
    crew: WeightCrew,
) -> None:
    version = crew.publish_until_all_are_back() + 1
    blind = crew.spawn(ReplicaStandIn, TINY, crew.sync, is_blind=True)
    crew.enlist(**crew.replicas, blind=blind)
    ray.get(blind.fail_at.remote("alter"))
    report = crew.publish(version)
    assert report.differing == ("blind",)
    assert "the log-prob of token 1 of the probe is" in report.quarantined["blind"]
    crew.enlist()


@pytest.mark.parametrize("fault", ["die_in_swap", "stop_in_swap"])
def test_a_replica_lost_in_the_swap_is_named_and_comes_back_whole(
    crew: WeightCrew, fault: str
) -> None:
    version = crew.publish_until_all_are_back() + 1
    ray.get(crew.replicas["rollout-2"].fail_at.remote(fault))
    report = crew.publish(version)
    assert report.replicas == ("rollout-0", "rollout-1")
    said = "rollout-2 died" if fault == "die_in_swap" else "did not answer weights_swap"
    assert said in report.quarantined["rollout-2"]
    crew.assert_whole("rollout-2", version - 1, version)
    back = crew.publish_until_all_are_back()
    crew.assert_holds("rollout-2", back)


def test_a_replica_that_joins_in_mid_publish_gets_the_committed_version_whole(
    crew: WeightCrew,
) -> None:
    late = crew.spawn(ReplicaStandIn, TINY)
    crew.pid(late)  # has started
    version = crew.publish_until_all_are_back() + 1
    ray.get(crew.replicas["rollout-0"].fail_at.remote("stop"))  # the publish will wait for it
    ray.get(crew.learner.train.remote(version))
    publishing = crew.sync.publish.remote(version)
    end = time.monotonic() + PATIENCE_S
    while not ray.get(crew.sync.health.remote()).doing.startswith("stage"):
        assert time.monotonic() < end
    ray.get(late.catch_up.remote(crew.sync), timeout=30)
    assert crew.version() == version - 1, "the publish was over before the late one came"
    assert_live(late, version - 1, tensors(TINY, version - 1))
    assert ray.get(publishing, timeout=60).version == version
    crew.enlist(**crew.replicas, late=late)
    later = crew.publish_until_all_are_back(late=late)
    assert_live(late, later, tensors(TINY, later))
    crew.enlist()


def test_several_faults_in_one_publish_each_have_their_name(crew: WeightCrew) -> None:
    """One receiver dies, one stages other bytes, and the sender halts for a while."""
    version = crew.publish_until_all_are_back() + 1
    ray.get(crew.replicas["rollout-0"].fail_at.remote("die"))
    ray.get(crew.replicas["rollout-1"].fail_at.remote("flip"))
    pid = crew.pid(crew.learner)
    ray.get(crew.learner.train.remote(version))
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
    report = ray.get(crew.sync.publish.remote(version), timeout=60)
    assert report.replicas == ("rollout-2",)
    assert "rollout-0 died" in report.quarantined["rollout-0"]
    assert set(report.quarantined) <= {"rollout-0", "rollout-1"}
    crew.assert_holds("rollout-2", version)
    crew.assert_whole("rollout-1", version - 1, version)
    back = crew.publish_until_all_are_back()
    for name in crew.replicas:
        crew.assert_holds(name, back)
