"""Who takes part in one collective group of weights, and how a member learns that it broke.

Free of torch, so that ParamSyncActor and the driver stay light.
"""

from dataclasses import dataclass, replace
from typing import Literal

from areal_ray.errors import PublishError
from areal_ray.runtime.weights_config import WeightsConfig


class GroupBroken(PublishError):
    """A collective group failed through no fault of the member that reports it."""


class NoReplicaLeft(PublishError):
    """Every replica is down or set aside just now; a publish may succeed once one is back."""


def refusal(version: int, reason: str) -> str:
    """Why a version was not committed, and which one is in force."""
    return f"version {version}: {reason}. The committed version stays {version - 1}"


@dataclass(frozen=True, slots=True)
class Membership:
    """One collective group: a fresh name for every set of members, rank 0 is the learner."""

    group_name: str
    members: tuple[str, ...]
    """Display name by rank, to say who is absent."""
    backend: Literal["gloo", "nccl"]
    timeout_s: float
    """Bound of every wait inside the group."""
    shares_memory: bool = True
    """Members on the learner's node read its memory; the bytes do not take the wire to them."""
    full_every: int = 1
    """Over the wire every so many versions travel whole, the others as what has changed."""
    address: str = ""
    """host:port of the learner's rendezvous store; empty asks rank 0 to open it and answer."""

    @classmethod
    def of(cls, group_name: str, members: tuple[str, ...], config: WeightsConfig) -> "Membership":
        """Of the members that a recipe's settings let publish to each other."""
        return cls(
            group_name,
            members,
            "nccl" if config.backend == "nccl" else "gloo",  # auto without a word of GPUs
            config.timeout_s,
            config.shares_memory,
            config.full_every,
        )

    def at(self, address: str) -> "Membership":
        """The same group with its meeting point known."""
        return replace(self, address=address)
