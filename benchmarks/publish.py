"""Publishing weights against a bare gloo broadcast of the same bytes, side by side.

    python -m benchmarks.publish [--quick] [--rounds N] [--json FILE]

Ours is the whole publish between real actors: pack, broadcast, SHA-256 on both sides, verify, swap
into a real engine that is sampling, commit. Bare is one broadcast of one flat tensor between as
many processes (torch.distributed, gloo, group formed beforehand), from the barrier before it to
the barrier after it. Rounds are interleaved; a figure is the median over the rounds. The loopback
interface carries both.
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors import safe_open

from areal_ray.engines.protocols import GenerationRequest, SamplingConfig
from areal_ray.runtime.param_sync_actor import ParamSyncActor, PublishReport
from areal_ray.runtime.rollout_actor import RolloutActor
from areal_ray.runtime.rollout_config import RolloutConfig
from areal_ray.runtime.weights_config import WeightsConfig
from benchmarks.common import table
from tests.support.tiny_models import write_tiny_model
from tests.support.weight_actors import LearnerStandIn, Shapes

SIZES: dict[str, dict[str, Any]] = {
    "demo": {},
    "64 MB": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4},
    "270 MB": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4},
}
"""Name and how the Qwen3 checkpoint differs from the small one of the tests."""


class BareMember:
    """One process of a plain torch.distributed group."""

    def __init__(self, rank: int, world_size: int, port: int, num_bytes: int) -> None:
        torch.set_num_threads(1)
        where = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group("gloo", where, rank=rank, world_size=world_size)
        self._buffer = torch.ones(num_bytes, dtype=torch.uint8)

    def broadcast(self) -> float:
        """Seconds from all ready to all done."""
        torch.distributed.barrier()
        started_s = time.perf_counter()
        torch.distributed.broadcast(self._buffer, 0)
        torch.distributed.barrier()
        return time.perf_counter() - started_s


class Duel:
    """Both sides of one size, up and warm."""

    def __init__(
        self, folder: Path, shapes: Shapes, replicas: int, weights: dict[str, Any]
    ) -> None:
        self._spawned: list[Any] = []
        self._sync = self._spawn(ParamSyncActor, WeightsConfig(**weights))
        self._learner = self._spawn(LearnerStandIn, shapes)
        config = RolloutConfig()
        self._rollouts = {
            f"rollout-{i}": self._spawn(
                RolloutActor, f"rollout-{i}", str(folder), config, version=0, sync=self._sync
            )
            for i in range(replicas)
        }
        ray.get(self._sync.set_members.remote(self._learner, self._rollouts))
        first = self.publish(1)
        self.num_bytes, self._version = first.bytes, 1
        port = _free_port()
        self._bare = [
            self._spawn(BareMember, rank, replicas + 1, port, self.num_bytes)
            for rank in range(replicas + 1)
        ]
        ray.get([member.broadcast.remote() for member in self._bare])

    def publish(self, version: int, busy: bool = False) -> PublishReport:
        """One publish while every engine samples."""
        if busy:
            ray.get([self._keep_busy(name, rollout) for name, rollout in self._rollouts.items()])
        ray.get(self._learner.train.remote(version))
        return ray.get(self._sync.publish.remote(version))

    def round(self) -> tuple[float, PublishReport]:
        """Seconds of the bare broadcast, then a publish."""
        bare_s = max(ray.get([member.broadcast.remote() for member in self._bare]))
        self._version += 1
        return bare_s, self.publish(self._version)

    def close(self) -> None:
        """End all actors."""
        for actor in self._spawned:
            ray.kill(actor)

    def _spawn(self, cls: type, *args: Any, **kwargs: Any) -> Any:
        actor = ray.remote(cls).options(num_cpus=0).remote(*args, **kwargs)
        self._spawned.append(actor)
        return actor

    def _keep_busy(self, name: str, rollout: Any) -> Any:
        ids = np.arange(3, 19, dtype=np.int32)
        sampling = SamplingConfig(max_new_tokens=64)
        stamp = time.monotonic_ns()
        requests = [
            GenerationRequest(f"{name}-{stamp}-{n}", ids, sampling, seed=n) for n in range(16)
        ]
        return rollout.submit.remote("benchmark", requests)


def compare(size: str, replicas: int, rounds: int) -> dict[str, Any]:
    """Medians of one size."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_tiny_model(folder, "qwen3", vocab_size=407, **SIZES[size])
        duel = Duel(folder, shapes_of(folder), replicas)
        try:
            pairs = [duel.round() for _ in range(rounds)]
        finally:
            duel.close()
    bare_s = statistics.median(bare for bare, _ in pairs)
    reports = [report for _, report in pairs]
    publish_s = statistics.median(report.seconds for report in reports)
    return {
        "size": size,
        "replicas": replicas,
        "bytes": duel.num_bytes,
        "bare_s": bare_s,
        "publish_s": publish_s,
        "stage_s": statistics.median(report.stage_s for report in reports),
        "engine_idle_s": statistics.median(report.engine_idle_s for report in reports),
        "ratio": publish_s / bare_s,
        "added_s": publish_s - bare_s,
    }


def shapes_of(folder: Path) -> Shapes:
    """Names and shapes in a checkpoint folder."""
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


COLUMNS = (
    ("weights", 10), ("replicas", 8), ("MB", 8), ("bare ms", 9), ("publish ms", 11),
    ("stage ms", 9), ("engine idle ms", 15), ("ratio", 7), ("added ms", 9),
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    return [
        row["size"],
        str(row["replicas"]),
        f"{row['bytes'] / 1e6:.1f}",
        f"{1e3 * row['bare_s']:.1f}",
        f"{1e3 * row['publish_s']:.1f}",
        f"{1e3 * row['stage_s']:.1f}",
        f"{1e3 * row['engine_idle_s']:.2f}",
        f"{row['ratio']:.2f}x",
        f"{1e3 * row['added_s']:.1f}",
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="two sizes, one replica, five rounds")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds, at least 5")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args(arguments)
    cases = [("demo", 1), ("64 MB", 1)]
    if not options.quick:
        cases += [("demo", 2), ("64 MB", 2), ("270 MB", 1)]
    ray.init(
        address="local",  # not whatever Ray happens to run on this machine
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=1024**3,
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    )
    try:
        rounds = 5 if options.quick else options.rounds
        rows = [compare(size, replicas, rounds) for size, replicas in cases]
    finally:
        ray.shutdown()
    print(table(COLUMNS, map(cells, rows)))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return rows


if __name__ == "__main__":
    main()
