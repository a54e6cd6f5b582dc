"""Collective groups of our own under `ray.util.collective`, and tensors as the bytes they carry.

Ray's GLOO group takes over the process's default torch process group, and its NCCL group needs
CuPy; this backend owns a TCPStore and a process group apart, so a learner's own groups are left
alone. Only bytes (uint8) travel, so every dtype does.

Waits: `connect` waits for all members, `wait` for one broadcast; both end at the membership's
deadline with a GroupBroken that says who or what was awaited.
"""

import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from ray.util import collective as ray_collective
from ray.util import get_node_ip_address
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import Backend
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from areal_ray.core.buckets import BucketPlan
from areal_ray.runtime.membership import GroupBroken, Membership

if TYPE_CHECKING:
    from areal_ray.engines.sharding import ShardedTensor

BACKEND = "AREAL_BYTES"

_announced: dict[str, Membership] = {}
"""Ray constructs a group from its name, size and rank alone; the rest waits here for it."""

_POLL_S = 0.0005


def open_store() -> Any:
    """The meeting point of all groups of one learner, on a port the system picks."""
    return TCPStore(get_node_ip_address(), 0, None, True, wait_for_workers=False)


def store_address(store: Any) -> str:
    """host:port under which other processes reach an opened store."""
    return f"{store.host}:{store.port}"


class BytesGroup(BaseGroup):
    """One membership's process group; broadcasts bytes from rank 0 (the learner) to the others."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._membership = _announced.pop(group_name)
        self._store: Any = None
        self._process_group: Any = None

    @classmethod
    def backend(cls) -> str:
        """Name in Ray's registry."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Gloo is in every build of torch."""
        return bool(dist.is_available())

    @property
    def device(self) -> torch.device:
        """Where buffers of this group live."""
        return torch.device("cuda" if self._membership.backend == "nccl" else "cpu")

    def connect(self, store: Any) -> None:
        """Meet the other members; rank 0 gives the store that it opened.

        Raises:
            GroupBroken: The store cannot be reached, or members are absent at the deadline.
        """
        member = self._membership
        timeout = timedelta(seconds=member.timeout_s)
        host, _, port = member.address.rpartition(":")
        try:
            root = store or TCPStore(host, int(port), None, False, timeout, False)
            self._store = PrefixStore(member.group_name, root)
            self._await_members(self._store, timeout)
            self._process_group = self._new_process_group(self._store, timeout)
        except dist.DistNetworkError as error:
            raise self._broken(f"cannot reach the learner's store at {member.address}") from error
        except RuntimeError as error:
            raise self._broken(_first_line(error)) from error

    def post_broadcast(self, buffer: torch.Tensor) -> Any:
        """Start sending (rank 0) or receiving (others) a uint8 buffer; `wait` for what returns.

        Raises:
            GroupBroken: The group is gone.
        """
        if self._process_group is None:
            raise self._broken("this member has left")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        try:
            return self._process_group.broadcast([buffer], options)
        except RuntimeError as error:
            raise self._broken(_first_line(error)) from error

    def wait(self, work: Any, what: str) -> None:
        """Wait for a posted broadcast.

        Raises:
            GroupBroken: A member went away, or the deadline passed.
        """
        limit_s = self._membership.timeout_s
        try:
            if self._membership.backend == "gloo":
                work.wait(timedelta(seconds=limit_s))
                return
            # NCCL's wait only orders streams; the host has to see the end before it reads.
            deadline_s = time.monotonic() + limit_s
            while not work.is_completed():
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"timed out after {limit_s:g} s")
                time.sleep(_POLL_S)
            work.wait()
        except RuntimeError as error:
            raise self._broken(f"{what}: {_first_line(error)}") from error

    def destroy_group(self) -> None:
        """Close the connections; whoever waits for this member learns it at once."""
        process_group, self._process_group = self._process_group, None
        if process_group is not None:
            process_group.abort()
        self._store = None

    def broadcast(self, tensor: Any, broadcast_options: Any = None) -> None:
        """Ray's signature of a broadcast from rank 0: a list of one uint8 tensor."""
        self.wait(self.post_broadcast(tensor[0]), "broadcast")

    def _await_members(self, store: Any, timeout: timedelta) -> None:
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], "")
        try:
            store.wait(keys, timeout)
        except dist.DistStoreError as error:
            members = zip(keys, self._membership.members, strict=True)
            absent = [name for key, name in members if not store.check([key])]
            limit_s = self._membership.timeout_s
            raise self._broken(f"absent after {limit_s:g} s: {', '.join(absent)}") from error

    def _new_process_group(self, store: Any, timeout: timedelta) -> Any:
        if self._membership.backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return dist.ProcessGroupNCCL(store, self.rank, self.world_size, nccl)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = timeout
        # By address, since a host name may resolve to one that other nodes cannot reach.
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=get_node_ip_address())]
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, gloo)

    def _broken(self, reason: str) -> GroupBroken:
        name = self._membership.members[self.rank]
        return GroupBroken(f"{name} in group {self._membership.group_name}: {reason}")

    # What weights do not need; Ray's base class wants them all.
    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{BACKEND} groups only broadcast bytes from rank 0")

    allreduce = barrier = reduce = allgather = reducescatter = send = recv = _refuse


register_collective_backend(BACKEND, BytesGroup)


def join_group(membership: Membership, rank: int, store: Any = None) -> BytesGroup:
    """Become a member, inside a Ray actor: known to Ray by its name, then met by the others."""
    name = membership.group_name
    _announced[name] = membership
    ray_collective.init_collective_group(
        len(membership.members), rank, backend=Backend(BACKEND), group_name=name
    )
    group = ray_collective.get_group_handle(name)
    assert isinstance(group, BytesGroup)
    try:
        group.connect(store)
    except GroupBroken:
        leave_group(group)
        raise
    return group


def leave_group(group: BytesGroup) -> None:
    """Cease to be a member; the name is not used again."""
    if ray_collective.is_group_initialized(group.group_name):
        ray_collective.destroy_collective_group(group.group_name)


def describe(
    weights: "Mapping[str, torch.Tensor | ShardedTensor]", dtype: str
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype that travels) of each tensor; `dtype` replaces floating-point ones."""
    for name, tensor in weights.items():
        cast = dtype and tensor.dtype.is_floating_point
        yield name, tuple(tensor.shape), dtype if cast else str(tensor.dtype).removeprefix("torch.")


def fill_bucket(
    plan: BucketPlan,
    bucket: int,
    weights: "Mapping[str, torch.Tensor | ShardedTensor]",
    out: torch.Tensor,
) -> None:
    """Copy (and cast) what a bucket carries into `out`, uint8 [bucket length]."""
    dtypes = {tensor.name: tensor.dtype for tensor in plan.tensors}
    for piece in plan.pieces(bucket):
        dtype = getattr(torch, dtypes[piece.name])
        target = out[piece.bucket_start_byte :][: piece.num_bytes].view(dtype)
        first = piece.tensor_start_byte // dtype.itemsize
        source, stop = weights[piece.name], first + target.numel()
        if isinstance(source, torch.Tensor):
            target.copy_(source.detach().reshape(-1)[first:stop])
        else:
            target.copy_(source.read(first, stop))


def tensor_views(plan: BucketPlan, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each tensor as a view of a flat uint8 run [total_bytes]."""
    views = {}
    for spec in plan.tensors:
        span = flat[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        views[spec.name] = span.view(getattr(torch, spec.dtype)).view(spec.shape)
    return views


def flat_buffer(num_bytes: int, device: torch.device | None = None) -> torch.Tensor:
    """Zeroed bytes [num_bytes], so that padding is the same on every side."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def write_bytes(flat: torch.Tensor, content: NDArray[np.uint8]) -> None:
    """Copy host bytes, possibly read-only ones, into a flat run on any device."""
    if flat.device.type == "cpu":
        np.copyto(flat.numpy(), content)
    else:
        flat.copy_(torch.from_numpy(content.copy()))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
