"""LearnerActor: owns one rank of a train engine. A thin shell: Ray outside, the engine inside.

Not restarted when it dies: its optimizer state would be gone. The run ends with its name and
resumes from the last checkpoint.
Waits for: the other ranks, in every step; bounded by learner.engine.collective_timeout_s.
"""

import asyncio
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import numpy as np
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.core.buckets import BucketPlan
from areal_ray.core.canary import Probe, Sent
from areal_ray.core.journal import JournalPlace, read_group_bytes
from areal_ray.core.trajectory import Group, decode_group
from areal_ray.engines.lora_config import LoraSetup
from areal_ray.engines.preference import PairEvaluation, PairTask
from areal_ray.engines.protocols import StepStats
from areal_ray.engines.sft import OfflineDistillationConfig, SftConfig, SftEvaluation
from areal_ray.engines.train_config import Companions, LearnerConfig
from areal_ray.runtime.answers import ask
from areal_ray.runtime.garbage import collect_rarely
from areal_ray.runtime.membership import Membership
from areal_ray.runtime.pair_source import PairSource
from areal_ray.runtime.sft_source import SftSource
from areal_ray.runtime.weight_files import WeightFile

if TYPE_CHECKING:  # torch is imported where the actor runs, not in the driver that spawns it
    from areal_ray.engines.process_group import Rendezvous
    from areal_ray.engines.torch_train import TorchTrainEngine
    from areal_ray.runtime.weight_sender import WeightSender

_LET_GO_S = 30.0
"""Another rank ends its part of a publish within it."""

T = TypeVar("T")
Share = Sequence[Sequence[tuple[Any, JournalPlace | None]]]
"""[minibatch][group] -> reference to its payload, and where its bytes lie in the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSetup:
    """What every rank of a learner is built from."""

    model_path: str
    config: LearnerConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    companions: Companions = field(default_factory=Companions)
    temperature: float = 1.0
    total_steps: int
    num_ranks: int = 1
    resume_from: str = ""
    """Checkpoint folder, of which optimizer and adapters are restored; empty = a fresh start."""
    journal: str = ""
    """Folder of the run's journal."""
    versions: str = ""
    """Folder that snapshots of the weights are written to; empty = they are handed out as bytes."""
    sft: SftConfig | None = None
    pairs: PairTask | None = None
    distillation: OfflineDistillationConfig | None = None
    lora: LoraSetup | None = None
    """Adapters that train in place of all weights; None = all weights."""
    import_roots: tuple[str, ...] = ()
    probe_tokens: int = 0
    """Length of the prompt on which replicas have to agree with the learner; 0 = none."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LearnerHealth:
    """One rank's account of itself."""

    name: str
    incarnation: str
    steps_taken: int


class LearnerActor:
    """One rank of the training service."""

    def __init__(self, name: str, rank: int, setup: LearnerSetup) -> None:
        self._name = name
        self._rank = rank
        self._setup = setup
        self._incarnation = uuid4().hex[:12]
        self._meeting: Rendezvous | None = None
        self._engine: TorchTrainEngine | None = None
        self._sft: SftSource | None = None
        self._pairs: PairSource | None = None
        self._sender: WeightSender | None = None
        self._others: Sequence[ActorHandle] = ()
        self._probe: Probe | None = None
        # All work of the engine on one thread: collectives must keep their order, and the actor
        # answers health() meanwhile. Weights travel on another, beside the engine's work.
        self._work = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._transfers = ThreadPoolExecutor(1, thread_name_prefix="weights")

    async def open(self) -> str:
        """Rank 0: where the other ranks will find it."""
        from areal_ray.engines.process_group import Rendezvous

        self._meeting = Rendezvous.open(ray.util.get_node_ip_address(), self._setup.num_ranks)
        return self._meeting.address

    async def start(self, address: str, ranks: Sequence[ActorHandle] = ()) -> None:
        """Load the engine and meet the other ranks.

        Args:
            address: Where rank 0 waits for them.
            ranks: All of them, this one included; where rank 0 needs them to read its weights.
        """
        self._others = ranks[1:]
        await self._on(self._work, self._start, address)

    def _start(self, address: str) -> None:
        from areal_ray.engines.process_group import RankGroup
        from areal_ray.engines.torch_train import TorchTrainEngine
        from areal_ray.runtime.weight_sender import WeightSender

        setup = self._setup
        ranks = RankGroup.join(
            self._meeting or address,
            self._rank,
            setup.num_ranks,
            device=setup.config.engine.device,
            timeout_s=setup.config.engine.collective_timeout_s,
        )
        self._engine = TorchTrainEngine(
            setup.model_path,
            setup.config,
            objective=setup.objective,
            temperature=setup.temperature,
            total_steps=setup.total_steps,
            ranks=ranks,
            companions=setup.companions,
            pairs=setup.pairs,
            distillation=setup.distillation,
            lora=setup.lora,
        )
        if setup.resume_from:
            self._engine.load(Path(setup.resume_from))
        versions = Path(setup.versions) if setup.versions else None
        self._sender = WeightSender(self._engine.weights, versions)
        share: dict[str, Any] = {
            "roots": setup.import_roots,
            "seed": setup.seed,
            "rank": self._rank // setup.config.engine.ranks_per_share,
            "num_ranks": setup.num_ranks // setup.config.engine.ranks_per_share,
        }
        if setup.sft is not None:
            self._sft = SftSource(setup.sft, setup.model_path, **share)
        if setup.pairs is not None:
            self._pairs = PairSource(setup.pairs.config, setup.model_path, **share)
        collect_rarely()

    # Training

    async def train_step(self, share: Share, version: int, oldest_version: int) -> StepStats:
        """One RL step on this rank's share of the groups."""
        return await self._on(self._work, self._train_step, share, version, oldest_version)

    def _train_step(self, share: Share, version: int, oldest_version: int) -> StepStats:
        groups = iter(self._fetch([group for part in share for group in part]))
        minibatches = [[next(groups) for _ in part] for part in share]
        stats = self._ready().train_step(minibatches, version, oldest_version)
        self._take_probe()
        return _with_memory(stats)

    def _take_probe(self) -> None:
        if self._setup.probe_tokens:  # here, where all ranks are at it together
            self._probe = self._ready().probe(self._setup.probe_tokens)

    def _fetch(self, wanted: Sequence[tuple[Any, JournalPlace | None]]) -> list[Group]:
        try:  # all at once: small payloads come from the driver, a round trip each
            payloads = ray.get([ref for ref, _ in wanted])
        except RayError:
            payloads = [self._fetch_or_read(ref, place) for ref, place in wanted]
        return [decode_group(payload) for payload in payloads]

    def _fetch_or_read(self, ref: Any, place: JournalPlace | None) -> bytes:
        try:
            return ray.get(ref)
        except RayError:
            if place is None:
                raise
            # The node that held the bytes is gone; a committed group is in the journal too.
            return read_group_bytes(Path(self._setup.journal), place)

    async def sft_step(self, phase: int, first: int) -> StepStats:
        """One supervised step on this rank's slice of the batch that begins at a row."""
        return await self._on(self._work, self._sft_step, phase, first)

    def _sft_step(self, phase: int, first: int) -> StepStats:
        assert self._sft is not None, "only a run of kind sft has phases"
        return _with_memory(self._ready().sft_step(self._sft.batch(phase, first)))

    async def sft_evaluate(self, phase: int) -> SftEvaluation:
        """Teacher-forced scores on the held-out examples of a phase."""
        return await self._on(self._work, self._sft_evaluate, phase)

    def _sft_evaluate(self, phase: int) -> SftEvaluation:
        assert self._sft is not None, "only a run of kind sft has phases"
        return self._ready().evaluate_sft(self._sft.held_out(phase))

    async def pair_step(self, first: int) -> StepStats:
        """One step on this rank's slice of the batch that begins at a pair."""
        return await self._on(
            self._work, lambda: self._ready().pair_step(self._compares().batch(first))
        )

    async def pair_evaluate(self) -> PairEvaluation:
        """How well held-out pairs are told apart."""
        return await self._on(
            self._work, lambda: self._ready().evaluate_pairs(self._compares().held_out())
        )

    # Checkpoints

    async def save(self, folder: str) -> None:
        """Model, optimizer and random state into an existing folder."""
        await self._on(self._work, lambda: self._ready().save(Path(folder)))

    async def restore(self, folder: str) -> None:
        """Go back to what `save` left in a folder."""
        await self._on(self._work, self._restore, folder)

    def _restore(self, folder: str) -> None:
        self._ready().load(Path(folder))
        self._take_probe()

    async def export(self, folder: str) -> None:
        """A Hugging Face checkpoint into an existing folder."""
        await self._on(self._work, lambda: self._ready().export(Path(folder)))

    # Weights: called by the ParamSyncActor, on rank 0 alone. It asks the others where it must.

    async def weights_plan(self, bucket_bytes: int, dtype: str) -> BucketPlan:
        """How the weights are laid out on the wire."""
        return await self._on(self._transfers, self._sends().plan, bucket_bytes, dtype)

    async def weights_join(self, membership: Membership, rank: int) -> str:
        """Join a collective group, or open its meeting point; the address."""
        return await self._on(self._transfers, self._sends().join, membership, rank)

    async def weights_send(
        self, plan: BucketPlan, version: int, is_candidate: bool = False
    ) -> Sent:
        """Send the present weights as `version`; their digests, and the last step's probe.

        A candidate is made ready for `weights_snapshot` alone.
        On the other ranks: give rank 0 what it reads of them meanwhile, and return nothing.
        """
        engine = self._ready()
        if self._rank:
            await self._on(self._transfers, engine.serve_weights)
            return Sent([])
        needed = self._others if engine.is_sharded else ()
        serving = [other.weights_send.remote(plan, version) for other in needed]
        try:
            return await self._on(self._transfers, self._send, plan, version, is_candidate)
        finally:  # one that died is told of rather than the exchange that it broke
            for rank, answer in enumerate(serving, start=1):
                await ask(f"learner-{rank}", answer, "weights_send", _LET_GO_S)

    def _send(self, plan: BucketPlan, version: int, is_candidate: bool) -> Sent:
        try:
            digests = self._sends().send(plan, version, is_candidate=is_candidate)
            return Sent(digests, self._probe)
        finally:
            self._ready().release_weights()

    async def weights_snapshot(
        self, plan: BucketPlan, version: int
    ) -> NDArray[np.uint8] | WeightFile:
        """The sealed bytes of a version sent before, or the file they were written to."""
        return await self._on(self._transfers, self._sends().snapshot, plan, version)

    # Looking in

    async def health(self) -> LearnerHealth:
        """Answers at once, also during a step."""
        steps = self._engine.steps_taken if self._engine is not None else 0
        return LearnerHealth(self._name, self._incarnation, steps)

    def _ready(self) -> "TorchTrainEngine":
        assert self._engine is not None, "start() comes first"
        return self._engine

    def _compares(self) -> PairSource:
        assert self._pairs is not None, "only runs of kind dpo and reward_model have pairs"
        return self._pairs

    def _sends(self) -> "WeightSender":
        assert self._sender is not None, "start() comes first"
        return self._sender

    async def _on(self, pool: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *args)


def _with_memory(stats: StepStats) -> StepStats:
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return replace(stats, metrics={**stats.metrics, "learner/memory_bytes": float(peak_bytes)})
