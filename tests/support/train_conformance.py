"""The same training on every layout of a learner: engine kinds, ranks, and what they are told.

Processes are started once and stay for all layouts: each joins those that have its rank. Every
scenario takes five steps from the same model and the same batches; what came of it (metrics of
each step, weights as exported and as read by a publish) must be the same within rounding.
"""

import multiprocessing
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_ray.algorithms.objective import ObjectiveConfig
from areal_ray.algorithms.objective_parts import GaeConfig, KlConfig
from areal_ray.algorithms.packing import GroupSize, plan_step
from areal_ray.engines.lora_config import ADAPTER_FOLDER, LoraConfig, LoraSetup
from areal_ray.engines.lora_weights import read_adapters
from areal_ray.engines.preference import PairTask, PreferenceConfig, PreferencePair
from areal_ray.engines.process_group import RankGroup, Rendezvous
from areal_ray.engines.sft import OfflineDistillationConfig, SftExample
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import (
    Companions,
    CriticConfig,
    LearnerConfig,
    OptimizerConfig,
    TrainEngineConfig,
)
from tests.support.tiny_groups import random_group
from tests.support.tiny_models import write_tiny_model

NUM_STEPS = 5
SAVED_AFTER = 3
TIMEOUT_S = 240.0
PATIENCE_S = 900.0
"""For all layouts, which take about a minute alone, on a machine with more to do."""
COMPARED = (
    "learner/loss",
    "learner/grad_norm_max",
    "learner/updates",
    "learner/trained_tokens",
    "learner/computed_tokens",
    "learner/entropy_nats",
    "learner/token_accuracy_fraction",
    "learner/kl_reference_nats",
    "learner/kl_teacher_nats",
    "learner/value_loss",
    "learner/value_explained_variance_fraction",
    "learner/pair_accuracy_fraction",
    "learner/lr",
)


@dataclass(frozen=True)
class Layout:
    """One way to lay a learner out."""

    name: str
    engine: TrainEngineConfig
    ranks: int = 1
    resumes: str = ""
    """Layout whose checkpoint the scenario `rl` goes on from; empty = its own."""
    resumes_lora: str = ""
    """The same of the scenario `lora`; empty = as `resumes`."""
    scenarios: tuple[str, ...] = ()
    """Those it takes; empty = all."""


@dataclass
class Outcome:
    """What rank 0 saw of one scenario."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """As exported."""
    read: dict[str, torch.Tensor] = field(default_factory=dict)
    """As a publish reads them."""
    evaluation: tuple[float, ...] = ()
    held: dict[str, float] = field(default_factory=dict)
    """Bytes on the fullest rank, by the last step's metrics."""


def names_of(layouts: Sequence[Layout], *, core: Sequence[str]) -> list[Any]:
    """Parameters of a test, of which `core` alone are in the short suite."""
    return [
        layout.name
        if layout.name in core
        else pytest.param(layout.name, marks=pytest.mark.extended)
        for layout in layouts
    ]


def asked_for(request: pytest.FixtureRequest, layouts: Sequence[Layout]) -> list[Layout]:
    """The first layout, those that the selected tests of a module name, and what these resume."""
    named = {layout.name: layout for layout in layouts}
    wanted = {layouts[0].name}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path:
            wanted.add(item.callspec.params["name"] if hasattr(item, "callspec") else "")
    while more := {
        other
        for name in wanted & named.keys()
        for other in (named[name].resumes, named[name].resumes_lora)
        if other not in wanted
    }:
        wanted |= more
    return [layout for layout in layouts if layout.name in wanted]


def run_layouts(layouts: Sequence[Layout], folder: Path) -> dict[str, dict[str, Outcome]]:
    """[layout][scenario] of all layouts, one after the other, in processes of their own."""
    write_models(folder)
    meetings = [Rendezvous.open("127.0.0.1", layout.ranks, TIMEOUT_S) for layout in layouts]
    places = [meeting.address for meeting in meetings]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # what takes long is imported once for all
    workers = [
        context.Process(target=_work, args=(rank, layouts, places, folder))
        for rank in range(max(layout.ranks for layout in layouts))
    ]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join(PATIENCE_S)
            assert worker.exitcode == 0, f"rank {workers.index(worker)}: exit {worker.exitcode}"
    finally:
        for worker in workers:
            worker.kill()
    return {
        layout.name: torch.load(folder / layout.name / "outcomes.pt", weights_only=False)
        for layout in layouts
    }


def assert_same(found: Mapping[str, Outcome], expected: Mapping[str, Outcome]) -> None:
    """Every scenario that was taken came out as expected, to 1e-5."""
    assert found
    for scenario, outcome in found.items():
        wanted = expected[scenario]
        assert len(outcome.metrics) == len(wanted.metrics) == NUM_STEPS
        for step, (one, other) in enumerate(zip(outcome.metrics, wanted.metrics, strict=True)):
            assert one.keys() == other.keys(), (scenario, step)
            for name, value in other.items():
                where = f"{scenario}, step {step}: {name} {one[name]} is not {value}"
                assert abs(one[name] - value) <= 1e-5 * max(1.0, abs(value)), where
        np.testing.assert_allclose(
            outcome.evaluation, wanted.evaluation, rtol=1e-5, atol=1e-5, err_msg=scenario
        )
        assert outcome.weights.keys() == wanted.weights.keys(), scenario
        for name, tensor in wanted.weights.items():
            told = f"{scenario}: {name}"
            torch.testing.assert_close(
                outcome.weights[name], tensor, atol=1e-5, rtol=0, msg=lambda m, t=told: f"{t}: {m}"
            )
        for name, tensor in outcome.read.items():
            assert tensor.equal(outcome.weights[name]), f"{scenario}: {name} as published"


def write_models(folder: Path) -> None:
    """Tied and untied ones, and one to start from that only rank 0 loads."""
    write_tiny_model(folder / "model")
    write_tiny_model(folder / "untied", "llama", tie_word_embeddings=False)
    write_tiny_model(folder / "teacher", seed=5)
    write_tiny_model(folder / "other", seed=99)


def examples_of(step: int) -> list[SftExample]:
    """The five conversations of a step."""
    rng = np.random.default_rng(100 + step)
    lengths = rng.integers(6, 40, 5)
    return [
        SftExample(rng.integers(4, 300, n).astype(np.int32), np.arange(n) >= 3) for n in lengths
    ]


def _work(rank: int, layouts: Sequence[Layout], places: Sequence[str], folder: Path) -> None:
    torch.set_num_threads(1)
    for layout, place in zip(layouts, places, strict=True):
        if rank >= layout.ranks:
            continue
        home = folder / layout.name
        home.mkdir(exist_ok=True)
        ranks = RankGroup.join(place, rank, layout.ranks, timeout_s=TIMEOUT_S)
        outcomes = {
            name: play(_Stage(layout, ranks, folder))
            for name, play in SCENARIOS.items()
            if not layout.scenarios or name in layout.scenarios
        }
        if rank == 0:
            torch.save(outcomes, home / "outcomes.pt")
        ranks.barrier()
        ranks.close()


@dataclass(frozen=True)
class _Stage:
    """What a scenario is played with, on one rank."""

    layout: Layout
    ranks: RankGroup
    folder: Path

    @property
    def num_shares(self) -> int:
        """Of the data."""
        return self.ranks.size // self.layout.engine.ranks_per_share

    @property
    def share(self) -> int:
        """This rank's."""
        return self.ranks.rank // self.layout.engine.ranks_per_share

    def engine(self, model: str | Path = "model", **how: Any) -> TorchTrainEngine:
        """A new one; what rank 0 loads counts."""
        path = self.folder / model if self.ranks.rank == 0 else self.folder / "other"
        if str(model) not in ("model", "other"):
            path = self.folder / model
        # A small eps would blow rounding up where a gradient is nearly zero.
        optimizer = OptimizerConfig(
            lr=1e-3, eps=1e-4, weight_decay=0.5, warmup_steps=2, gradient_clipping=2.0
        )
        config = LearnerConfig(
            ranks=self.layout.ranks, engine=self.layout.engine, optimizer=optimizer
        )
        return TorchTrainEngine(
            path, config, ranks=self.ranks, total_steps=NUM_STEPS,
            **{"temperature": 0.9, **how},
        )  # fmt: skip

    def shares(self, num_minibatches: int) -> list[list[list[Any]]]:
        """[step][minibatch] this rank's groups; a rank of four has none in some."""
        found = []
        for step in range(NUM_STEPS):
            rng = np.random.default_rng(step)
            groups = [
                random_group(rng, n, siblings=2 + n % 3, prompt_tokens=6 + n) for n in range(5)
            ]
            plan = plan_step(
                [GroupSize(g.num_tokens) for g in groups],
                num_minibatches=num_minibatches, num_ranks=self.num_shares, seed=step,
            ).of_rank(self.share)  # fmt: skip
            found.append([[groups[i] for i in part] for part in plan])
        return found

    def examples(self, step: int) -> list[SftExample]:
        """Five over the ranks, of which the last of four has one."""
        return examples_of(step)[self.share :: self.num_shares]

    def pairs(self, step: int) -> list[PreferencePair]:
        """Three, of which the last of four ranks has none."""
        rng = np.random.default_rng(200 + step)
        every = []
        for _ in range(3):
            prompt = rng.integers(4, 300, 6)
            answers = [
                np.concatenate([prompt, rng.integers(4, 300, n)]).astype(np.int32)
                for n in rng.integers(3, 30, 2)
            ]
            every.append(PreferencePair(*(SftExample(a, np.arange(len(a)) >= 6) for a in answers)))
        return every[self.share :: self.num_shares]

    def ended(
        self, engine: TorchTrainEngine, metrics: list[dict[str, float]], *evaluation: float
    ) -> Outcome:
        """The outcome, with the weights as they are exported and published."""
        from safetensors.torch import load_file

        export = self.folder / self.layout.name / "export"
        engine.export(export)
        kept = [{k: m[k] for k in COMPARED if k in m} for m in metrics]
        held = {k: v for k, v in metrics[-1].items() if k.endswith("_bytes")}
        outcome = Outcome(kept, {}, self._read(engine), evaluation, held)
        if self.ranks.rank == 0:
            outcome.weights = load_file(export / "model.safetensors")
            if (export / ADAPTER_FOLDER).is_dir():
                outcome.weights |= read_adapters(export)
        self.ranks.barrier()
        return outcome

    def _read(self, engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
        """The weights in slices that end anywhere, on a thread beside the engine's."""
        found: dict[str, torch.Tensor] = {}

        def publish() -> None:
            if self.ranks.rank:
                engine.serve_weights()
                return
            for name, tensor in engine.weights().items():
                if isinstance(tensor, torch.Tensor):
                    found[name] = tensor.clone()
                    continue
                count = int(np.prod(tensor.shape))
                cuts = [*range(0, count, count // 3 + 1), count]
                slices = [tensor.read(*cut) for cut in pairwise(cuts)]
                found[name] = torch.cat(slices).view(tensor.shape)
            engine.release_weights()

        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()
        return found


def _rl(stage: _Stage) -> Outcome:
    """Two updates a step, of several passes; the last steps resume from another layout's save."""
    how: dict[str, Any] = {"objective": ObjectiveConfig(kind="decoupled_ppo")}
    engine, shares, metrics = stage.engine(**how), stage.shares(2), []
    for step in range(SAVED_AFTER):
        metrics.append(engine.train_step(shares[step], step).metrics)
    engine.save(stage.folder / stage.layout.name / "saved")
    home = stage.folder / (stage.layout.resumes or stage.layout.name) / "saved"
    engine = stage.engine(home, **how)
    engine.load(home)
    for step in range(SAVED_AFTER, NUM_STEPS):
        metrics.append(engine.train_step(shares[step], step).metrics)
    return stage.ended(engine, metrics)


def _ppo(stage: _Stage) -> Outcome:
    """A critic and a frozen reference beside the policy, and an entropy bonus."""
    objective = ObjectiveConfig(
        kind="ppo", kl=KlConfig(kl_ctl=0.1), gae=GaeConfig(gae_lambda=0.9), entropy_coef=0.01
    )
    beside = Companions(
        reference_path=str(stage.folder / "teacher"),
        critic_path=str(stage.folder / "model"),
        critic=CriticConfig(optimizer=OptimizerConfig(lr=1e-3, eps=1e-4)),
    )
    engine = stage.engine(objective=objective, companions=beside)
    shares = stage.shares(2)
    metrics = [engine.train_step(shares[step], step).metrics for step in range(NUM_STEPS - 1)]
    saved = stage.folder / stage.layout.name / "with critic"
    engine.save(saved)
    engine.load(saved)
    metrics.append(engine.train_step(shares[-1], NUM_STEPS).metrics)
    return stage.ended(engine, metrics)


def _lora(stage: _Stage) -> Outcome:
    """Adapters, near the model itself; the last steps resume from another layout's save."""
    kl = KlConfig(kl_ctl=0.1, estimator="k2", where="loss")
    how = {**_adapters(stage), "objective": ObjectiveConfig(kind="grpo", kl=kl)}
    engine, shares, metrics = stage.engine(**how), stage.shares(2), []
    for step in range(SAVED_AFTER):
        metrics.append(engine.train_step(shares[step], step).metrics)
    engine.save(stage.folder / stage.layout.name / "adapters")
    engine = stage.engine(**how)
    layout = stage.layout
    engine.load(stage.folder / (layout.resumes_lora or layout.resumes or layout.name) / "adapters")
    for step in range(SAVED_AFTER, NUM_STEPS):
        metrics.append(engine.train_step(shares[step], step).metrics)
    return stage.ended(engine, metrics)


def _adapters(stage: _Stage) -> dict[str, Any]:
    own = "other" if stage.ranks.rank else "model"
    return {
        "lora": LoraSetup(config=LoraConfig(rank=4), seed=3),
        "companions": Companions(reference_path=str(stage.folder / own)),
    }


def _sft(stage: _Stage) -> Outcome:
    """Given answers, untied embeddings, a last look at other ones."""
    engine = stage.engine("untied")
    metrics = [engine.sft_step(stage.examples(step)).metrics for step in range(NUM_STEPS)]
    seen = engine.evaluate_sft(stage.examples(NUM_STEPS))
    return stage.ended(engine, metrics, seen.loss, seen.token_accuracy, float(seen.num_examples))


def _distill(stage: _Stage) -> Outcome:
    """Given answers with a frozen teacher's whole distribution."""
    engine = stage.engine(
        companions=Companions(teacher_path=str(stage.folder / "teacher")),
        distillation=OfflineDistillationConfig(answer_weight=0.5),
    )
    metrics = [engine.sft_step(stage.examples(step)).metrics for step in range(NUM_STEPS)]
    return stage.ended(engine, metrics)


def _pairs(stage: _Stage, is_scored: bool, **how: Any) -> Outcome:
    config = PreferenceConfig(source="m:f", steps=NUM_STEPS, batch_size=3)
    beside = Companions(reference_path=str(stage.folder / "model"))
    engine = stage.engine(**{"companions": beside, "pairs": PairTask(config, is_scored), **how})
    metrics = [engine.pair_step(stage.pairs(step)).metrics for step in range(NUM_STEPS)]
    seen = engine.evaluate_pairs(stage.pairs(NUM_STEPS))
    return stage.ended(engine, metrics, seen.loss, seen.accuracy, seen.margin)


SCENARIOS: dict[str, Callable[[_Stage], Outcome]] = {
    "rl": _rl,
    "ppo": _ppo,
    "sft": _sft,
    "distill": _distill,
    "dpo": lambda stage: _pairs(stage, False),
    "reward_model": lambda stage: _pairs(stage, True),
    "lora": _lora,
    "lora dpo": lambda stage: _pairs(stage, False, **_adapters(stage)),
    "lora reward_model": lambda stage: _pairs(stage, True, **_adapters(stage)),
}
