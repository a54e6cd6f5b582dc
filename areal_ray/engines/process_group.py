"""The ranks of one learner: sums, maxima and broadcasts between them.

Waits for: every other rank, in each call; unblocked by their making the same call. Each wait
ends after `timeout_s` at the latest with an error that names the exchange.
One rank needs no network: everything here is then the identity.
"""

import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ReduceOp, Store

from areal_ray.errors import EngineError


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a learner meet; made by rank 0 before the others join."""

    address: str
    """host:port for the other ranks."""
    store: Store

    @classmethod
    def open(cls, host: str, num_ranks: int, timeout_s: float = 120.0) -> Self:
        """Listen on a free port of this machine, reachable as `host`."""
        # The socket is bound here and handed over, so no other process can take the port.
        listener = socket.socket()
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]

            host, port, num_ranks, is_master=True, timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip
        return cls(f"{host}:{port}", store)


class RankGroup:
    """This process's membership in the learner's ranks."""

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        """A group of one; use `join` for more."""
        self.rank = rank
        self.size = size
        self._device = device
        self._is_joined = size > 1
        self._group: dist.ProcessGroup | None = None
        """None = all ranks there are."""
        self._first = 0
        """Rank 0 of this group, among all ranks."""

    @classmethod
    def join(
        cls,
        meeting: Rendezvous | str,
        rank: int,
        size: int,
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
    ) -> Self:
        """Take the process's default torch process group; returns when all ranks have joined.

        Args:
            meeting: The `Rendezvous` on rank 0, its address elsewhere.
            rank: This process's number, from 0.
            size: Number of ranks.
            device: cpu uses gloo, cuda NCCL.
            timeout_s: Of joining, and of each exchange later.

        Raises:
            EngineError: Not all ranks came in time.
        """
        if size == 1:
            return cls(0, 1, device)
        timeout = timedelta(seconds=timeout_s)
        where = meeting if isinstance(meeting, str) else meeting.address
        try:
            if isinstance(meeting, str):
                host, _, port = meeting.rpartition(":")
                store: Store = dist.TCPStore(  # type: ignore[attr-defined]
                    host, int(port), size, is_master=False, timeout=timeout
                )
            else:
                store = meeting.store
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                store=store, rank=rank, world_size=size, timeout=timeout,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise EngineError(
                f"learner rank {rank} of {size}: could not meet the others at {where} within "
                f"{timeout_s:g} s ({error}); each rank must be started once and reach that "
                "address. See which rank is missing."
            ) from error
        return cls(rank, size, device)

    def initialise_alone(self) -> None:
        """Give a group of one a torch process group, for libraries that want one."""
        if self.size == 1 and not dist.is_initialized():
            backend = "nccl" if self._device == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            self._is_joined = True

    def every(self, step: int) -> "RankGroup":
        """The ranks that are a multiple of `step` away from this one; `size` is one. Collective."""
        if step == 1:
            return self
        return self._part([range(first, self.size, step) for first in range(step)])

    def neighbours(self, number: int) -> "RankGroup":
        """This rank's among groups of `number` ranks in a row. Collective."""
        return self._part([range(at, at + number) for at in range(0, self.size, number)])

    def _part(self, parts: Sequence[range]) -> "RankGroup":
        """The group of this rank, of groups that have all ranks between them."""
        for members in parts:
            group = dist.new_group(list(members)) if len(members) > 1 else None
            if self.rank in members:
                found = RankGroup(members.index(self.rank), len(members), self._device)
                found._is_joined = False  # it ends with the whole group
                found._group, found._first = group, members[0]
        return found

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by the sum over ranks; bit for bit the same on each."""
        return self._all_reduce(tensor, ReduceOp.SUM, "sum")

    def max_(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` by the maximum over ranks."""
        return self._all_reduce(tensor, ReduceOp.MAX, "maximum")

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """The same numbers summed over ranks, exact for counts."""
        return self._numbers(numbers, ReduceOp.SUM, "sum of counts")

    def max_numbers(self, numbers: Sequence[float]) -> list[float]:
        """The same numbers, each the largest of any rank."""
        return self._numbers(numbers, ReduceOp.MAX, "maximum of numbers")

    def joined(self, columns: Tensor) -> tuple[Tensor, slice]:
        """[C, N] columns of all ranks end to end, each of its own N; and where this rank's lie."""
        length = columns.shape[1]
        if self.size == 1:
            return columns, slice(0, length)
        own = [float(length) if rank == self.rank else 0.0 for rank in range(self.size)]
        lengths = [round(number) for number in self.sum_numbers(own)]
        start = sum(lengths[: self.rank])
        whole = columns.new_zeros(columns.shape[0], sum(lengths))
        whole[:, start : start + length] = columns
        return self._all_reduce(whole, ReduceOp.SUM, "join of columns"), slice(
            start, start + length
        )

    def exchanged(self, parts: Tensor) -> Tensor:
        """[size, ...] part r of each rank's [size, ...] on rank r, in the ranks' order."""
        found = torch.empty_like(parts)
        call = partial(dist.all_to_all_single, found, parts, group=self._group)
        self.guarded("exchange of parts", call)
        return found

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by rank 0's."""
        if self.size == 1:
            return
        for tensor in tensors:
            call = partial(dist.broadcast, tensor, src=self._first, group=self._group)
            self.guarded("broadcast", call)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            self.guarded("barrier", partial(dist.barrier, group=self._group))

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """Around work in which libraries make exchanges of their own.

        Raises:
            EngineError: One of them failed; any other error is left as it is.
        """
        try:
            yield
        except RuntimeError as error:
            is_exchange = isinstance(error, dist.DistError) or "gloo" in str(error)
            if not is_exchange:
                raise
            raise self._broken(what, error) from error

    def close(self) -> None:
        """Leave the group."""
        if self._is_joined and dist.is_initialized():
            dist.destroy_process_group()

    def _numbers(
        self, numbers: Sequence[float], op: "ReduceOp.RedOpType", what: str
    ) -> list[float]:
        if self.size == 1 or not numbers:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return [float(n) for n in self._all_reduce(tensor, op, what).tolist()]

    def _all_reduce(self, tensor: Tensor, op: "ReduceOp.RedOpType", what: str) -> Tensor:
        if self.size > 1:
            self.guarded(what, partial(dist.all_reduce, tensor, op=op, group=self._group))
        return tensor

    def guarded(self, what: str, call: Callable[[], object]) -> None:
        """Make an exchange.

        Raises:
            EngineError: It failed, or took longer than its time-out.
        """
        try:
            call()
        except (RuntimeError, ValueError) as error:
            raise self._broken(what, error) from error

    def _broken(self, what: str, error: Exception) -> EngineError:
        return EngineError(
            f"learner rank {self.rank} of {self.size}: the {what} over ranks failed: {error}. "
            "Another rank has died or is stuck; the run must resume from its last checkpoint."
        )
