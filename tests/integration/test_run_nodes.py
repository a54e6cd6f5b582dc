"""A run on two nodes: each has a rollout replica."""

import json
import os
import subprocess
import sys

from tests.support.whole_runs import ROOT, Runs, assert_books_balance, steps_of

_TWO_NODES = """
import json, sys, time, ray
from ray.cluster_utils import Cluster
from areal_ray import launch

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False,
                  "object_store_memory": 100_000_000})
cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
handle = launch(sys.argv[1], ["name=nodes", f"cluster.fileroot={sys.argv[2]}", "steps=4",
                "rollout.replicas=2", "rollout.num_cpus=1.2", "cluster.n_nodes=2"])
nodes = {}
while len(nodes) < 2 and handle._thread.is_alive():
    for name in ray.util.list_named_actors():
        if "/rollout-" in name and name not in nodes:
            actor = ray.get_actor(name)
            nodes[name] = ray.get(
                actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))
    time.sleep(0.1)
summary = handle.wait(200)
print(json.dumps({"nodes": sorted(nodes.values()), "outcome": summary.outcome}))
ray.shutdown()
cluster.shutdown()
"""


def test_two_replicas_on_two_nodes_feed_one_learner(runs: Runs) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TWO_NODES, "tests/support/digits.yaml", str(runs.folder)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
        env={
            **{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
            "PYTHONPATH": str(ROOT),
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["outcome"] == "finished"
    assert len(set(told["nodes"])) == 2
    assert steps_of(runs.folder / "nodes") == [1, 2, 3, 4]
    assert assert_books_balance(runs.folder / "nodes")["trained"] == 16
