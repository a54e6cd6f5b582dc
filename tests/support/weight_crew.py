"""One learner, some replicas and a ParamSyncActor, as real Ray actors, ended together."""

import os
import signal
import time
from contextlib import suppress
from typing import Any

import ray
import torch
from ray.exceptions import ActorUnavailableError

from areal_ray.runtime.membership import NoReplicaLeft
from areal_ray.runtime.param_sync_actor import ParamSyncActor
from areal_ray.runtime.publish_report import PublishReport
from areal_ray.runtime.weights_config import WeightsConfig
from tests.support.weight_actors import TINY, LearnerStandIn, ReplicaStandIn, Shapes, tensors

PATIENCE_S = 150.0
"""For an actor to start or restart on a machine with more to do."""


class WeightCrew:
    """Spawned on entry; killed on exit, stopped processes included."""

    def __init__(
        self, replicas: int, *, shapes: Shapes = TINY, timeout_s: float = 20.0, **weights: Any
    ) -> None:
        """`weights` are further keys of WeightsConfig."""
        self.shapes = shapes
        self.config = WeightsConfig(timeout_s=timeout_s, **weights)
        self._names = [f"rollout-{index}" for index in range(replicas)]
        self._spawned: list[Any] = []
        self._stopped_pids: list[int] = []

    def __enter__(self) -> "WeightCrew":
        self.sync = self.spawn(ParamSyncActor, self.config)
        self.learner = self.spawn(LearnerStandIn, self.shapes)
        self.replicas = {name: self.replica() for name in self._names}
        self.enlist()
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._stopped_pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for actor in self._spawned:
            ray.kill(actor)

    def spawn(self, cls: type, *args: Any, restarts: int = 0, **fields: Any) -> Any:
        """A further actor that ends with the crew."""
        options = {"num_cpus": 0, "max_restarts": restarts}
        actor = ray.remote(cls).options(**options).remote(*args, **fields)
        self._spawned.append(actor)
        return actor

    def replica(self) -> Any:
        """A further replica, which catches up as it starts; not yet a member."""
        return self.spawn(ReplicaStandIn, self.shapes, self.sync, restarts=-1)

    def enlist(self, **replicas: Any) -> None:
        """Make these, or all of the crew's, the members, once they have started."""
        members = replicas or self.replicas
        for member in (self.learner, *members.values()):
            self.pid(member)  # the deadline of a publish is not meant for that
        ray.get(self.sync.set_members.remote(self.learner, members), timeout=60)

    def publish(self, version: int) -> PublishReport:
        """Train to weights that tell the version, and publish them as such."""
        ray.get(self.learner.train.remote(version), timeout=60)
        return ray.get(self.sync.publish.remote(version), timeout=60)

    def version(self) -> int:
        """The committed one."""
        return ray.get(self.sync.version.remote(), timeout=20)

    def assert_holds(self, name: str, version: int, weights_of: int | None = None) -> None:
        """The replica is at the version with just the weights trained for it (or for another)."""
        expected = tensors(self.shapes, version if weights_of is None else weights_of)
        assert_live(self.replicas[name], version, expected)

    def assert_whole(self, name: str, *versions: int) -> None:
        """The replica is at one of the versions, with just the weights trained for that."""
        held = answer(self.replicas[name].live)[0]
        assert held in versions
        self.assert_holds(name, held)

    def pid(self, actor: Any) -> int:
        """Of a crew member's process."""
        return answer(actor.pid)

    def stop(self, actor: Any) -> None:
        """Halt a member's process, as a machine that swaps or a debugger would."""
        pid = self.pid(actor)
        self._stopped_pids.append(pid)
        os.kill(pid, signal.SIGSTOP)

    def publish_until_all_are_back(self, **others: Any) -> int:
        """Publish until every replica takes part again; the version they then have."""
        names = (*self.replicas, *others)
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            version = self.version() + 1
            with suppress(NoReplicaLeft):
                if self.publish(version).replicas == names:
                    return version
            time.sleep(0.3)
        raise AssertionError(f"no publish reached all of {names}")


def answer(method: Any) -> Any:
    """What an actor answers, once it does: a restarting one refuses for some seconds."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ray.get(method.remote(), timeout=PATIENCE_S)
        except ActorUnavailableError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def assert_live(replica: Any, version: int, expected: dict[str, torch.Tensor]) -> None:
    """A replica is at the version, with these weights bit for bit."""
    held, live = answer(replica.live)
    assert held == version
    assert live.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(live[name], expected[name])]
    assert not wrong, f"differ at version {version}: {wrong}"
