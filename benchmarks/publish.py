"""Publishing weights against a bare gloo broadcast of the same bytes, side by side.

    python -m benchmarks.publish [--quick] [--rounds N] [--json FILE] [--link GBIT]

Ours is the whole publish between real actors: pack, send, digests on both sides, verify, swap into
a real engine, commit. Bare is one broadcast of one flat tensor between as many processes
(torch.distributed, gloo, group formed beforehand), from the barrier before it to the barrier after
it; the loopback interface carries it. A round is a bare broadcast, a publish while the engines have
nothing to do (which is what is compared) and one while each samples 16 turns (which is where its
standstill is measured). A figure is the median over the rounds.

The canary is part of it: the replicas look at their live tensors and, unless the way is without a
`probe`, compute the fixed prompt of a recipe that says nothing; what the learner takes of it at the
end of a step is no part of a publish. `staged` is the speed until every byte is verified, `speed`
with all of that, `way` without the canary.

Ways: `memory` = the default, replicas on the learner's node read its memory; `wire` = all bytes
over gloo, as to other nodes; `changes` = over gloo with `weights.full_every`, where 1 % of the
elements changed. `memory` and `wire` in float32, `changes` in bfloat16 (twice the elements).

Loopback between two processes takes the processor time of two machines out of one, and is what
`wire` is bound by. `--link 10` holds it to 10 Gbit/s, as between two nodes, in a network namespace
of its own (Linux, root, iproute2), and runs the ways over the wire alone.
"""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors import safe_open

from areal_ray.core.buckets import BucketPlan
from areal_ray.core.canary import Probe, Sent, probe_tokens
from areal_ray.engines.protocols import GenerationRequest, SamplingConfig
from areal_ray.runtime.canary_config import CanaryConfig
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from areal_ray.runtime.publish_report import PublishReport
from areal_ray.runtime.rollout_actor import RolloutActor
from areal_ray.runtime.rollout_config import RolloutConfig
from areal_ray.runtime.weights_config import WeightsConfig
from benchmarks.common import finish, machine_load, median, options, table
from tests.support.tiny_models import write_tiny_model
from tests.support.weight_actors import LearnerStandIn, Shapes

SIZES: dict[str, dict[str, Any]] = {
    "demo": {},
    "64 MB": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4},
    "256 MB": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5},
    "512 MB": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10},
}
"""Name and how the Qwen3 checkpoint differs from the small one of the tests."""

WAYS: dict[str, dict[str, Any]] = {
    "memory": {},
    "memory no probe": {"canary": {"probe_tokens": 0}},
    "wire": {"shares_memory": False},
    "wire no probe": {"shares_memory": False, "canary": {"probe_tokens": 0}},
    "wire bfloat16": {"shares_memory": False, "dtype": "bfloat16"},
    "changes": {"shares_memory": False, "dtype": "bfloat16", "full_every": 10_000},
}
"""Name and the keys of `weights`."""

QUICK = (("demo", 1, "memory"), ("64 MB", 1, "memory"))
ALL = (
    *(("demo", replicas, "memory") for replicas in (1, 2)),
    ("64 MB", 1, "memory"),
    *(("256 MB", replicas, "memory") for replicas in (1, 2, 4)),
    ("256 MB", 1, "memory no probe"),
    *(("256 MB", replicas, "wire") for replicas in (1, 2)),
    ("256 MB", 1, "wire no probe"),
    ("512 MB", 1, "memory"),
    ("512 MB", 1, "memory no probe"),
    ("512 MB", 1, "wire"),
    ("512 MB", 1, "wire bfloat16"),
    ("512 MB", 1, "changes"),
)
OVER_A_LINK = (
    *(("256 MB", replicas, "wire") for replicas in (1, 2)),
    ("512 MB", 1, "wire"),
    ("512 MB", 1, "wire bfloat16"),
    ("512 MB", 1, "changes"),
)
_CHANGED_SHARE = 0.01
_VOCABULARY = 407
_PREFILL_S = 0.3
"""After which every engine is sampling."""


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


class ProbingLearner(LearnerStandIn):
    """It has no forward pass: the engines compute the probe, and it is held to nothing."""

    async def weights_send(self, plan: BucketPlan, version: int) -> Sent:
        """As a learner whose weights diverged."""
        sent = await super().weights_send(plan, version)
        ids = probe_tokens(_VOCABULARY, CanaryConfig().probe_tokens)
        nothing = np.full(len(ids) - 1, np.nan, np.float32)
        return replace(sent, probe=Probe(ids, nothing, ("float32",)))


class Duel:
    """Both sides of one size, up and warm."""

    def __init__(self, folder: Path, replicas: int, way: str) -> None:
        self._spawned: list[Any] = []
        self._way = way
        self._sync = self._spawn(ParamSyncActor, WeightsConfig(**WAYS[way]))
        self._learner = self._spawn(ProbingLearner, shapes_of(folder), probes=False)
        config = RolloutConfig()
        self._rollouts = {
            f"rollout-{i}": self._spawn(
                RolloutActor, f"rollout-{i}", str(folder), config, version=0, sync=self._sync
            )
            for i in range(replicas)
        }
        ray.get(self._sync.set_members.remote(self._learner, self._rollouts))
        self._version = 0
        self.num_bytes = self.publish(is_sampling=False).bytes
        port = _free_port()
        self._bare = [
            self._spawn(BareMember, rank, replicas + 1, port, self.num_bytes)
            for rank in range(replicas + 1)
        ]
        self.round()

    def publish(self, *, is_sampling: bool) -> PublishReport:
        """One publish, while every engine samples or while none does."""
        self._version += 1
        if self._way == "changes":
            ray.get(self._learner.scatter.remote(_CHANGED_SHARE, self._version))
        else:
            ray.get(self._learner.train.remote(self._version))
        ids = [f"{self._version}-{n}" for n in range(16)]
        if is_sampling:
            ray.get([self._submit(rollout, ids) for rollout in self._rollouts.values()])
            time.sleep(_PREFILL_S)
        report = ray.get(self._sync.publish.remote(self._version))
        ray.get([rollout.abort.remote(ids) for rollout in self._rollouts.values()])
        return report

    def round(self) -> tuple[float, PublishReport, PublishReport]:
        """Seconds of the bare broadcast, a publish at rest, and one while sampling."""
        bare_s = max(ray.get([member.broadcast.remote() for member in self._bare]))
        return bare_s, self.publish(is_sampling=False), self.publish(is_sampling=True)

    def close(self) -> None:
        """End all actors."""
        for actor in self._spawned:
            ray.kill(actor)

    def _spawn(self, cls: type, *args: Any, **kwargs: Any) -> Any:
        actor = ray.remote(cls).options(num_cpus=0).remote(*args, **kwargs)
        self._spawned.append(actor)
        return actor

    def _submit(self, rollout: Any, ids: Sequence[str]) -> Any:
        prompt = np.arange(3, 19, dtype=np.int32)
        sampling = SamplingConfig(max_new_tokens=512)
        requests = [
            GenerationRequest(request_id, prompt, sampling, seed=seed)
            for seed, request_id in enumerate(ids)
        ]
        return rollout.submit.remote("benchmark", requests)


def compare(size: str, replicas: int, way: str, rounds: int) -> dict[str, Any]:
    """Medians of one case."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_tiny_model(folder, "qwen3", vocab_size=_VOCABULARY, **SIZES[size])
        duel = Duel(folder, replicas, way)
        try:
            seen = [duel.round() for _ in range(rounds)]
        finally:
            duel.close()
    bare_s = median(bare for bare, _, _ in seen)
    at_rest, sampling = [one for _, one, _ in seen], [one for _, _, one in seen]
    publish_s = median(report.seconds for report in at_rest)
    return {
        "size": size,
        "replicas": replicas,
        "way": way,
        "bytes": duel.num_bytes,
        "bare_s": bare_s,
        "publish_s": publish_s,
        "stage_s": median(report.stage_s for report in at_rest),
        "canary_s": median(canary_s(report) for report in at_rest),
        "speed_staged": median(bare / one.stage_s for bare, one, _ in seen),
        "speed_of_bare": median(bare / one.seconds for bare, one, _ in seen),
        "speed_of_way": median(bare / (one.seconds - canary_s(one)) for bare, one, _ in seen),
        "sampling_publish_s": median(report.seconds for report in sampling),
        "engine_idle_s": median(report.engine_idle_s for report in sampling),
        "idle_share": median(report.engine_idle_s / report.seconds for report in sampling),
        "rounds": [(bare, one.seconds, other.seconds) for bare, one, other in seen],
    }


def canary_s(report: PublishReport) -> float:
    """Seconds that the slowest replica took to prove what is live."""
    return max(each.proof.seconds for each in report.swapped.values())


def shapes_of(folder: Path) -> Shapes:
    """Names and shapes in a checkpoint folder."""
    shapes: Shapes = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


COLUMNS = (
    ("weights", 8), ("replicas", 8), ("way", 15), ("MB", 6), ("bare ms", 8), ("publish ms", 10),
    ("staging", 8), ("canary ms", 9), ("staged", 7), ("speed", 7), ("way", 7), ("sampling ms", 11),
    ("still ms", 8), ("share", 6),
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    return [
        row["size"],
        str(row["replicas"]),
        row["way"],
        f"{row['bytes'] / 1e6:.1f}",
        f"{1e3 * row['bare_s']:.1f}",
        f"{1e3 * row['publish_s']:.1f}",
        f"{1e3 * row['stage_s']:.1f}",
        f"{1e3 * row['canary_s']:.1f}",
        f"{row['speed_staged']:.2f}x",
        f"{row['speed_of_bare']:.2f}x",
        f"{row['speed_of_way']:.2f}x",
        f"{1e3 * row['sampling_publish_s']:.1f}",
        f"{1e3 * row['engine_idle_s']:.2f}",
        f"{row['idle_share']:.1%}",
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _behind_a_link(gbit: float, arguments: Sequence[str] | None) -> int:
    """Run again where loopback is as slow as a network; the exit code."""
    link = f"ip link set lo up && tc qdisc add dev lo root tbf rate {gbit:g}gbit"
    again = [sys.executable, "-m", "benchmarks.publish", "--inside", *(arguments or sys.argv[1:])]
    shell = f'{link} burst 4mb latency 50ms && exec "$@"'
    return subprocess.run(["unshare", "--net", "sh", "-c", shell, "sh", *again]).returncode


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print the table, write JSON if asked."""
    link = {"type": float, "metavar": "GBIT", "help": "hold loopback to so many Gbit/s"}
    inside = {"action": "store_true", "help": argparse.SUPPRESS}
    parsed = options(__doc__, arguments, link=link, inside=inside)
    if parsed.link and not parsed.inside:
        sys.exit(_behind_a_link(parsed.link, arguments))
    cases, rounds = (QUICK, 5) if parsed.quick else (ALL, parsed.rounds or 9)
    if parsed.link:
        cases = OVER_A_LINK
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
        rows = []
        for case in cases:
            rows.append(compare(*case, rounds))
            print("  ".join(cells(rows[-1])), f" {machine_load()}", flush=True)
    finally:
        ray.shutdown()
    finish(table(COLUMNS, map(cells, rows)), rows, parsed.json)
    return rows


if __name__ == "__main__":
    main()
