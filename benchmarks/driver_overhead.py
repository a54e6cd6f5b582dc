"""What the actor graph costs beside sampling and training, per trajectory.

    python -m benchmarks.driver_overhead [--quick] [--rounds N] [--json FILE]

Scripted two-turn episodes, one sampled token a turn, go through the real actor graph: driver,
agent, rollout with its engine, reward with its scoring process, learner, publishes. Every process
of the Ray session is counted by the kernel's own clock between two steps of the run: raylet, GCS,
Ray's agents, driver, agent, reward and its child, param-sync, rollout, learner. Of rollout and
learner the one thread that computes is told apart by its name in the table; everything else there
(RPC, asyncio, weights' transfer) is counted as overhead. All rewards are equal, so that the learner
has nothing to compute; its publish after each step is real.
"""

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from areal_ray.telemetry.views import StepView
from benchmarks.common import finish, median, options, ray_session, run, spread

GROUPS_PER_STEP, N_SAMPLES, SKIP = 32, 8, 8
ENGINES = ("rollout", "learner")
PROMISED_MS = {"driver": 0.5, "all Ray processes": 1.5}


@dataclass(frozen=True)
class Reading:
    """CPU seconds so far, by process and by thread."""

    processes: dict[str, float]
    """Seconds by role."""
    engine_threads: dict[str, dict[int, float]]
    """Seconds of each thread of the actors that hold an engine."""
    socket_bytes: float
    """Sent and received by the driver's TCP sockets, Ray's own messages included."""


def read() -> Reading:
    """What every process of this session has used until now."""
    seconds: Counter[str] = Counter()
    threads: dict[str, dict[int, float]] = {}
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            role = "driver" if process == me else role_of(process)
            times = process.cpu_times()
            seconds[role] += times.user + times.system
            if role in ENGINES:
                threads[role] = {t.id: t.user_time + t.system_time for t in process.threads()}
        except psutil.NoSuchProcess:
            continue
    return Reading(dict(seconds), threads, socket_bytes(me.pid))


def socket_bytes(pid: int) -> float:
    """Bytes that a process's open TCP connections have carried; 0 where `ss` is not installed."""
    if shutil.which("ss") is None:
        return 0.0
    command = ["ss", "-tniHp", "state", "established"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = iter(told.splitlines())
    total = 0.0
    for line in lines:
        if f"pid={pid}," in line:
            counts = re.findall(r"bytes_(?:sent|received):(\d+)", next(lines, ""))
            total += sum(map(int, counts))
    return total


def role_of(process: psutil.Process) -> str:
    """The role of a process of a Ray session, by its command line."""
    line = " ".join(process.cmdline())
    for word, role in _WORDS.items():
        if word in line:
            return role
    return "other"


_WORDS = {
    "AgentActor": "agent",
    "RewardActor": "reward",
    "areal_ray.rewards.worker": "reward's child",
    "ParamSyncActor": "param-sync",
    "RolloutActor": "rollout",
    "LearnerActor": "learner",
    "ray::IDLE": "idle workers",
    "gcs_server": "gcs",
    "raylet/raylet": "raylet",
    "DashboardAgent": "Ray's agents",
    "dashboard/agent.py": "Ray's agents",
    "runtime_env/agent": "Ray's agents",
    "ray/_private": "Ray's agents",
}


@dataclass(frozen=True)
class Cost:
    """One run's cost."""

    trajectories: int
    wall_s: float
    seconds: dict[str, float]
    """CPU seconds by role; engine threads apart."""
    driver_bytes: float
    """Per trajectory, as the run counts them: summaries, and payloads that Ray carries inline."""
    socket_bytes: float
    """Per trajectory, as the kernel counts them on the driver's TCP connections."""

    def per_trajectory_ms(self, *roles: str) -> float:
        """CPU milliseconds of these roles."""
        return 1e3 * sum(self.seconds.get(role, 0.0) for role in roles) / self.trajectories

    @property
    def counted(self) -> tuple[str, ...]:
        """All roles but the engines' own threads."""
        return tuple(role for role in self.seconds if not role.endswith("engine thread"))

    def figures(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "trajectories": self.trajectories,
            "wall_s": self.wall_s,
            "ms": {role: self.per_trajectory_ms(role) for role in sorted(self.seconds)},
            "driver_ms": self.per_trajectory_ms("driver"),
            "all_ms": self.per_trajectory_ms(*self.counted),
            "driver_bytes": self.driver_bytes,
            "socket_bytes": self.socket_bytes,
        }


def measure(num_trajectories: int) -> Cost:
    """One run of so many counted trajectories."""
    steps = SKIP + -(-num_trajectories // (GROUPS_PER_STEP * N_SAMPLES))
    readings: dict[int, Reading] = {}

    def on_step(view: StepView) -> None:
        if view.step in (SKIP, steps):
            readings[view.step] = read()

    with tempfile.TemporaryDirectory() as scratch:
        done = run("recipes/calculator/grpo.yaml", _overrides(Path(scratch), steps), on_step)
    window = done.between(SKIP)
    trajectories = int(window.total("agent/episodes"))
    return Cost(
        trajectories=trajectories,
        wall_s=window.seconds,
        seconds=_difference(readings[SKIP], readings[steps]),
        driver_bytes=window.total("driver/bytes") / trajectories,
        socket_bytes=(readings[steps].socket_bytes - readings[SKIP].socket_bytes) / trajectories,
    )


def _overrides(scratch: Path, steps: int) -> list[str]:
    return [
        f"cluster.fileroot={scratch}",
        "name=overhead",
        f"model.path={scratch}/model",
        "model.create=recipes.calculator.model:create",
        "agent.run=benchmarks.scripted_agent:two_turns",
        "evaluation=null",
        f"steps={steps}",
        f"admission.groups_per_step={GROUPS_PER_STEP}",
        f"admission.n_samples={N_SAMPLES}",
        "tasks.args={num_tasks: 2048}",
    ]


def _difference(before: Reading, after: Reading) -> dict[str, float]:
    seconds = {
        role: used - before.processes.get(role, 0.0) for role, used in after.processes.items()
    }
    for role, threads in after.engine_threads.items():
        known = before.engine_threads.get(role, {})
        # The thread that computes is the busiest one: of the others none works for long.
        busiest = max(used - known.get(thread, 0.0) for thread, used in threads.items())
        seconds[f"{role}'s engine thread"] = busiest
        seconds[role] -= busiest
    return seconds


def table(costs: Sequence[Cost]) -> str:
    """Medians over the runs."""
    roles = sorted(costs[0].seconds, key=lambda role: -costs[0].seconds[role])
    lines = [f"{costs[0].trajectories:,} trajectories, {len(costs)} runs; CPU ms per trajectory"]
    for role in roles:
        values = [cost.per_trajectory_ms(role) for cost in costs]
        lines.append(f"  {role:24} {spread(values, 3)}")
    driver = [cost.per_trajectory_ms("driver") for cost in costs]
    everything = [cost.per_trajectory_ms(*cost.counted) for cost in costs]
    rate = [cost.trajectories / cost.wall_s for cost in costs]
    sizes = [cost.driver_bytes for cost in costs]
    for name, values in (("driver", driver), ("all Ray processes", everything)):
        verdict = "met" if median(values) < PROMISED_MS[name] else "NOT met"
        lines.append(f"{name:26} {spread(values)} ms; promised < {PROMISED_MS[name]}: {verdict}")
    verdict = "met" if median(sizes) < 1024 else "NOT met"
    lines.append(f"{'bytes through the driver':26} {spread(sizes, 0)}; promised < 1024: {verdict}")
    sockets = [cost.socket_bytes for cost in costs]
    lines.append(
        f"{'... on its TCP sockets':26} {spread(sockets, 0)} (Ray's own messages included)"
    )
    lines.append(f"{'trajectories per second':26} {spread(rate, 0)}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run, print the table, write JSON if asked."""
    chosen = options(__doc__, arguments)
    rounds = chosen.rounds or (1 if chosen.quick else 5)
    count = 2_000 if chosen.quick else 10_000
    with ray_session():
        costs = [measure(count) for _ in range(rounds)]
    figures = [cost.figures() for cost in costs]
    finish(table(costs), figures, chosen.json)
    return figures


if __name__ == "__main__":
    main()
