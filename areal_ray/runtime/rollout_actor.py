"""RolloutActor: owns one generation engine. A thin shell: Ray outside, the engine inside.

Requests come in by submit(); finished turns and chunks of streamed ones leave by collect(), a long
poll that carries all of a client's since, so that one message serves many streams. Its state comes
from the constructor alone: a restarted actor loads the model it was given, then catches up with the
last committed weights before it answers.
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError

from areal_ray.core.buckets import BucketPlan
from areal_ray.core.canary import Check, Swapped
from areal_ray.engines.lora_config import LoraSetup
from areal_ray.engines.protocols import (
    EngineHealth,
    GenerationChunk,
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    PreparesAhead,
)
from areal_ray.errors import DeadlineExceeded, EngineDied, EngineError, PublishError
from areal_ray.runtime.fleet import reach
from areal_ray.runtime.garbage import collect_rarely
from areal_ray.runtime.last_words import end, starting
from areal_ray.runtime.membership import Membership
from areal_ray.runtime.outbox import Outbox
from areal_ray.runtime.rollout_config import RolloutConfig
from areal_ray.runtime.swap_guard import SwapGuard
from areal_ray.runtime.turn_wire import Collected
from areal_ray.runtime.weight_files import WeightFile

T = TypeVar("T")

_POLL_S = 20.0
_FORGET_CLIENT_S = 120.0
_CATCH_UP_S = 300.0


@dataclass(frozen=True, slots=True)
class RolloutHealth:
    """One replica's account of itself."""

    name: str
    incarnation: str
    engine: EngineHealth
    pid: int = 0


def build_engine(
    model_path: str, config: RolloutConfig, *, version: int, lora: LoraSetup | None = None
) -> GenerationEngine:
    """The engine that `rollout.engine.kind` names; each is imported only where it is used."""
    if config.engine.kind == "vllm":
        from areal_ray.engines.vllm_generation import VllmGenerationEngine

        return VllmGenerationEngine(Path(model_path), config.engine, version=version, lora=lora)
    if config.engine.kind == "sglang":
        from areal_ray.engines.sglang_generation import SglangGenerationEngine

        return SglangGenerationEngine(Path(model_path), config.engine, version=version)
    from areal_ray.engines.torch_generation import TorchGenerationEngine

    return TorchGenerationEngine(Path(model_path), config.engine, version=version, lora=lora)


def _fetched(reference: Any, what: str) -> Any:
    if isinstance(reference, WeightFile):
        return reference
    try:
        return ray.get(reference, timeout=_CATCH_UP_S)
    except GetTimeoutError as error:
        raise DeadlineExceeded(
            f"a starting rollout waited {_CATCH_UP_S:g} s for {what}; the ParamSyncActor owes it"
        ) from error


class RolloutActor:
    """One replica of the inference service."""

    def __init__(
        self,
        name: str,
        model_path: str,
        config: RolloutConfig,
        *,
        version: int,
        lora: LoraSetup | None = None,
        sync: str = "",
        pinned: bool = False,
    ) -> None:
        """Load the engine.

        Args:
            name: For messages.
            model_path: Hugging Face checkpoint folder of `version`.
            config: Engine, sampling and update policy.
            version: Version of the weights at `model_path`, with the adapters of `lora` if any.
            lora: Of the adapters that versions consist of; None = of all weights.
            sync: Name of the ParamSyncActor; empty for an engine that serves alone.
            pinned: Serve `version` until told otherwise: no catching up by itself.
        """
        self._name = name
        self._incarnation = uuid4().hex[:12]
        self._clients: dict[str, str] = {}
        self._outboxes: defaultdict[str, Outbox] = defaultdict(Outbox)
        self._loop: asyncio.AbstractEventLoop | None = None
        # One thread, so that the steps of one publish can never overtake each other.
        self._transfers = ThreadPoolExecutor(1, thread_name_prefix="weights")
        with starting(name):
            self._engine = build_engine(model_path, config, version=version, lora=lora)
            self._guard = SwapGuard(
                self._engine, config.on_weight_update, self._on_results, self._on_chunks
            )
            from areal_ray.runtime.weight_receiver import WeightReceiver  # imports torch

            ahead = self._engine.prepare_swap if isinstance(self._engine, PreparesAhead) else None
            self._receiver = WeightReceiver(self._engine.weight_shapes(), ahead)
            self._engine.start(self._guard.on_results, self._guard.on_chunks)
            if sync and not pinned:
                self._catch_up(reach(sync))
        collect_rarely()

    def _catch_up(self, sync: Any) -> None:
        """Before the first request can come, as that waits for the constructor.

        Raises:
            PublishError: The engine does not sample from the committed weights.
        """
        committed = _fetched(sync.committed.remote(), "the committed version")
        if committed.snapshot and committed.version > self._engine.health().version:
            payload = _fetched(committed.snapshot[0], f"version {committed.version}")
            self._receiver.stage_payload(committed.plan, committed.version, payload)
            proof = self._swap(committed.version, committed.check).proof
            if proof.difference:
                raise PublishError(
                    f"{self._name} at version {committed.version}: {proof.difference}. Its engine "
                    "does not compute what the learner does; see weights.canary"
                )

    # Sampling

    async def submit(self, client: str, requests: Sequence[GenerationRequest]) -> None:
        """Queue turns of `client`; it fetches them with collect()."""
        self._loop = self._loop or asyncio.get_running_loop()
        self._outboxes[client].submitted(len(requests))
        for request in requests:
            self._clients[request.request_id] = client
        try:
            self._engine.submit(requests)
        except EngineDied as died:
            end(self._name, died)

    async def collect(self, client: str, linger_s: float = 0.0) -> Collected:
        """Turns of `client` that ended, and what its streamed ones sampled, since the last call.

        Waits for the first of them. All streams of an engine step come in one answer; while the
        client is at work on it, further steps join in the next.

        Args:
            client: As given to submit().
            linger_s: Once one turn has ended, wait this long for others to travel along.

        Returns:
            Nothing after some seconds without any, to be asked again.
        """
        outbox = self._outboxes[client]
        await outbox.wait(_POLL_S, linger_s)
        return outbox.take()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End turns now; they come back as aborted."""
        self._engine.abort(request_ids)

    async def pause(self, *, asleep: bool = False) -> None:
        """Stop sampling; turns stay. With `asleep` the memory of keys and values is given back.

        Comes after what of a publish is under way here; later ones reach a paused replica too.
        """
        await self._in_order(lambda: self._guard.pause(asleep=asleep))

    async def resume(self) -> None:
        """Go on after pause(), woken first; one whose weights are not proven stays halted."""
        await self._in_order(self._guard.resume)

    def _on_results(self, results: list[GenerationResult]) -> None:
        assert self._loop is not None, "results cannot precede the first submit()"
        if any(result.error for result in results):
            self._end_with_engine()
        self._loop.call_soon_threadsafe(self._deliver, results)

    def _end_with_engine(self) -> None:
        """End where a process of the engine's own did, so that Ray starts both anew.

        Whoever waits for its turns then asks for them again; answered with the failure, they would
        fail their episodes, and an idle replica that fails at once would draw all others to it.
        """
        try:
            self._engine.health()
        except EngineDied as died:
            end(self._name, died)
        except EngineError:
            return

    def _on_chunks(self, chunks: list[GenerationChunk]) -> None:
        assert self._loop is not None, "chunks cannot precede the first submit()"
        self._loop.call_soon_threadsafe(self._deliver_chunks, chunks)

    def _deliver(self, results: list[GenerationResult]) -> None:
        for result in results:
            client = self._clients.pop(result.request_id, None)
            if client is not None:
                self._outboxes[client].add_result(result)
        self._forget_gone_clients()

    def _deliver_chunks(self, chunks: list[GenerationChunk]) -> None:
        for chunk in chunks:
            client = self._clients.get(chunk.request_id)
            if client is not None:
                self._outboxes[client].add_chunk(chunk)
        self._forget_gone_clients()

    def _forget_gone_clients(self) -> None:
        # A client that died never collects: its turns must neither pile up nor use slots.
        now = time.monotonic()
        gone = [c for c, box in self._outboxes.items() if now - box.last_seen_s > _FORGET_CLIENT_S]
        for client in gone:
            del self._outboxes[client]
            orphans = [r for r, owner in self._clients.items() if owner == client]
            for request_id in orphans:
                del self._clients[request_id]
            self._engine.abort(orphans)

    # Weights: called by the ParamSyncActor

    async def incarnation(self) -> str:
        """Differs after every restart: whoever held a group with this actor has to re-form it."""
        return self._incarnation

    async def weights_join(self, membership: Membership, rank: int) -> str:
        """Join the collective group of the next publishes; the address of its meeting point."""
        return await self._in_order(self._receiver.join, membership, rank)

    async def weights_stage(self, plan: BucketPlan, version: int) -> list[str]:
        """Receive a version into staging memory beside the live weights; its digests."""
        return await self._in_order(self._receiver.stage, plan, version)

    async def weights_load(
        self, plan: BucketPlan, version: int, payload: Sequence[Any]
    ) -> list[str]:
        """Stage a version out of the object store; its digests.

        Args:
            plan: How the bytes are laid out.
            version: What they become.
            payload: The one reference to them, in a list so that Ray passes it on unread; or the
                one file.
        """
        buffer = payload[0] if isinstance(payload[0], WeightFile) else await payload[0]
        return await self._in_order(self._receiver.stage_payload, plan, version, buffer)

    async def weights_swap(self, version: int, check: Check) -> Swapped:
        """Make the staged version the live one and prove it.

        An engine whose proof fails is halted until a later swap is proven.
        """
        return await self._in_order(self._swap, version, check)

    async def weights_discard(self) -> None:
        """Forget what is staged."""
        await self._in_order(self._receiver.discard)

    def _swap(self, version: int, check: Check) -> Swapped:
        tensors = self._receiver.take(version)
        try:
            return self._guard.swap(tensors, version, check, lambda: list(self._clients))
        except EngineDied as died:  # weights by half: nobody is to wait for it
            end(self._name, died)

    async def _in_order(self, function: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._transfers, function, *args)

    # Looking in

    async def health(self) -> RolloutHealth:
        """The engine's account of itself."""
        self._end_with_engine()
        return RolloutHealth(self._name, self._incarnation, self._engine.health(), os.getpid())

    async def version(self) -> int:
        """Version that the next token will carry."""
        return self._engine.health().version

    async def close(self) -> None:
        """End the engine's loop."""
        self._engine.close()
