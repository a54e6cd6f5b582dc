"""WeightSender: what LearnerActor rank 0 holds to hand its weights out.

The verbs of a publish, seen from the learner: plan once, join a group per membership, send each
version. The bytes of the last two versions stay in host memory: while version n + 1 is on its way
the committed version is still n, and a late joiner must get that one although the learner has
trained on. That memory is also what is put on the wire, and what members on this node read.
`send`, `snapshot` and `join` may be called from different threads.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.buckets import BucketPlan, RunningDigest, plan_buckets, seal
from areal_ray.core.weight_delta import encode, seal_header, unit_bytes
from areal_ray.engines import tensor_bytes
from areal_ray.errors import PublishError
from areal_ray.runtime import collective
from areal_ray.runtime.membership import Membership
from areal_ray.runtime.shared_memory import SharedBuffer
from areal_ray.runtime.weight_files import WeightFile, write_version

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Kept:
    """One version's sealed payload."""

    plan_digest: str
    buffer: SharedBuffer
    digests: tuple[str, ...] = ()


class WeightSender:
    """Packs the learner's weights into buckets, broadcasts them and keeps them for late joiners."""

    def __init__(
        self, weights: Callable[[], tensor_bytes.Weights], folder: Path | None = None
    ) -> None:
        """Hold a way to the weights, not the weights.

        Args:
            weights: The present ones. Each is asked for once a publish, in the mapping's order,
                and let go before the next, so that it may be gathered as it is asked for.
            folder: Where snapshots are written as files; None = they are handed out as bytes.
        """
        self._weights = weights
        self._folder = folder
        self._store: Any = None
        self._group: collective.BytesGroup | None = None
        self._kept: dict[int, _Kept] = {}

    def plan(self, bucket_bytes: int, dtype: str = "") -> BucketPlan:
        """Lay the current weights out; `dtype` ("bfloat16", ...) casts floating-point ones."""
        return plan_buckets(tensor_bytes.describe(self._weights(), dtype), bucket_bytes)

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

    def send(self, plan: BucketPlan, version: int, *, is_candidate: bool = False) -> list[str]:
        """Pack this version, send it if in a group, and keep it for `snapshot`.

        A candidate is sent to nobody, and replaced by the next version that is of its number.

        Returns:
            Digest of each bucket.

        Raises:
            GroupBroken: A receiver went away or did not take its buckets in time.
        """
        buffer = self._buffer_for(plan, version)
        group = None if is_candidate else self._group
        try:
            digests = self._send_buckets(plan, version, buffer, group)
            seal(plan, buffer.array, version, digests)
            self._kept[version] = _Kept(plan.digest, buffer, tuple(digests))
        finally:
            # The others must not wait until the deadline for a member that gave up.
            if version not in self._kept:
                self.leave()
        return digests

    def snapshot(self, plan: BucketPlan, version: int) -> NDArray[np.uint8] | WeightFile:
        """Sealed payload [plan.payload_bytes] of a version sent before; of the last two only.

        With a folder, the file it was written to.

        Raises:
            PublishError: That version's bytes are not kept.
            StorageError: The file could not be written; names it.
        """
        kept = self._kept.get(version)
        if kept is None or kept.plan_digest != plan.digest:
            listed = ", ".join(map(str, self._kept)) or "none"
            raise PublishError(
                f"learner: no bytes of version {version} under this plan; kept versions: {listed}. "
                "Publish again"
            )
        if self._folder is None:
            return kept.buffer.array
        flat = kept.buffer.array[: plan.total_bytes]
        return write_version(self._folder, plan, version, flat, kept.digests)

    def leave(self) -> None:
        """Leave the group, if in one."""
        group, self._group = self._group, None
        if group is not None:
            collective.leave_group(group)

    def _send_buckets(
        self,
        plan: BucketPlan,
        version: int,
        buffer: SharedBuffer,
        group: collective.BytesGroup | None,
    ) -> list[str]:
        """One bucket is packed and hashed while the one before it is on the wire."""
        weights = tensor_bytes.InOrder(self._weights())
        flat = tensor_bytes.as_tensor(buffer.array)
        if group is not None and group.next_is_delta():
            before = self._kept.get(version - 1)
            base = before.buffer.array if before and before.plan_digest == plan.digest else None
            outlet: _Outlet | _DeltaOutlet = _DeltaOutlet(group, plan, version, buffer, base)
        else:
            outlet = _Outlet(group, plan, version, buffer)
        digests: list[str] = []
        for bucket in range(plan.num_buckets):
            kept = flat[slice(*plan.bounds(bucket))]
            wire = outlet.room(kept)
            proof = RunningDigest()
            for part in tensor_bytes.fill_bucket(plan, bucket, weights, wire):
                if wire is kept:
                    proof.add(part.numpy())
            outlet.post(bucket, wire)
            if wire is not kept:
                kept.copy_(wire)
                proof.add(kept.numpy())
            digests.append(str(proof))
            outlet.wait(most_left=1)
        outlet.finish()
        return digests

    def _buffer_for(self, plan: BucketPlan, version: int) -> SharedBuffer:
        """Host memory for a version; that of all but the version before is free to be reused."""
        free = [kept for kept in self._kept if kept != version - 1]
        for kept in [self._kept.pop(version) for version in free]:
            if kept.plan_digest == plan.digest:  # else its padding may not be zero
                return kept.buffer
        return SharedBuffer(plan.payload_bytes)


class _Outlet:
    """How the packed buckets of one version leave: over the wire, and by being read here."""

    def __init__(
        self,
        group: collective.BytesGroup | None,
        plan: BucketPlan,
        version: int,
        buffer: SharedBuffer,
    ) -> None:
        self._wired = group if group is not None and group.has_wire else None
        self._board = None if group is None else group.board
        self._plan = plan
        self._under_way: deque[tuple[int, Any, Tensor]] = deque()
        if self._board is not None:
            self._board.begin(version, buffer)

    def room(self, kept: "Tensor") -> "Tensor":
        """Where a bucket is packed: its place in host memory, unless the wire begins elsewhere."""
        if self._wired is None or self._wired.device.type == "cpu":
            return kept
        return tensor_bytes.flat_buffer(kept.numel(), self._wired.device)

    def post(self, bucket: int, wire: "Tensor") -> None:
        """A bucket is packed."""
        if self._board is not None:
            self._board.advance(bucket + 1)
        if self._wired is not None:
            self._under_way.append((bucket, self._wired.post_broadcast(wire), wire))

    def wait(self, most_left: int) -> None:
        """Until no more than so many buckets are on the wire."""
        while self._wired is not None and len(self._under_way) > most_left:
            bucket, work, _ = self._under_way.popleft()
            self._wired.wait(work, f"bucket {bucket} of {self._plan.num_buckets}")

    def finish(self) -> None:
        """Until all buckets have left."""
        self.wait(most_left=0)


class _DeltaOutlet:
    """The same with what changed alone on the wire: all buckets in one message at the end."""

    def __init__(
        self,
        group: collective.BytesGroup,
        plan: BucketPlan,
        version: int,
        buffer: SharedBuffer,
        base: NDArray[np.uint8] | None,
    ) -> None:
        self._group = group
        self._plan = plan
        self._base = base
        self._base_version = version - 1
        self._unit = unit_bytes(plan)
        self._encoded: list[tuple[int, NDArray[np.uint8]]] = []
        if group.board is not None:
            group.board.begin(version, buffer)

    def room(self, kept: "Tensor") -> "Tensor":
        """Host memory: it is compared there."""
        return kept

    def post(self, bucket: int, wire: "Tensor") -> None:
        """A bucket is packed."""
        if self._group.board is not None:
            self._group.board.advance(bucket + 1)
        old = None if self._base is None else self._base[slice(*self._plan.bounds(bucket))]
        self._encoded.append(encode(old, wire.numpy(), self._unit))

    def wait(self, most_left: int) -> None:
        """Nothing is on the wire yet."""

    def finish(self) -> None:
        """Send the base version and the counts, then what changed."""
        counts = [count for count, _ in self._encoded]
        contents = [content for _, content in self._encoded]
        body = np.concatenate(contents) if contents else np.empty(0, np.uint8)
        header = seal_header(self._base_version, counts, body)
        for content, what in ((header, "counts of what changed"), (body, "what changed")):
            if len(content):
                wire = tensor_bytes.as_tensor(content).to(self._group.device)
                self._group.wait(self._group.post_broadcast(wire), what)
