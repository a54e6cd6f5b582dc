"""What leaves a replica while weights are swapped, proven, and found to be wrong."""

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_ray.core.canary import Check, Probe
from areal_ray.core.trajectory import StopReason
from areal_ray.engines.lora_config import LoraConfig, LoraSetup
from areal_ray.engines.protocols import GenerationChunk, GenerationResult, OnWeightUpdate
from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.engines.torch_train import TorchTrainEngine
from areal_ray.engines.train_config import LearnerConfig
from areal_ray.errors import EngineError
from areal_ray.runtime.swap_guard import SwapGuard
from tests.support.generation import forcing_weights, random_prompt, request
from tests.support.tiny_models import write_tiny_model

LONG = 400
"""Tokens of a turn that is still running when the test is over it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("m") / "m", tie_word_embeddings=False)


class AlteredEngine(TorchGenerationEngine):
    """Its live weights are altered in place, or its score waits, when a test says so."""

    alters = False
    lets_score = threading.Event()

    def swap(self, tensors: Any, version: int, policy: Any) -> float:
        idle_s = super().swap(tensors, version, policy)
        if self.alters:
            with torch.inference_mode():
                self._model.forward._weights.layers[1].qkv[3, 5] += 1.0
        return idle_s

    def score(self, token_ids: Any) -> Any:
        assert self.lets_score.wait(30)
        return super().score(token_ids)


class Replica:
    """An engine behind its guard, and all that left it."""

    def __init__(self, folder: Path, policy: OnWeightUpdate = "keep") -> None:
        config = TorchGenerationConfig(max_context_tokens=512)
        self.engine = AlteredEngine(folder, config)
        self.engine.lets_score = threading.Event()
        self.engine.lets_score.set()
        self.left: queue.Queue[GenerationResult] = queue.Queue()
        self.running: list[str] = []
        self.chunks: queue.Queue[GenerationChunk] = queue.Queue()
        self.guard = SwapGuard(
            self.engine,
            policy,
            lambda results: [*map(self.left.put, results)],
            lambda chunks: [*map(self.chunks.put, chunks)],
        )
        self.engine.start(self.guard.on_results, self.guard.on_chunks)

    def submit(self, name: str, num_tokens: int, *, is_streamed: bool = False) -> None:
        self.running.append(name)
        made = request(name, random_prompt(1, 5), max_new_tokens=num_tokens, temperature=0.0)
        self.engine.submit([replace(made, is_streamed=is_streamed)])

    def swap(self, token_id: int, version: int, check: Check) -> Any:
        weights = forcing_weights(dict(self.engine.weight_shapes()), token_id)
        return self.guard.swap(weights, version, check, lambda: self.running)

    def next(self) -> GenerationResult:
        return self.left.get(timeout=30)


@pytest.fixture
def replica(folder: Path) -> Iterator[Replica]:
    replica = Replica(folder)
    yield replica
    replica.engine.lets_score.set()
    replica.engine.close()


def test_a_slow_probe_does_not_hold_up_the_look_at_the_tensors(replica: Replica) -> None:
    replica.engine.alters = True
    replica.engine.lets_score.clear()
    threading.Timer(0.3, replica.engine.lets_score.set).start()
    proof = replica.swap(7, 1, Check(probe_of(replica, 7))).proof
    assert "qkv is live with other bytes" in proof.difference


def probe_of(replica: Replica, token_id: int) -> Probe:
    """What a learner with such forcing weights gives: every token but that one is impossible."""
    shape = replica.engine.weight_shapes()["model.embed_tokens.weight"]
    size = shape[1]
    logits = np.zeros(shape[0])
    logits[token_id] = 100.0 * size  # norm of ones is one
    ids = np.full(4, token_id, np.int32)
    logprob = logits[token_id] - np.logaddexp.reduce(logits)
    return Probe(ids, np.full(3, logprob, np.float32), ("float32",))


def test_a_proven_swap_lets_out_what_was_sampled_meanwhile(replica: Replica) -> None:
    replica.engine.lets_score.clear()
    swapped: list[Any] = []
    check = Check(probe_of(replica, 7))
    work = threading.Thread(target=lambda: swapped.append(replica.swap(7, 1, check)))
    work.start()
    while replica.engine.health().version != 1:
        assert work.is_alive()
    replica.submit("new", 5, is_streamed=True)
    with pytest.raises(queue.Empty):  # sampled, but of weights that are not proven
        replica.left.get(timeout=0.5)
    assert replica.chunks.empty()
    assert replica.engine.health().sampled_tokens >= 5
    replica.engine.lets_score.set()
    result = replica.next()
    work.join(30)
    assert result.token_ids.tolist() == [7] * 5
    streamed = [replica.chunks.get_nowait() for _ in range(replica.chunks.qsize())]
    assert np.concatenate([chunk.token_ids for chunk in streamed]).tolist() == [7] * 5
    assert result.versions.tolist() == [1] * 5
    assert swapped[0].proof.difference == ""
    assert swapped[0].proof.largest_nats < 1e-3
    assert swapped[0].proof.seconds >= 0.3  # the engine sampled meanwhile


def test_turns_of_the_version_before_are_not_kept_back(folder: Path) -> None:
    replica = Replica(folder, "drain")
    replica.engine.lets_score.clear()
    replica.submit("old", 300)
    while not replica.engine.health().sampled_tokens:
        assert replica.left.empty()  # a turn that has not begun would wait for the swap
    work = threading.Thread(target=lambda: replica.swap(7, 1, Check(probe_of(replica, 7))))
    work.start()
    assert replica.next().versions.tolist() == [0] * 300  # although nothing is proven yet
    assert work.is_alive()
    replica.engine.lets_score.set()
    work.join(30)
    replica.engine.close()


@pytest.mark.parametrize("tensors", [True, False])
def test_weights_altered_in_the_live_engine_are_found_and_nothing_leaves(
    replica: Replica, tensors: bool
) -> None:
    replica.submit("running", LONG)
    replica.engine.alters = True
    wrong = probe_of(replica, 8) if not tensors else None  # the learner's is another
    swapped = replica.swap(7, 1, Check(wrong, tensors=tensors))
    if tensors:
        assert swapped.proof.difference.startswith("model.layers.1.qkv is live with other bytes")
    else:
        assert "token 1 of the probe" in swapped.proof.difference
    result = replica.next()
    assert (result.request_id, result.stop_reason) == ("running", StopReason.ABORT)
    assert not result.error
    replica.submit("waits", 4)
    with pytest.raises(queue.Empty):
        replica.left.get(timeout=0.5)
    replica.engine.alters = False
    assert replica.swap(9, 1, Check(probe_of(replica, 9))).proof.difference == ""
    result = replica.next()
    assert (result.token_ids.tolist(), result.versions.tolist()) == ([9] * 4, [1] * 4)


def test_a_swap_that_raises_leaves_an_engine_that_sends_nothing_out(replica: Replica) -> None:
    replica.submit("running", LONG)
    weights = forcing_weights(dict(replica.engine.weight_shapes()), 7)
    del weights["lm_head.weight"]
    with pytest.raises(EngineError, match="missing: lm_head"):
        replica.guard.swap(weights, 1, Check(), lambda: replica.running)
    assert replica.next().stop_reason is StopReason.ABORT
    replica.submit("waits", 4)
    with pytest.raises(queue.Empty):
        replica.left.get(timeout=0.3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_sent_in_bfloat16_are_held_to_what_they_become(tmp_path: Path, dtype: str) -> None:
    write_tiny_model(tmp_path, "qwen3")
    learner = TorchTrainEngine(tmp_path, LearnerConfig())
    sent = {name: tensor.detach().bfloat16() for name, tensor in learner.weights().items()}
    engine = TorchGenerationEngine(
        tmp_path, TorchGenerationConfig(max_context_tokens=64, dtype=dtype)
    )
    guard = SwapGuard(engine, "keep", lambda results: None)
    engine.start(guard.on_results)
    probe = learner.probe(16)
    check = Check(replace(probe, dtypes=(*probe.dtypes, "bfloat16")))
    assert guard.swap(sent, 1, check, list).proof.difference == ""
    for name in sent:
        assert engine.differing(sent | {name: sent[name] * 1.5}) != "", name
    assert engine.differing(sent) == ""  # looking changed nothing of what arrived
    engine.close()


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        ({"architecture": "qwen3"}, {}),
        ({"architecture": "qwen2", "tie_word_embeddings": False}, {}),
        ({"architecture": "llama"}, {"forward": "hf"}),
        ({"architecture": "gpt2"}, {}),
        ({"architecture": "qwen3"}, {"dtype": "bfloat16"}),
        ({"architecture": "mistral"}, {"forward": "hf", "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_every_forward_reads_its_weights_back_and_agrees_with_the_learner(
    tmp_path: Path, model: dict[str, Any], engine: dict[str, Any]
) -> None:
    write_tiny_model(tmp_path, **model)
    learner = TorchTrainEngine(tmp_path, LearnerConfig())
    weights = {name: tensor + 0.01 for name, tensor in learner.weights().items()}
    with torch.no_grad():
        for name, tensor in learner.weights().items():
            tensor.copy_(weights[name])
    generation = TorchGenerationEngine(
        tmp_path, TorchGenerationConfig(max_context_tokens=64, **engine)
    )
    guard = SwapGuard(generation, "keep", lambda results: None)
    generation.start(guard.on_results)
    probe = learner.probe(16)
    assert len(probe.token_ids) == 16
    assert (
        "live with other bytes" not in guard.swap(weights, 1, Check(probe), list).proof.difference
    )
    proof = guard.swap(weights, 1, Check(probe), list).proof
    assert proof.difference == ""
    assert proof.largest_nats is not None
    assert proof.largest_nats < (1e-4 if not engine.get("dtype") else 0.2)
    # Each tensor by itself is looked at.
    for name in weights:
        other = weights | {name: weights[name] * 1.5}
        assert generation.differing(other) != "", name
    diverged = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    generation.swap(diverged, 2, "keep")
    assert generation.differing(diverged) == ""
    generation.close()


def test_the_probe_fits_the_models_window(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, max_position_embeddings=12)
    assert len(TorchTrainEngine(tmp_path, LearnerConfig()).probe(16).token_ids) == 12


def test_adapters_are_proven_as_the_weights_that_they_make(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    lora = LoraSetup(config=LoraConfig(rank=4, alpha=8))
    learner = TorchTrainEngine(tmp_path, LearnerConfig(), lora=lora)
    config = TorchGenerationConfig(max_context_tokens=64)
    generation = TorchGenerationEngine(tmp_path, config, lora=lora)
    guard = SwapGuard(generation, "keep", lambda results: None)
    generation.start(guard.on_results)
    before = learner.probe(8).logprobs
    with torch.no_grad():
        for tensor in learner.weights().values():
            tensor += 0.05
    probe = learner.probe(8)
    assert np.abs(probe.logprobs - before).max() > 0.1
    weights = dict(learner.weights())
    proof = guard.swap(weights, 1, Check(probe), list).proof
    assert proof.difference == ""
    assert proof.largest_nats is not None
    assert proof.largest_nats < 1e-4
    name = next(iter(weights))
    assert generation.differing(weights | {name: weights[name] * 1.5}) != ""
    generation.close()


@pytest.mark.parametrize("asleep", [False, True], ids=["paused", "asleep"])
def test_a_pause_outlasts_a_swap_and_ends_no_halt(replica: Replica, asleep: bool) -> None:
    def samples() -> bool:
        before = replica.engine.health().sampled_tokens
        threading.Event().wait(0.3)
        return replica.engine.health().sampled_tokens > before

    replica.swap(7, 1, Check(probe_of(replica, 7)))
    replica.guard.pause(asleep=asleep)
    replica.submit("a", LONG)
    assert replica.swap(8, 2, Check(probe_of(replica, 7))).proof.difference
    replica.guard.resume()
    replica.submit("b", LONG)
    assert not samples(), "resumed though halted"
    replica.guard.pause(asleep=asleep)
    assert not replica.swap(9, 3, Check(probe_of(replica, 9))).proof.difference
    assert not samples(), "resumed by a swap though paused"
    replica.guard.resume()
    results = {result.request_id: result for result in (replica.next(), replica.next())}
    assert results["a"].stop_reason is StopReason.ABORT
    assert results["b"].token_ids.tolist() == [9] * LONG
    assert set(results["b"].versions.tolist()) == {3}
