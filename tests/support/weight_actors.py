"""A learner and a replica with real weights and nothing else: what a publish needs of both.

The tensors are set to a function of a seed, so a test can say which bytes it expects where. A
replica's `live` weights stand for an engine's. Faults are told to an actor, not patched in: they
happen where user hardware would cause them (a process that stops, a byte that flips on its way).
"""

import asyncio
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from areal_ray.core.buckets import BucketPlan
from areal_ray.runtime.membership import Membership
from areal_ray.runtime.weight_files import WeightFile
from areal_ray.runtime.weight_receiver import WeightReceiver
from areal_ray.runtime.weight_sender import WeightSender

Shapes = dict[str, tuple[int, ...]]

TINY: Shapes = {"embed": (11, 8), "bias": (3,), "scale": (), "nothing": (0, 4), "head": (40, 8)}


def tensors(shapes: Shapes, seed: int, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """Weights that differ in every element from those of another seed."""
    made = {}
    for index, (name, shape) in enumerate(shapes.items()):
        count = int(np.prod(shape))
        ramp = torch.arange(count, dtype=torch.float32) % 97 + 100 * seed + index
        made[name] = ramp.reshape(shape).to(getattr(torch, dtype))
    return made


class LearnerStandIn:
    """Rank 0 of a learner that trains by being told."""

    def __init__(self, shapes: Shapes, dtype: str = "float32", folder: str = "") -> None:
        torch.set_num_threads(1)
        self._shapes, self._dtype = shapes, dtype
        self._live = tensors(shapes, 0, dtype)
        self._sender = WeightSender(lambda: self._live, Path(folder) if folder else None)
        self._pool = ThreadPoolExecutor(1)

    async def train(self, seed: int) -> None:
        """New weights, in place as an optimizer would write them."""
        for name, tensor in tensors(self._shapes, seed, self._dtype).items():
            self._live[name].copy_(tensor)

    async def begin(self, dtype: str) -> None:
        """Start over with weights of another dtype."""
        self._dtype = dtype
        self._live = tensors(self._shapes, 0, dtype)

    async def nudge(self, name: str, index: int, value: float) -> None:
        """One element of one weight becomes another."""
        self._live[name].view(-1)[index] = value

    async def scatter(self, share: float, seed: int) -> None:
        """This share of the elements, anywhere, become others."""
        draws = np.random.default_rng(seed)
        for tensor in self._live.values():
            count = round(share * tensor.numel())
            where = torch.from_numpy(draws.integers(0, max(tensor.numel(), 1), count))
            tensor.view(-1)[where] = torch.from_numpy(draws.normal(size=count)).to(tensor.dtype)

    async def replace(self, name: str, tensor: torch.Tensor) -> None:
        """One weight becomes another tensor, whatever its strides."""
        self._live[name] = tensor

    async def transpose(self, name: str) -> None:
        """One square weight becomes a view that is not contiguous."""
        self._live[name] = self._live[name].T

    async def pid(self) -> int:
        """Of the process, for a test to stop or kill it."""
        return os.getpid()

    async def default_group_is_free(self) -> bool:
        """Whether the process's default torch group is still for the learner's own use."""
        return not torch.distributed.is_initialized()

    async def sockets(self) -> int:
        """Open sockets of this process."""
        return _sockets()

    async def weights_plan(self, bucket_bytes: int, dtype: str) -> BucketPlan:
        return self._sender.plan(bucket_bytes, dtype)

    async def weights_join(self, membership: Membership, rank: int) -> str:
        return await self._in_order(self._sender.join, membership, rank)

    async def weights_send(self, plan: BucketPlan, version: int) -> list[str]:
        return await self._in_order(self._sender.send, plan, version)

    async def weights_snapshot(
        self, plan: BucketPlan, version: int
    ) -> NDArray[np.uint8] | WeightFile:
        return self._sender.snapshot(plan, version)

    async def _in_order(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


class ReplicaStandIn:
    """A replica whose engine is a dictionary of live tensors."""

    def __init__(self, shapes: Shapes, sync: Any = None, dtype: str = "float32") -> None:
        torch.set_num_threads(1)
        self._incarnation = uuid4().hex
        self._live, self._version = tensors(shapes, 0, dtype), 0
        self._receiver = WeightReceiver(shapes)
        self._pool = ThreadPoolExecutor(1)
        self._fault = ""
        self._is_elsewhere = False
        if sync is not None:
            committed = ray.get(sync.committed.remote(), timeout=20)
            if committed.snapshot:
                payload = committed.snapshot[0]
                if not isinstance(payload, WeightFile):
                    payload = ray.get(payload, timeout=20)
                self._receiver.stage_payload(committed.plan, committed.version, payload)
                self._swap(committed.version)

    async def fail_at(self, fault: str) -> None:
        """`die` or `stop` when asked to stage, `flip` a byte once, `break` in the swap."""
        self._fault = fault

    async def damage(self, name: str) -> None:
        """A bit flips in the memory that the last version came into; what is live stays whole."""
        self._taken[name].view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    async def move(self, elsewhere: bool) -> None:
        """From now on behave as on another node than the learner's, or as on the same."""
        self._is_elsewhere = elsewhere

    async def live(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Version and a copy of the live weights."""
        return self._version, {name: tensor.clone() for name, tensor in self._live.items()}

    async def pid(self) -> int:
        return os.getpid()

    async def sockets(self) -> int:
        return _sockets()

    async def reads_memory(self) -> bool:
        """Whether weights come out of the learner's memory, not over the wire."""
        return self._receiver.reads_memory

    async def incarnation(self) -> str:
        return self._incarnation

    async def weights_join(self, membership: Membership, rank: int) -> str:
        if self._is_elsewhere:
            membership = replace(membership, shares_memory=False)
        return await self._in_order(self._receiver.join, membership, rank)

    async def weights_stage(self, plan: BucketPlan, version: int) -> list[str]:
        if self._fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        digests = await self._in_order(self._receiver.stage, plan, version)
        if self._fault == "flip":
            self._fault = ""
            return ["0" * len(digest) for digest in digests]
        return digests

    async def weights_load(
        self, plan: BucketPlan, version: int, payload: Sequence[Any]
    ) -> list[str]:
        buffer = payload[0] if isinstance(payload[0], WeightFile) else await payload[0]
        return await self._in_order(self._receiver.stage_payload, plan, version, buffer)

    async def weights_swap(self, version: int) -> float:
        return await self._in_order(self._swap, version)

    async def weights_discard(self) -> None:
        await self._in_order(self._receiver.discard)

    async def staged_version(self) -> int:
        """-1 where nothing is staged."""
        staged = self._receiver.staged_version
        return -1 if staged is None else staged

    def _swap(self, version: int) -> float:
        fresh = self._taken = self._receiver.take(version)
        for index, (name, tensor) in enumerate(fresh.items()):
            if self._fault == "break" and index == 1:
                raise RuntimeError("device lost while loading")
            self._live[name].copy_(tensor)
        self._version = version
        return 0.0

    async def _in_order(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


def _sockets() -> int:
    folder = f"/proc/{os.getpid()}/fd"
    links = []
    for entry in os.listdir(folder):
        try:
            links.append(os.readlink(f"{folder}/{entry}"))
        except FileNotFoundError:
            continue
    return sum(link.startswith("socket:") for link in links)
