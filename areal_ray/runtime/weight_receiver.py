"""WeightReceiver: what a RolloutActor holds to take weights in beside the live ones.

The verbs of a publish, seen from a replica: join a group per membership, stage each version, then
either take what was staged (to swap it in) or discard it. A late joiner stages a payload of the
object store instead. Staging memory is one copy of the model.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.buckets import BucketPlan, RunningDigest, digest, verify
from areal_ray.core.weight_delta import encoded_bytes, header_bytes, open_header, unit_bytes
from areal_ray.engines import tensor_bytes
from areal_ray.engines.arriving import Abandoned, ArrivingTensors
from areal_ray.errors import EngineError, PublishError
from areal_ray.runtime import collective
from areal_ray.runtime.membership import GroupBroken, Membership
from areal_ray.runtime.weight_files import WeightFile, read_version

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_IN_FLIGHT = 2
"""Buckets awaited at once."""


class WeightReceiver:
    """Receives versions into staging memory; never touches the live weights."""

    def __init__(
        self,
        expected: Mapping[str, tuple[int, ...]],
        prepare: Callable[[Mapping[str, "Tensor"]], None] | None = None,
    ) -> None:
        """Receive nothing yet.

        Args:
            expected: Name and shape of each tensor.
            prepare: Called on a thread of its own with tensors that are arriving; `take` then
                returns the same mapping.
        """
        self._prepare = prepare
        self._arriving: tuple[ArrivingTensors, Thread] | None = None
        self._expected = {name: tuple(shape) for name, shape in expected.items()}
        self._group: collective.BytesGroup | None = None
        self._buffer: tuple[str, Tensor] | None = None
        """Staging memory, and for which plan and device: one plan's padding is another's tensor."""
        self._held: int | None = None
        """The version whose bytes the staging memory holds whole, live or not."""
        self._staged: tuple[int, Mapping[str, Tensor]] | None = None
        self._accepted_plan = ""

    @property
    def staged_version(self) -> int | None:
        """The version in staging memory, if one is whole there."""
        return None if self._staged is None else self._staged[0]

    @property
    def reads_memory(self) -> bool:
        """Whether this group's weights come out of the learner's memory, not over the wire."""
        return self._group is not None and self._group.reader is not None

    def join(self, membership: Membership, rank: int) -> str:
        """Leave any group and meet the members of this one; the address of its store.

        Raises:
            GroupBroken: Members are absent at the deadline; names them.
        """
        self.leave()
        # A stage() of the old group may still be writing into the old buffer.
        self._buffer = self._held = None
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
            base, self._held = self._held, None
            if group.next_is_delta():
                digests = _receive_changes(plan, group, buffer, base)
                tensors = _arrived(plan, buffer)
            else:
                tensors, digests = self._expect(plan, buffer), []
                for bucket, proof in enumerate(_received(plan, group, buffer, version)):
                    digests.append(proof)
                    tensors.advance(plan.bounds(bucket)[1])
            if group is not self._group:
                raise GroupBroken(f"version {version}: the group was replaced while staging")
            self._held, self._staged = version, (version, tensors)
        finally:
            # The others must not wait until the deadline for a member that gave up.
            if self._staged is None and group is self._group:
                self.leave()
        return digests

    def stage_payload(
        self, plan: BucketPlan, version: int, payload: NDArray[np.uint8] | WeightFile
    ) -> list[str]:
        """Stage a sealed payload (see core.buckets) or a file; its digests, each checked.

        Raises:
            PublishError: The payload is not this version of this model, or is damaged.
        """
        self.discard()
        self._accept(plan)
        self._held = None
        buffer = self._staging(plan)
        if isinstance(payload, WeightFile):
            if payload.version != version:
                raise PublishError(f"{payload.path}: holds not version {version}. Publish again")
            digests = read_version(payload, plan, buffer.numpy())
        else:
            try:
                digests = verify(plan, payload, version)
            except ValueError as error:
                raise PublishError(f"snapshot of version {version}: {error}") from error
            tensor_bytes.write_bytes(buffer, payload[: plan.total_bytes])
        self._staged = (version, _arrived(plan, buffer))
        return digests

    def take(self, version: int) -> Mapping[str, "Tensor"]:
        """The staged tensors, valid until the next `stage` or `join`.

        Raises:
            PublishError: Another version, or none, is staged.
        """
        if self._staged is None or self._staged[0] != version:
            held = "none" if self._staged is None else f"version {self._staged[0]}"
            raise PublishError(f"swap to version {version}: staged is {held}. Stage it first")
        _, tensors = self._staged
        self._staged = None
        if self._arriving is not None:  # all has arrived: it ends, and is not to be done twice
            self._arriving[1].join()
        return tensors

    def discard(self) -> None:
        """Forget what was staged; nothing reads its memory any more."""
        self._staged = None
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            tensors, thread = arriving
            tensors.abandon()
            thread.join()

    def leave(self) -> None:
        """Leave the group, if in one, and forget what was staged."""
        self.discard()
        group, self._group = self._group, None
        if group is not None:
            collective.leave_group(group)

    def _expect(self, plan: BucketPlan, buffer: "Tensor") -> ArrivingTensors:
        """What the buckets will bring, for the engine to work on meanwhile."""
        tensors = tensor_bytes.arriving_views(plan, buffer)
        if self._prepare is not None:
            thread = Thread(target=_prepared, args=(self._prepare, tensors), daemon=True)
            self._arriving = tensors, thread
            thread.start()
        return tensors

    def _accept(self, plan: BucketPlan) -> None:
        if plan.digest == self._accepted_plan:
            return
        if mismatch := plan.mismatch(self._expected):
            raise PublishError(f"weights do not fit this model: {mismatch}")
        self._accepted_plan = plan.digest

    def _staging(self, plan: BucketPlan, device: Any = None) -> "Tensor":
        key = f"{plan.digest} {device or 'cpu'}"
        if self._buffer is None or self._buffer[0] != key:
            self._buffer = None  # before its successor is made
            self._buffer = (key, tensor_bytes.flat_buffer(plan.total_bytes, device))
        return self._buffer[1]


def _arrived(plan: BucketPlan, buffer: "Tensor") -> ArrivingTensors:
    """Tensors of a buffer that is whole."""
    tensors = tensor_bytes.arriving_views(plan, buffer)
    tensors.advance(plan.total_bytes)
    return tensors


def _prepared(prepare: Callable[[Mapping[str, "Tensor"]], None], tensors: ArrivingTensors) -> None:
    try:
        prepare(tensors)
    except Abandoned:
        return
    except (EngineError, RuntimeError) as error:  # the swap will find the same, and tell it
        _log.warning("weights could not be prepared as they came: %s", error)


def _received(
    plan: BucketPlan, group: collective.BytesGroup, buffer: "Tensor", version: int
) -> Iterator[str]:
    """Digests of the buckets, each taken while the next one is under way."""
    if group.reader is not None:
        yield from _read(plan, group, buffer, version)
        return
    slices = [buffer[slice(*plan.bounds(bucket))] for bucket in range(plan.num_buckets)]
    posted = deque(group.post_broadcast(part) for part in slices[:_IN_FLIGHT])
    for bucket, arrived in enumerate(slices):
        group.wait(posted.popleft(), f"bucket {bucket} of {plan.num_buckets}")
        posted.extend(map(group.post_broadcast, slices[bucket + _IN_FLIGHT :][:1]))
        yield digest(arrived.cpu().numpy())


def _receive_changes(
    plan: BucketPlan, group: collective.BytesGroup, buffer: "Tensor", base: int | None
) -> list[str]:
    """Digests of the buckets, after what changed was put over the version before."""
    header = tensor_bytes.flat_buffer(header_bytes(plan), group.device)
    group.wait(group.post_broadcast(header), "counts of what changed")
    try:
        sent_base, counts, proof = open_header(header.cpu().numpy())
    except ValueError as error:
        raise PublishError(f"{error}; it staged other bytes") from error
    if sent_base != base:
        raise PublishError(
            f"the learner sends what changed since version {sent_base}, but this replica holds "
            f"{'none' if base is None else f'version {base}'}; it must be sent a whole one first"
        )
    lengths = encoded_bytes(plan, counts)
    body = tensor_bytes.flat_buffer(sum(lengths), group.device)
    if len(body):
        group.wait(group.post_broadcast(body), "what changed")
    if digest(body.cpu().numpy()) != proof:
        raise PublishError("what changed differs from its digest; it staged other bytes")
    digests: list[str] = []
    end = 0
    for bucket, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        encoded, end = body[end : end + length], end + length
        part = buffer[slice(*plan.bounds(bucket))]
        tensor_bytes.apply_changes(part, count, encoded, unit_bytes(plan))
        digests.append(digest(part.cpu().numpy()))
    return digests


def _read(
    plan: BucketPlan, group: collective.BytesGroup, buffer: "Tensor", version: int
) -> Iterator[str]:
    """The same out of the memory of a learner on this node."""
    source = group.begin(version)
    for bucket in range(plan.num_buckets):
        group.wait_whole(bucket, f"bucket {bucket} of {plan.num_buckets}")
        start, end = plan.bounds(bucket)
        proof = RunningDigest()
        for low in range(start, end, proof.PART_BYTES):
            part = slice(low, min(low + proof.PART_BYTES, end))
            tensor_bytes.write_bytes(buffer[part], source[part])
            proof.add(buffer[part].numpy())
        yield str(proof)
