"""Placement groups and connections on a real Ray."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from areal_ray.engines.train_config import LearnerConfig
from areal_ray.errors import PlacementError
from areal_ray.runtime.cluster import cluster_nodes, connect
from areal_ray.runtime.fleet import spawn
from areal_ray.runtime.placement import plan_layout, reserve
from areal_ray.runtime.rollout_config import RolloutConfig
from areal_ray.runtime.run_config import ClusterConfig, DeadlinesConfig, SchedulerConfig

ROOT = Path(__file__).resolve().parents[2]


class Where:
    """Tells where it sits."""

    def niceness(self) -> int:
        return os.nice(0)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def wait_for_cpus(cpus: float) -> None:
    end = time.monotonic() + 20
    while abs(free_cpus() - cpus) > 1e-3:
        assert time.monotonic() < end, f"{free_cpus()} CPUs are free, not {cpus}"
        time.sleep(0.1)


def test_every_actor_gets_the_seat_that_was_reserved_for_it(ray_session):
    before = free_cpus()
    layout = plan_layout(rollout=RolloutConfig(replicas=2), learner=LearnerConfig(ranks=2))
    reservation = reserve(layout, cluster_nodes(), deadline_s=60)
    try:
        seats = reservation.seats("rollout") | reservation.seats("learner")
        assert list(seats) == ["rollout-0", "rollout-1", "learner-0", "learner-1"]
        assert len({(seat.group.id, seat.bundle) for seat in seats.values()}) == 4
        actors = [spawn(Where, {}, name=f"place/{n}", seat=seat) for n, seat in seats.items()]
        assert len(ray.get([actor.node.remote() for actor in actors], timeout=60)) == 4
    finally:
        reservation.release()
    wait_for_cpus(before)


def test_what_cannot_be_placed_ends_in_time_with_demand_against_supply(ray_session):
    before = free_cpus()
    layout = plan_layout(rollout=RolloutConfig(replicas=2, num_cpus=500.0))
    started = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        reserve(layout, cluster_nodes(), deadline_s=1.0)
    assert time.monotonic() - started < 20
    told = str(caught.value)
    assert "rollout-0, rollout-1 not placed after 1 s" in told
    assert "needs 1000 CPUs" in told
    assert "rollout.replicas" in told
    wait_for_cpus(before)  # a pending group would block the next run
    small = reserve(plan_layout(rollout=RolloutConfig()), cluster_nodes(), deadline_s=60)
    small.release()


def test_a_caller_that_is_connected_stays_connected(ray_session):
    connection = connect(ClusterConfig(), SchedulerConfig(), DeadlinesConfig())
    connection.close()
    assert ray.is_initialized()
    assert connection.nodes


def test_nodes_that_do_not_come_are_told_after_the_deadline(ray_session):
    with pytest.raises(PlacementError, match=r"cluster.n_nodes: is 3; 1 came within"):
        connect(ClusterConfig(n_nodes=3), SchedulerConfig(), DeadlinesConfig(nodes_s=0.5))


def in_child(code: str, **environment: str) -> dict[str, object]:
    """What a process of its own prints as JSON: a session cannot connect twice."""
    clean = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=ROOT,
        env={**clean, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


CONNECT = """
import json, os, ray
from areal_ray.runtime.cluster import connect
from areal_ray.runtime.run_config import ClusterConfig, DeadlinesConfig, SchedulerConfig
"""


def test_a_ray_of_its_own_is_started_with_workers_that_are_not_starved_and_ends_with_the_run():
    told = in_child(
        CONNECT
        + """
connection = connect(ClusterConfig(num_cpus=1), SchedulerConfig(), DeadlinesConfig())
niceness = ray.get(ray.remote(lambda: os.nice(0)).options(num_cpus=0.1).remote())
session = ray._private.worker.global_worker.node.get_session_dir_path()
pids = [p.process.pid for ps in ray._private.worker.global_worker.node.all_processes.values()
        for p in ps]
connection.close()
print(json.dumps({"niceness": niceness, "here": connection.is_started_here, "pids": pids,
                  "cpus": connection.nodes[0].num_cpus, "up": ray.is_initialized()}))
"""
    )
    assert told["niceness"] == os.nice(0)
    assert (told["here"], told["cpus"], told["up"]) == (True, 1.0, False)
    pids = told["pids"]
    assert isinstance(pids, list)
    assert pids
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, f"still there: {pids}"
        time.sleep(0.2)


def test_a_job_joins_the_cluster_that_its_environment_names(ray_session):
    address = ray.get_runtime_context().gcs_address
    told = in_child(
        CONNECT
        + """
connection = connect(ClusterConfig(), SchedulerConfig(), DeadlinesConfig())
print(json.dumps({"nodes": [n.name for n in connection.nodes],
                  "here": connection.is_started_here}))
connection.close()
""",
        RAY_ADDRESS=address,
    )
    assert told == {"nodes": [node.name for node in cluster_nodes()], "here": False}


@pytest.mark.parametrize("address", ["127.0.0.1:9", "http://127.0.0.1:8265", "ray://h:10001"])
def test_an_address_without_a_cluster_is_told_at_once(address):
    told = in_child(
        CONNECT
        + """
try:
    connect(ClusterConfig(), SchedulerConfig(), DeadlinesConfig())
except Exception as error:
    print(json.dumps({"kind": type(error).__name__, "text": str(error)}))
""",
        RAY_ADDRESS=address,
    )
    assert told["kind"] == "PlacementError"
    assert str(told["text"]).startswith("cluster.address: ")


def test_a_replica_goes_to_the_node_that_has_room_for_it():
    told = in_child(
        CONNECT
        + """
from ray.cluster_utils import Cluster
from areal_ray.runtime.fleet import spawn
from areal_ray.runtime.placement import assign, plan_layout, reserve
from areal_ray.runtime.rollout_config import RolloutConfig
from tests.integration.test_placement_on_ray import Where

small = {"num_cpus": 1, "object_store_memory": 80 * 1024**2, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=small)
cluster.add_node(**{k: v for k, v in small.items() if k != "include_dashboard"})
config = ClusterConfig(n_nodes=2, address=cluster.address)
connection = connect(config, SchedulerConfig(type="ray"), DeadlinesConfig(nodes_s=60))
layout = plan_layout(rollout=RolloutConfig(replicas=2, num_cpus=0.8))
placed = assign(layout, connection.nodes, config)
seats = reserve(layout, connection.nodes, deadline_s=60).seats("rollout")
actors = [spawn(Where, {}, name=n, seat=s) for n, s in seats.items()]
nodes = ray.get([a.node.remote() for a in actors])
print(json.dumps({"planned": len(set(placed.values())), "real": len(set(nodes))}))
connection.close()
cluster.shutdown()
"""
    )
    assert told == {"planned": 2, "real": 2}
