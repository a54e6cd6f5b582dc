"""WeightReceiver: what a RolloutActor holds to take weights in beside the live ones.

The verbs of a publish, seen from a replica: join a group per membership, stage each version, then
either take what was staged (to swap it in) or discard it. A late joiner stages a payload of the
object store instead. Staging memory is one copy of the model.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.buckets import BucketPlan, digest, verify
from areal_ray.errors import PublishError
from areal_ray.runtime import collective
from areal_ray.runtime.membership import GroupBroken, Membership

if TYPE_CHECKING:
    from torch import Tensor


class WeightReceiver:
    """Receives versions into staging memory; never touches the live weights."""

    def __init__(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """What to expect: name and shape of each tensor."""
        self._expected = {name: tuple(shape) for name, shape in expected.items()}
        self._group: collective.BytesGroup | None = None
        self._buffer: Tensor | None = None
        self._staged: tuple[int, BucketPlan, Tensor] | None = None
        self._accepted_plan = ""

    @property
    def staged_version(self) -> int | None:
        """The version in staging memory, if one is whole there."""
        return None if self._staged is None else self._staged[0]

    def join(self, membership: Membership, rank: int) -> str:
        """Leave any group and meet the members of this one; the address of its store.

        Raises:
            GroupBroken: Members are absent at the deadline; names them.
        """
        self.leave()
        # A stage() of the old group may still be writing into the old buffer.
        self._buffer = None
        self._group = collective.join_group(membership, rank)
        return membership.address

    def stage(self, plan: BucketPlan, version: int) -> list[str]:
        """Receive a version from the group.

        Returns:
            Digest of each bucket, of the bytes as they arrived.

        Raises:
            GroupBroken: Not in a group, or the group failed.
            PublishError: The tensors are not those of this model.
        """
        self.discard()
        group = self._group
        if group is None:
            raise GroupBroken(f"version {version}: this replica is in no group")
        try:
            self._accept(plan)
            buffer = self._staging(plan, group.device)
            digests = _receive_buckets(plan, group, buffer)
            if group is not self._group:
                raise GroupBroken(f"version {version}: the group was replaced while staging")
            self._staged = (version, plan, buffer)
        finally:
            # The others must not wait until the deadline for a member that gave up.
            if self._staged is None and group is self._group:
                self.leave()
        return digests

    def stage_payload(
        self, plan: BucketPlan, version: int, payload: NDArray[np.uint8]
    ) -> list[str]:
        """Stage a sealed payload (see core.buckets); its digests, each checked.

        Raises:
            PublishError: The payload is not this version of this model, or is damaged.
        """
        self.discard()
        self._accept(plan)
        try:
            digests = verify(plan, payload, version)
        except ValueError as error:
            raise PublishError(f"snapshot of version {version}: {error}") from error
        buffer = self._staging(plan)
        collective.write_bytes(buffer, payload[: plan.total_bytes])
        self._staged = (version, plan, buffer)
        return digests

    def take(self, version: int) -> Mapping[str, "Tensor"]:
        """The staged tensors, valid until the next `stage` or `join`.

        Raises:
            PublishError: Another version, or none, is staged.
        """
        if self._staged is None or self._staged[0] != version:
            held = "none" if self._staged is None else f"version {self._staged[0]}"
            raise PublishError(f"swap to version {version}: staged is {held}. Stage it first")
        _, plan, buffer = self._staged
        self._staged = None
        return collective.tensor_views(plan, buffer)

    def discard(self) -> None:
        """Forget what was staged."""
        self._staged = None

    def leave(self) -> None:
        """Leave the group, if in one, and forget what was staged."""
        self.discard()
        group, self._group = self._group, None
        if group is not None:
            collective.leave_group(group)

    def _accept(self, plan: BucketPlan) -> None:
        if plan.digest == self._accepted_plan:
            return
        if mismatch := plan.mismatch(self._expected):
            raise PublishError(f"weights do not fit this model: {mismatch}")
        self._accepted_plan = plan.digest

    def _staging(self, plan: BucketPlan, device: Any = None) -> "Tensor":
        if self._buffer is None or self._buffer.numel() != plan.total_bytes:
            self._buffer = collective.flat_buffer(plan.total_bytes, device)
        return self._buffer


def _receive_buckets(plan: BucketPlan, group: collective.BytesGroup, buffer: "Tensor") -> list[str]:
    """One bucket is hashed while the next is on the wire."""
    slices = [buffer[slice(*plan.bounds(bucket))] for bucket in range(plan.num_buckets)]
    digests: list[str] = []
    posted = group.post_broadcast(slices[0]) if slices else None
    for bucket, arrived in enumerate(slices):
        group.wait(posted, f"bucket {bucket} of {plan.num_buckets}")
        if bucket + 1 < len(slices):
            posted = group.post_broadcast(slices[bucket + 1])
        digests.append(digest(arrived.cpu().numpy()))
    return digests
