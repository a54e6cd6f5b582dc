"""What a recipe says about how weights travel. Light to import: no Ray, no torch."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_ray.core.buckets import ALIGNMENT_BYTES
from areal_ray.core.config import Config
from areal_ray.runtime.canary_config import CanaryConfig


class WeightsConfig(Config):
    """How new weights reach the rollout replicas."""

    transport: Literal["collective", "object_store", "disk"] = "collective"
    """collective: broadcast over a group of our own; object_store: one payload that each replica
    reads (fleets that come and go); disk: safetensors files in the run folder, which every node
    must mount."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Of the collective group. gloo works everywhere; nccl needs a GPU of its own per member.
    auto: nccl where the learner and each replica reserve one or more whole GPUs, else gloo."""
    shares_memory: bool = True
    """With collective over gloo: replicas on the learner's node read the weights in its memory,
    and only those on other nodes get them over the network."""
    full_every: int = Field(1, ge=1)
    """With collective: to replicas on other nodes every so many versions travel whole, and those
    between as the elements that changed, bit for bit. 1 = all whole. Worth it with dtype bfloat16
    at low learning rates, over slow networks; see docs/performance.md."""
    bucket_bytes: int = Field(16 * 1024**2, ge=ALIGNMENT_BYTES, le=1024**3)
    """Weights travel in slices of this size; a multiple of 16."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Floating-point weights are cast to it by the learner; empty = sent as they are."""
    timeout_s: float = Field(120.0, gt=0.0)
    """Bound of every wait in a publish: joining, staging, swapping."""
    snapshot: Literal["lazy", "always"] = "lazy"
    """lazy: the learner keeps the bytes of the last committed version, and they enter the object
    store when a late or restarted replica (or evaluation) asks. always: after every publish; they
    then outlive the learner, for the price of one copy of the model per publish."""
    canary: CanaryConfig = CanaryConfig()

    def placed(self, *, learner_gpus: float, rollout_gpus: float) -> Self:
        """With the backend that `auto` stands for, given the GPUs that each actor reserves."""
        if self.backend != "auto":
            return self
        has_own = learner_gpus >= 1 and rollout_gpus >= 1
        return self.model_copy(update={"backend": "nccl" if has_own else "gloo"})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.full_every > 1 and self.transport != "collective":
            raise ValueError(
                f"full_every: is {self.full_every} with transport {self.transport}, which sends "
                "every version whole; must be 1. Remove it, or set transport: collective."
            )
        return self

    @field_validator("bucket_bytes")
    @classmethod
    def _aligned(cls, bucket_bytes: int) -> int:
        if bucket_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"is {bucket_bytes}; must be a multiple of {ALIGNMENT_BYTES}.")
        return bucket_bytes
