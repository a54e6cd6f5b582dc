"""vLLM on GPUs: the same promises as on the CPU. Needs CUDA and vLLM's CUDA build."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from areal_ray.engines.protocols import GenerationEngine
from areal_ray.engines.vllm_generation_config import VllmGenerationConfig
from areal_ray.engines.vllm_weights import open_weights, shared_weights
from areal_ray.runtime.fleet import spawn
from areal_ray.runtime.placement import NodeSupply, plan_layout, reserve
from areal_ray.runtime.rollout_actor import RolloutActor
from areal_ray.runtime.rollout_config import RolloutConfig
from tests.support.conformance import Capacity, EngineConformance, Subject
from tests.support.generation import hf_logprobs, hf_model, random_prompt, request
from tests.support.ray_session import shared_ray
from tests.support.tiny_models import write_tiny_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
GPU_FIELDS = {"head_dim": 64}
"""vLLM's attention kernels on GPUs want heads that large."""


def _made(folder: Path, capacity: Capacity) -> GenerationEngine:
    from areal_ray.engines.vllm_generation import VllmGenerationEngine

    config = VllmGenerationConfig(
        device="cuda",
        max_context_tokens=capacity.max_context_tokens,
        max_slots=capacity.max_running,
        dtype=capacity.dtype,
        kv_cache_bytes=2**30,
    )
    return VllmGenerationEngine(folder, config)


class TestVllmOnAGpu(EngineConformance):
    subject = Subject(
        "vllm on a GPU",
        _made,
        model_fields=GPU_FIELDS,
        logprob_tolerance=5e-3,  # TF32 and other orders of summation
        keeps_draws=False,
    )


def test_tensors_on_a_gpu_are_shared_as_they_are() -> None:
    tensors = {"a": torch.arange(8.0, device="cuda"), "b": torch.ones(3, device="cuda")}
    with shared_weights(tensors, on_one_gpu=True) as note:
        assert note.handles
    with shared_weights(tensors, on_one_gpu=False) as note:
        assert not note.handles
        found = open_weights(note, torch.device("cuda", 0))
        assert torch.equal(found["a"], tensors["a"].cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_split_over_two_gpus_sits_in_the_replicas_placement_group(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m", tie_word_embeddings=False, **GPU_FIELDS)
    engine = VllmGenerationConfig(tensor_parallel=2, dtype="float32", max_context_tokens=256)
    config = RolloutConfig(engine=engine, num_gpus=2)
    layout = plan_layout(rollout=config)
    sent = [request(f"r{i}", random_prompt(i, 9 + i), seed=i, max_new_tokens=20) for i in range(8)]
    with shared_ray():
        reservation = reserve(layout, [NodeSupply("here", 8.0, 2.0)], deadline_s=60)
        (seat,) = reservation.seats("rollout").values()
        arguments = {"name": "r", "model_path": str(folder), "config": config, "version": 0}
        actor = spawn(RolloutActor, arguments, name="split", seat=seat)
        try:
            ray.get(actor.submit.remote("me", sent), timeout=600)
            results = []
            while len(results) < len(sent):
                collected = ray.get(actor.collect.remote("me"), timeout=120)
                results += getattr(collected, "results", collected)
        finally:
            ray.kill(actor)
            reservation.release()
    model, by_name = hf_model(folder), {result.request_id: result for result in results}
    for one in sent:
        errors = np.abs(
            by_name[one.request_id].logprobs - hf_logprobs(model, one, by_name[one.request_id])[0]
        )
        assert errors.mean() < 5e-3
