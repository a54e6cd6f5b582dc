"""Driving a generation engine from a test: submit, wait for what comes back, compare with HF."""

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from areal_ray.engines.protocols import (
    GenerationChunk,
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    SamplingConfig,
)
from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig

DEADLINE_S = 60.0


class Served:
    """A started engine and what it has sent back, in order, a list for each engine step."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.engine = engine
        self.steps: queue.Queue[list[GenerationResult]] = queue.Queue()
        self.results: dict[str, GenerationResult] = {}
        self.chunks: dict[str, list[GenerationChunk]] = {}
        self.wrong: list[str] = []
        """Broken promises about the order of chunks and results."""
        self.pause_after: str = ""
        self._ended: set[str] = set()
        self._has_chunks = threading.Condition()

    def start(self) -> None:
        """Begin serving."""
        self.engine.start(self.receive, self.receive_chunks)

    def receive(self, step: list[GenerationResult]) -> None:
        """Called by the engine; stops it at once where a test wants to act in mid-turn."""
        if any(result.request_id == self.pause_after for result in step):
            self.engine.pause()
        self._ended |= {result.request_id for result in step}
        self.steps.put(step)

    def receive_chunks(self, step: list[GenerationChunk]) -> None:
        """Called by the engine."""
        names = [chunk.request_id for chunk in step]
        self.wrong += [f"{name}: a chunk after its result" for name in names if name in self._ended]
        if len(names) != len(set(names)):
            self.wrong.append(f"two chunks of a turn in one step: {names}")
        with self._has_chunks:
            for chunk in step:
                self.chunks.setdefault(chunk.request_id, []).append(chunk)
            self._has_chunks.notify_all()

    def wait_chunks(self, request_id: str, count: int = 1) -> None:
        """Until a streamed turn has sent so many."""
        with self._has_chunks:
            assert self._has_chunks.wait_for(
                lambda: len(self.chunks.get(request_id, ())) >= count, DEADLINE_S
            ), f"no {count} chunks of {request_id} came"

    def run_until(self, request_id: str, requests: Sequence[GenerationRequest]) -> None:
        """Submit, and leave the engine paused right after the step that ended one of them."""
        self.pause_after = request_id
        self.engine.submit(requests)
        self.wait(request_id)

    def wait(self, *request_ids: str) -> list[GenerationResult]:
        """These requests' results, once all are there."""
        while not all(request_id in self.results for request_id in request_ids):
            for result in self.steps.get(timeout=DEADLINE_S):
                assert result.request_id not in self.results, "a request came back twice"
                self.results[result.request_id] = result
        return [self.results[request_id] for request_id in request_ids]

    def run(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Submit together and wait for all."""
        self.engine.submit(requests)
        return self.wait(*(request.request_id for request in requests))


@contextmanager
def serving(folder: Path, *, version: int = 0, **config: Any) -> Iterator[Served]:
    """A running engine over a model folder, closed at the end."""
    engine = TorchGenerationEngine(folder, TorchGenerationConfig(**config), version=version)
    served = Served(engine)
    served.start()
    try:
        yield served
    finally:
        engine.close()


def request(
    name: str,
    prompt: Sequence[int] | np.ndarray,
    *,
    seed: int = 0,
    key: str = "",
    streamed: bool = False,
    top: int = 0,
    **sampling: Any,
) -> GenerationRequest:
    """A request with sampling fields by keyword."""
    return GenerationRequest(
        request_id=name,
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        sampling=SamplingConfig(**sampling),
        seed=seed,
        prefix_key=key,
        is_streamed=streamed,
        top_logprobs=top,
    )


def random_prompt(seed: int, length: int, vocab_size: int = 384) -> np.ndarray:
    """Ordinary token ids, none of the special ones."""
    return np.random.default_rng(seed).integers(3, vocab_size, length).astype(np.int32)


def hf_model(folder: Path) -> Any:
    """The same model in Transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hf_logprobs(
    model: Any, sent: GenerationRequest, result: GenerationResult
) -> tuple[np.ndarray, np.ndarray]:
    """[N] log-probs of the sampled tokens and [N] the greedy token before each, by HF."""
    ids = torch.from_numpy(np.concatenate([sent.prompt_ids, result.token_ids]).astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, len(sent.prompt_ids) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / (sent.sampling.temperature or 1.0), -1)
    chosen = logprobs.gather(1, ids[len(sent.prompt_ids) :, None])[:, 0]
    return chosen.numpy(), logits.argmax(-1).numpy()


def forcing_weights(
    shapes: dict[str, tuple[int, ...]], token_id: int, *, scale: float = 100.0
) -> dict[str, torch.Tensor]:
    """Weights of a model with an untied head that always samples one token."""
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, tensor in weights.items():
        if "norm" in name:
            tensor.fill_(1.0)
    weights["model.embed_tokens.weight"].fill_(1.0)
    weights["lm_head.weight"][token_id] = scale
    return weights
