"""Collective groups of our own under `ray.util.collective`, whose members take in bytes.

Ray's GLOO group takes over the process's default torch process group, and its NCCL group needs
CuPy; this backend owns a TCPStore and a process group apart, so a learner's own groups are left
alone. Only bytes (uint8) travel, so every dtype does.

Members on the learner's own node are no part of the process group: they read its memory. A group
whose members are all there has no process group at all.

Waits: `connect` waits for all members, `wait` for one broadcast, `begin` and `wait_whole` for the
learner; all end at the membership's deadline with a GroupBroken that says who or what was awaited.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

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

from areal_ray.runtime.membership import GroupBroken, Membership
from areal_ray.runtime.shared_memory import Board, BoardReader

BACKEND = "AREAL_BYTES"

_announced: dict[str, Membership] = {}
"""Ray constructs a group from its name, size and rank alone; the rest waits here for it."""

_POLL_S = 0.0005

_MEMORY, _WIRE = "memory", "wire"
"""How bytes come to a member: it tells the others as it arrives."""


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
        self.board: Board | None = None
        """Of rank 0, where members on its node read its memory."""
        self.reader: BoardReader | None = None
        """Of a member on the node of rank 0."""
        self._num_versions = 0

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

    @property
    def has_wire(self) -> bool:
        """Whether bytes are broadcast from or to this member."""
        return self._process_group is not None

    def next_is_delta(self) -> bool:
        """Whether the version that is sent now travels as what changed; asked once a version.

        Every member counts alike: one that missed a version has left, and all join a new group.
        So the first version in a group is whole, and whoever is in it holds the one before.
        """
        self._num_versions += 1
        return self.has_wire and (self._num_versions - 1) % self._membership.full_every != 0

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
            self._offer_or_read_memory(self._store, timeout)
            wired = self._await_members(self._store, timeout)
            if len(wired) > 1 and self.rank in wired:
                self._process_group = self._new_process_group(self._store, timeout, wired)
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
        if self.board is not None:
            self.board.give_up()
        if self.reader is not None:
            self.reader.close()
        self._store = None

    def broadcast(self, tensor: Any, broadcast_options: Any = None) -> None:
        """Ray's signature of a broadcast from rank 0: a list of one uint8 tensor."""
        self.wait(self.post_broadcast(tensor[0]), "broadcast")

    def begin(self, version: int) -> NDArray[np.uint8]:
        """The learner's memory into which it writes the next version, bucket after bucket.

        Raises:
            GroupBroken: The learner gave up, went away, or did not begin in time.
        """
        reader = self._open_reader()
        with self._told(f"version {version}"):
            return reader.wait_begin(version, self._membership.timeout_s)

    def wait_whole(self, bucket: int, what: str) -> None:
        """Wait until a bucket can be read in the learner's memory.

        Raises:
            GroupBroken: The learner gave up, went away, or the deadline passed.
        """
        reader = self._open_reader()
        with self._told(what):
            reader.wait_bucket(bucket, self._membership.timeout_s)

    def _open_reader(self) -> BoardReader:
        if self.reader is None:
            raise self._broken("this member has left")
        return self.reader

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, ConnectionError) as error:
            raise self._broken(f"{what}: {error}") from error

    def _offer_or_read_memory(self, store: Any, timeout: timedelta) -> None:
        """Find out whether this member's node is the learner's; GPU memory is not offered."""
        if self.rank == 0:
            if self._membership.shares_memory and self._membership.backend == "gloo":
                self.board = Board()
            store.set(_MEMORY, "" if self.board is None else self.board.offer)
        elif self._membership.shares_memory:
            try:
                store.wait([_MEMORY], timeout)
            except dist.DistStoreError as error:
                limit_s = self._membership.timeout_s
                learner = self._membership.members[0]
                raise self._broken(f"absent after {limit_s:g} s: {learner}") from error
            self.reader = BoardReader.of(store.get(_MEMORY).decode())

    def _await_members(self, store: Any, timeout: timedelta) -> list[int]:
        """Ranks to which bytes take the wire, rank 0 included."""
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], _WIRE if self.reader is None else _MEMORY)
        try:
            store.wait(keys, timeout)
        except dist.DistStoreError as error:
            members = zip(keys, self._membership.members, strict=True)
            absent = [name for key, name in members if not store.check([key])]
            limit_s = self._membership.timeout_s
            raise self._broken(f"absent after {limit_s:g} s: {', '.join(absent)}") from error
        return [rank for rank, key in enumerate(keys) if store.get(key) == _WIRE.encode()]

    def _new_process_group(self, store: Any, timeout: timedelta, wired: list[int]) -> Any:
        rank, size = wired.index(self.rank), len(wired)
        if self._membership.backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timeout
            return dist.ProcessGroupNCCL(store, rank, size, nccl)
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = timeout
        # By address, since a host name may resolve to one that other nodes cannot reach.
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=get_node_ip_address())]
        return dist.ProcessGroupGloo(store, rank, size, gloo)

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


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
