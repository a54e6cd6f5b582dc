"""A learner and a replica with real weights and nothing else: what a publish needs of both.

The tensors are set to a function of a seed, so a test can say which bytes it expects where. A
replica's `live` weights stand for an engine's. Faults are told to an actor, not patched in: they
happen where user hardware would cause them (a process that stops, a byte that flips on its way).
"""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
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
from areal_ray.core.canary import Check, Probe, Sent, Swapped, probe_tokens
from areal_ray.engines.live_weights import first_difference
from areal_ray.engines.protocols import EngineHealth
from areal_ray.runtime.membership import Membership
from areal_ray.runtime.swap_guard import SwapGuard
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

    def __init__(
        self, shapes: Shapes, dtype: str = "float32", folder: str = "", *, probes: bool = True
    ) -> None:
        """`probes`: with the log-probs that `EngineStandIn` gives."""
        torch.set_num_threads(1)
        self._shapes, self._dtype, self._probes = shapes, dtype, probes
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

    async def weights_send(self, plan: BucketPlan, version: int) -> Sent:
        ids = probe_tokens(100, 8)
        probe = Probe(ids, _scores(self._live, ids), (self._dtype,)) if self._probes else None
        return Sent(await self._in_order(self._sender.send, plan, version), probe)

    async def weights_snapshot(
        self, plan: BucketPlan, version: int
    ) -> NDArray[np.uint8] | WeightFile:
        return self._sender.snapshot(plan, version)

    async def _in_order(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


class EngineStandIn:
    """Live tensors in place of a model; its log-probs are their sum, for any token."""

    def __init__(self, shapes: Shapes) -> None:
        self.live, self.version = tensors(shapes, 0), 0
        self.is_paused = False
        self.fault = ""

    def swap(self, fresh: Mapping[str, torch.Tensor], version: int, policy: str) -> float:
        for index, (name, tensor) in enumerate(fresh.items()):
            if index == 1:
                self._fail()
            self.live[name].copy_(tensor)
        if self.fault in ("alter", "alter_always"):
            self.alter("head" if "head" in self.live else "embed")
        self.fault = "" if self.fault == "alter" else self.fault
        self.version = version
        return 0.0

    def _fail(self) -> None:
        """With one tensor of the new version and the others of the old."""
        if self.fault == "break":
            raise RuntimeError("device lost while loading")
        if self.fault == "die_in_swap":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "stop_in_swap":
            os.kill(os.getpid(), signal.SIGSTOP)

    def alter(self, name: str) -> None:
        """One live number becomes another, as in a bad memory cell."""
        self.live[name].view(-1)[-1] += 50_000.0

    def differing(self, given: Mapping[str, torch.Tensor]) -> str:
        return first_difference((n, self.live[n], given[n].to(torch.float32)) for n in self.live)

    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return _scores(self.live, token_ids)

    def health(self) -> EngineHealth:
        return EngineHealth(self.version, 0, 0, 0, 0.0, 0.0, "float32")

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def abort(self, request_ids: Sequence[str]) -> None:
        assert not request_ids, "it holds no turns"


class BlindEngineStandIn(EngineStandIn):
    """One that cannot read its weights back."""

    differing = None  # type: ignore[assignment]


class NoisyMemory:
    """Bytes out of which the first slice is read with its last bit flipped."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self._is_noisy = True

    def __getitem__(self, part: slice) -> Any:
        read = self._memory[part].copy()
        if self._is_noisy:
            read[-1] ^= 1
            self._is_noisy = False
        return read


class NoisyLine:
    """A group from which the next version arrives with one bit flipped, whichever way it takes."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._arriving: torch.Tensor | None = None

    def begin(self, version: int) -> NoisyMemory:
        return NoisyMemory(self._group.begin(version))

    def post_broadcast(self, buffer: torch.Tensor) -> Any:
        if self._arriving is None:
            self._arriving = buffer
        return self._group.post_broadcast(buffer)

    def wait(self, work: Any, what: str) -> None:
        self._group.wait(work, what)
        if self._arriving is not None and len(self._arriving):
            self._arriving[-1] ^= 1
            self._arriving = torch.empty(0, dtype=torch.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


class NoisyReceiver(WeightReceiver):
    """A receiver on a line that can be told to be noisy."""

    def be_noisy(self) -> None:
        self._group = NoisyLine(self._group)  # type: ignore[assignment]


class ReplicaStandIn:
    """A replica whose engine is a dictionary of live tensors; all else is what a replica has."""

    def __init__(
        self, shapes: Shapes, sync: Any = None, *, is_blind: bool = False, is_skewed: bool = False
    ) -> None:
        """`is_skewed`: its engine alters what it loads for ever, restarts or not."""
        torch.set_num_threads(1)
        self._incarnation = uuid4().hex
        self._engine = BlindEngineStandIn(shapes) if is_blind else EngineStandIn(shapes)
        self._guard = SwapGuard(self._engine, "keep", lambda results: None)  # type: ignore[arg-type]
        self._engine.fault = "alter_always" if is_skewed else ""
        self._receiver = NoisyReceiver(shapes)
        self._pool = ThreadPoolExecutor(1)
        self._fault = ""
        self._is_elsewhere = False
        if sync is not None:
            self._catch_up(sync)

    def _catch_up(self, sync: Any) -> None:
        committed = ray.get(sync.committed.remote(), timeout=20)
        if committed.snapshot:
            payload = committed.snapshot[0]
            if not isinstance(payload, WeightFile):
                payload = ray.get(payload, timeout=20)
            self._receiver.stage_payload(committed.plan, committed.version, payload)
            self._swap(committed.version, committed.check)

    async def catch_up(self, sync: Any) -> None:
        """What a replica does as it starts, for one that has started before."""
        await self._in_order(self._catch_up, sync)

    async def fail_at(self, fault: str) -> None:
        """When asked to stage: `die`, `stop`, `flip` a bit on the line, once.

        In mid-swap: `break`, `die_in_swap`, `stop_in_swap`. After it: `alter` a live number, once
        or, until a restart, `alter_always`.
        """
        self._fault = self._engine.fault = fault

    async def damage(self, name: str) -> None:
        """A bit flips in the memory that the last version came into; what is live stays whole."""
        self._taken[name].view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    async def move(self, elsewhere: bool) -> None:
        """From now on behave as on another node than the learner's, or as on the same."""
        self._is_elsewhere = elsewhere

    async def live(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Version and a copy of the live weights."""
        held = {name: tensor.clone() for name, tensor in self._engine.live.items()}
        return self._engine.version, held

    async def is_halted(self) -> bool:
        """Whether its engine samples nothing."""
        return self._engine.is_paused

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
        if self._fault == "flip":
            self._receiver.be_noisy()
        digests = await self._in_order(self._receiver.stage, plan, version)
        self._fault = "" if self._fault == "flip" else self._fault
        return digests

    async def weights_load(
        self, plan: BucketPlan, version: int, payload: Sequence[Any]
    ) -> list[str]:
        buffer = payload[0] if isinstance(payload[0], WeightFile) else await payload[0]
        return await self._in_order(self._receiver.stage_payload, plan, version, buffer)

    async def weights_swap(self, version: int, check: Check) -> Swapped:
        return await self._in_order(self._swap, version, check)

    async def weights_discard(self) -> None:
        await self._in_order(self._receiver.discard)

    async def staged_version(self) -> int:
        """-1 where nothing is staged."""
        staged = self._receiver.staged_version
        return -1 if staged is None else staged

    def _swap(self, version: int, check: Check) -> Swapped:
        self._taken = self._receiver.take(version)
        return self._guard.swap(self._taken, version, check, list)

    async def _in_order(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)


def _scores(live: Mapping[str, torch.Tensor], token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
    total = sum(float(tensor.double().sum()) for tensor in live.values())
    return np.full(len(token_ids) - 1, -total / 1000.0, dtype=np.float32)


def _sockets() -> int:
    folder = f"/proc/{os.getpid()}/fd"
    links = []
    for entry in os.listdir(folder):
        try:
            links.append(os.readlink(f"{folder}/{entry}"))
        except FileNotFoundError:
            continue
    return sum(link.startswith("socket:") for link in links)
