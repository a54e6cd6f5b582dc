"""What a recipe says about the inference service. Light to import: no Ray, no torch."""

from pydantic import Field

from areal_ray.core.config import Config
from areal_ray.engines.protocols import OnWeightUpdate, SamplingConfig
from areal_ray.engines.torch_generation_config import TorchGenerationConfig


class RolloutConfig(Config):
    """How many engines, of what kind, and how they sample."""

    replicas: int = Field(1, ge=1)
    """Rollout actors, each with an engine of its own."""
    engine: TorchGenerationConfig = TorchGenerationConfig()
    sampling: SamplingConfig = SamplingConfig()
    on_weight_update: OnWeightUpdate = "keep"
    """What becomes of running requests when weights change: keep their KV cache, recompute it
    under the new weights, or drain them first."""
    num_cpus: float = Field(0.2, ge=0.0)
    """CPUs that Ray reserves for each."""
    num_gpus: float = Field(0.0, ge=0.0)
    """GPUs that Ray reserves for each."""
