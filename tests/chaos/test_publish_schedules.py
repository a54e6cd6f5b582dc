"""Faults at random moments of publishes, with real engines: no token of half a version gets out."""

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray

from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.runtime.membership import NoReplicaLeft
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from areal_ray.runtime.rollout_config import RolloutConfig
from areal_ray.runtime.weights_config import WeightsConfig
from tests.support.fragile_rollout import FIRST, Asker, ForcingLearner, FragileRollout
from tests.support.tiny_models import write_tiny_model
from tests.support.weight_crew import PATIENCE_S, answer

pytestmark = pytest.mark.usefixtures("ray_session")

SEED = int(os.environ.get("CHAOS_SEED", "7"))
ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "2"))
TIMEOUT_S = 4.0
ENGINE = TorchGenerationConfig(max_context_tokens=256)
IN_SWAP = ("break", "die", "alter")
NAMES = ("rollout-0", "rollout-1", "rollout-2")


class Crew:
    """A learner, three replicas under load, and what publishes to them."""

    def __init__(self, folder: Path) -> None:
        model = str(write_tiny_model(folder, tie_word_embeddings=False))
        shapes = dict(TorchGenerationEngine(model, ENGINE).weight_shapes())
        self._spawned: list[Any] = []
        self.sync = self._spawn(ParamSyncActor, WeightsConfig(timeout_s=TIMEOUT_S), name="sync")
        self.learner = self._spawn(ForcingLearner, shapes)
        self.replicas = {
            name: self._spawn(
                FragileRollout, name, model, RolloutConfig(engine=ENGINE),
                version=0, sync="sync", restarts=-1,
            )
            for name in NAMES
        }  # fmt: skip
        for member in (self.learner, *self.replicas.values()):
            answer(member.pid)
        ray.get(self.sync.set_members.remote(self.learner, self.replicas), timeout=PATIENCE_S)
        self.asker = self._spawn(Asker, self.replicas)

    def _spawn(self, cls: type, *args: Any, restarts: int = 0, name: str = "", **how: Any) -> Any:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": restarts}
        if name:
            options["name"] = name
        self._spawned.append(ray.remote(cls).options(**options).remote(*args, **how))
        return self._spawned[-1]

    def close(self) -> None:
        for actor in self._spawned:
            ray.kill(actor)

    def publish(self, version: int) -> Any:
        """As a run does it: again while no replica is left."""
        ray.get(self.learner.train.remote(version), timeout=PATIENCE_S)
        end = time.monotonic() + 2 * PATIENCE_S
        while True:
            with suppress(NoReplicaLeft):
                return ray.get(self.sync.publish.remote(version), timeout=PATIENCE_S)
            assert ray.get(self.sync.version.remote()) == version - 1
            assert time.monotonic() < end, "no replica comes back"
            time.sleep(0.5)


def disturb(crew: Crew, dice: random.Random) -> list[threading.Timer]:
    """Prepare faults of one publish; those at a moment of its own are timers, not yet started."""
    timers = []
    for name in NAMES:
        kind = dice.choice(("none", "none", "kill", *IN_SWAP))
        if kind in IN_SWAP:
            ray.get(crew.replicas[name].fail_at_swap.remote(kind), timeout=PATIENCE_S)
        elif kind == "kill":
            pid = answer(crew.replicas[name].pid)
            timers.append(threading.Timer(dice.uniform(0.0, 0.08), _signal, (pid, signal.SIGKILL)))
    if dice.random() < 0.4:
        pid = answer(crew.learner.pid)
        at_s = dice.uniform(0.0, 0.05)
        timers.append(threading.Timer(at_s, _signal, (pid, signal.SIGSTOP)))
        timers.append(threading.Timer(at_s + 0.5, _signal, (pid, signal.SIGCONT)))
    return timers


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # another fault was first
        os.kill(pid, number)


def until_all_serve(crew: Crew, version: int) -> int:
    """Publish on until every replica takes part; the version they have."""
    end = time.monotonic() + 2 * PATIENCE_S
    while crew.publish(version).replicas != NAMES:
        assert time.monotonic() < end, "a replica did not come back"
        version += 1
        time.sleep(0.5)
    return version


@pytest.mark.extended
def test_no_token_of_half_a_version_leaves_a_replica_whatever_fails_when(tmp_path: Path) -> None:
    crew, dice = Crew(tmp_path), random.Random(SEED)
    try:
        version = until_all_serve(crew, 1)
        asking = crew.asker.ask.remote(9)
        committed = [version]
        for _ in range(ROUNDS):
            version = until_all_serve(crew, version + 1) + 1
            timers = disturb(crew, dice)
            for timer in timers:
                timer.start()
            report = crew.publish(version)
            for timer in timers:
                timer.join()
            assert report.version == version == ray.get(crew.sync.version.remote())
            committed.append(version)
        last = until_all_serve(crew, version + 1)
        ray.get(crew.asker.stop.remote())
        ray.get(asking, timeout=2 * PATIENCE_S)
        seen, failures = ray.get(crew.asker.heard.remote())
        wrong = {(token, version) for token, version in seen if token != FIRST + version}
        assert not wrong, f"seed {SEED}: (token, version): {sorted(wrong)[:5]}"
        assert not failures, f"seed {SEED}: {failures[:3]}"
        versions = {version for _, version in seen}
        assert max(versions) <= last
        assert versions & set(committed[1:]), "no turn met a publish"
    finally:
        crew.close()
