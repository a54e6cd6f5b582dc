"""What a recipe says about the inference service. Light to import: no Ray, no torch."""

from pydantic import Field, model_validator

from areal_ray.core.config import Config
from areal_ray.engines.protocols import OnWeightUpdate, SamplingConfig
from areal_ray.engines.sglang_generation_config import SglangGenerationConfig
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.engines.vllm_generation_config import VllmGenerationConfig


class RolloutConfig(Config):
    """How many engines, of what kind, and how they sample."""

    replicas: int = Field(1, ge=1)
    """Rollout actors, each with an engine of its own."""
    engine: TorchGenerationConfig | VllmGenerationConfig | SglangGenerationConfig = (
        TorchGenerationConfig()
    )
    """Which engine (kind), and its own keys."""
    sampling: SamplingConfig = SamplingConfig()
    on_weight_update: OnWeightUpdate = "keep"
    """What becomes of running requests when weights change: keep their KV cache, recompute it
    under the new weights, or drain them first."""
    num_cpus: float = Field(0.2, ge=0.0)
    """CPUs that Ray reserves for each."""
    num_gpus: float = Field(0.0, ge=0.0)
    """GPUs that Ray reserves for each."""

    @property
    def tensor_parallel(self) -> int:
        """GPUs over which one replica's model is split."""
        return getattr(self.engine, "tensor_parallel", 1)

    @model_validator(mode="after")
    def _check_servers(self) -> "RolloutConfig":
        engine = self.engine
        if engine.kind != "sglang":
            return self
        if engine.url and self.replicas > 1:
            raise ValueError(
                f"has replicas {self.replicas} and engine.url; must be 1: each replica needs a "
                "server whose weights it alone changes"
            )
        if not engine.url and engine.tp_size > 1 and self.num_gpus != engine.tp_size:
            raise ValueError(
                f"has num_gpus {self.num_gpus:g} and engine.tp_size {engine.tp_size}; must be as "
                "many: the replica's own GPUs are what its server gets"
            )
        return self
