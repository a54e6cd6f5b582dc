"""What the ParamSyncActor tells: of a publish, of the committed version, of itself."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_ray.core.buckets import BucketPlan
from areal_ray.core.canary import Check, Swapped


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What one publish did."""

    version: int
    seconds: float
    stage_s: float
    """Until every byte was verified; engines sample meanwhile."""
    swap_s: float
    """From there until every replica swapped and proved it."""
    bytes: int
    """Of one copy of the weights as they travel."""
    swapped: Mapping[str, Swapped] = field(default_factory=dict)
    """The accounts of those that swapped, by name; also of those that then differed."""
    quarantined: dict[str, str] = field(default_factory=dict)
    """Replicas set aside: name -> reason. They sample from an older version or not at all."""
    events: tuple[str, ...] = ()
    """Who was set aside and who came back since the report before, a line each."""

    def metrics(self) -> Iterator[tuple[str, float]]:
        """Name and value of each metric, some more than once: to be reduced as the name says."""
        yield "publish/count_publishes", 1
        yield "publish/failed_publishes", len(self.quarantined)
        yield "publish/differing_replicas", len(self.differing)
        yield "publish/wall_s", self.seconds
        yield "publish/stage_s", self.stage_s
        yield "publish/swap_s", self.swap_s
        yield "publish/engine_idle_s", self.engine_idle_s
        yield "publish/bytes", self.bytes
        if self.stage_s > 0:
            yield "publish/bytes_per_s", self.bytes / self.stage_s
        for swapped in self.swapped.values():
            proof = swapped.proof
            yield "publish/canary_s", proof.seconds
            if proof.mean_nats is not None and proof.largest_nats is not None:
                yield "publish/probe_mean_nats", proof.mean_nats
                yield "publish/probe_max_nats", proof.largest_nats

    @property
    def engine_idle_s(self) -> float:
        """Longest standstill of an engine."""
        return max((each.idle_s for each in self.swapped.values()), default=0.0)

    @property
    def replicas(self) -> tuple[str, ...]:
        """That sample from this version now."""
        return tuple(n for n, each in self.swapped.items() if not each.proof.difference)

    @property
    def differing(self) -> tuple[str, ...]:
        """That swapped and do not sample from the learner's weights."""
        return tuple(n for n, each in self.swapped.items() if each.proof.difference)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a late or restarted replica catches up with."""

    version: int
    plan: BucketPlan | None = None
    """None where nothing was published: the model on disk is this version."""
    snapshot: tuple[Any, ...] = ()
    """The one ObjectRef of the sealed bytes, nested so that Ray passes it on unread, or the one
    WeightFile; or empty."""
    check: Check = field(default_factory=Check)
    """What whoever swaps it in has to prove."""


@dataclass(frozen=True, slots=True)
class ParamSyncHealth:
    """ParamSyncActor's own account of itself."""

    version: int
    replicas: tuple[str, ...]
    quarantined: dict[str, str]
    doing: str
    """idle, or the phase under way and since how many seconds."""


class Phase:
    """What is being done, and since when."""

    def __init__(self) -> None:
        self._name, self._since_s = "idle", 0.0

    def enter(self, name: str) -> None:
        """This, from now on."""
        self._name, self._since_s = name, time.monotonic()

    def told(self) -> str:
        """In a few words."""
        if self._name == "idle":
            return self._name
        return f"{self._name} for {time.monotonic() - self._since_s:.1f} s"
