"""WeightSender: what LearnerActor rank 0 holds to hand its weights out.

The verbs of a publish, seen from the learner: plan once, join a group per membership, send each
version. The bytes of the last two versions stay in host memory: while version n + 1 is on its way
the committed version is still n, and a late joiner must get that one although the learner has
trained on. `send`, `snapshot` and `join` may be called from different threads.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.buckets import BucketPlan, digest, plan_buckets, seal
from areal_ray.errors import PublishError
from areal_ray.runtime import collective
from areal_ray.runtime.membership import Membership

if TYPE_CHECKING:
    from torch import Tensor

    from areal_ray.engines.sharding import ShardedTensor


class WeightSender:
    """Packs the learner's weights into buckets, broadcasts them and keeps them for late joiners."""

    def __init__(self, weights: Callable[[], Mapping[str, "Tensor | ShardedTensor"]]) -> None:
        self._weights = weights
        self._store: Any = None
        self._group: collective.BytesGroup | None = None
        self._kept: dict[int, tuple[str, Tensor]] = {}

    def plan(self, bucket_bytes: int, dtype: str = "") -> BucketPlan:
        """Lay the current weights out; `dtype` ("bfloat16", ...) casts floating-point ones."""
        return plan_buckets(collective.describe(self._weights(), dtype), bucket_bytes)

    def join(self, membership: Membership, rank: int) -> str:
        """Open the rendezvous store, or meet the others there once the address is known.

        A membership without an address asks for it: the answer comes at once and no group is
        formed. The same call with the address waits for all members.

        Returns:
            host:port of the store, to be given to every member.

        Raises:
            GroupBroken: Members are absent at the deadline; names them.
        """
        self.leave()
        if self._store is None:
            self._store = collective.open_store()
        address = collective.store_address(self._store)
        if membership.address:
            self._group = collective.join_group(membership, rank, self._store)
        return address

    def send(self, plan: BucketPlan, version: int) -> list[str]:
        """Pack this version, broadcast it if in a group, and keep it for `snapshot`.

        Returns:
            Digest of each bucket.

        Raises:
            GroupBroken: A receiver went away or did not take its buckets in time.
        """
        host = self._buffer_for(plan, version)
        try:
            digests = self._send_buckets(plan, self._weights(), host, self._group)
            seal(plan, host.numpy(), version, digests)
            self._kept[version] = (plan.digest, host)
        finally:
            # The others must not wait until the deadline for a member that gave up.
            if version not in self._kept:
                self.leave()
        return digests

    def snapshot(self, plan: BucketPlan, version: int) -> NDArray[np.uint8]:
        """Sealed payload [plan.payload_bytes] of a version sent before; of the last two only.

        Raises:
            PublishError: That version's bytes are not kept.
        """
        plan_digest, host = self._kept.get(version, ("", None))
        if host is None or plan_digest != plan.digest:
            kept = ", ".join(map(str, self._kept)) or "none"
            raise PublishError(
                f"learner: no bytes of version {version} under this plan; kept versions: {kept}. "
                "Publish again"
            )
        return host.numpy()

    def leave(self) -> None:
        """Leave the group, if in one."""
        group, self._group = self._group, None
        if group is not None:
            collective.leave_group(group)

    def _send_buckets(
        self,
        plan: BucketPlan,
        weights: Mapping[str, "Tensor | ShardedTensor"],
        host: "Tensor",
        group: collective.BytesGroup | None,
    ) -> list[str]:
        """One bucket is packed and hashed while the one before it is on the wire."""
        digests: list[str] = []
        under_way: tuple[Any, Tensor] | None = None
        for bucket in range(plan.num_buckets):
            start, end = plan.bounds(bucket)
            kept = host[start:end]
            wire = kept if group is None else _on_device(kept, group)
            collective.fill_bucket(plan, bucket, weights, wire)
            posted = (group.post_broadcast(wire), wire) if group is not None else None
            if wire is not kept:
                kept.copy_(wire)
            digests.append(digest(kept.numpy()))
            if group is not None and under_way is not None:
                group.wait(under_way[0], f"bucket {bucket - 1} of {plan.num_buckets}")
            under_way = posted
        if group is not None and under_way is not None:
            group.wait(under_way[0], f"bucket {plan.num_buckets - 1} of {plan.num_buckets}")
        return digests

    def _buffer_for(self, plan: BucketPlan, version: int) -> "Tensor":
        """Host memory for a version; all but the version before it is free to be reused."""
        free = [kept for kept in self._kept if kept != version - 1]
        buffers = [self._kept.pop(kept)[1] for kept in free]
        for buffer in buffers:
            if buffer.numel() == plan.payload_bytes:
                return buffer
        return collective.flat_buffer(plan.payload_bytes)


def _on_device(kept: "Tensor", group: collective.BytesGroup) -> "Tensor":
    if group.device.type == "cpu":
        return kept
    return collective.flat_buffer(kept.numel(), group.device)
