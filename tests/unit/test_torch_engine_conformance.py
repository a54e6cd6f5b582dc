"""The embedded engine is held to what every generation engine must do."""

from pathlib import Path

from areal_ray.engines.protocols import GenerationEngine
from areal_ray.engines.torch_generation import TorchGenerationEngine
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from tests.support.conformance import Capacity, EngineConformance, Subject
from tests.support.tiny_models import WIDE


def _made(folder: Path, capacity: Capacity, **fields: object) -> GenerationEngine:
    config = TorchGenerationConfig.model_validate(
        {
            "max_context_tokens": capacity.max_context_tokens,
            "max_slots": capacity.max_running,
            "dtype": capacity.dtype,
            **fields,
        }
    )
    return TorchGenerationEngine(folder, config)


class TestLeanForward(EngineConformance):
    subject = Subject("torch", _made)


class TestFallbackForward(EngineConformance):
    subject = Subject(
        "torch, Transformers' forward",
        lambda folder, capacity: _made(folder, capacity, forward="hf"),
    )


class TestPackedWeights(EngineConformance):
    """In oneDNN's order, as those of every model of more than some million parameters are."""

    subject = Subject("torch, packed weights", _made, model_fields=WIDE)


class TestSmallPrefill(EngineConformance):
    """Every prompt but the shortest is computed in parts."""

    subject = Subject(
        "torch, prompts in parts",
        lambda folder, capacity: _made(folder, capacity, max_prefill_tokens_per_step=16),
    )
