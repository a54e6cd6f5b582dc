"""What a recipe says about how weights travel. Light to import: no Ray, no torch."""

from typing import Literal

from pydantic import Field, field_validator

from areal_ray.core.buckets import ALIGNMENT_BYTES
from areal_ray.core.config import Config


class WeightsConfig(Config):
    """How new weights reach the rollout replicas."""

    transport: Literal["collective", "object_store", "disk"] = "collective"
    """collective: broadcast over a group of our own; object_store: one payload that each replica
    reads (fleets that come and go); disk: safetensors files in the run folder, which every node
    must mount."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Of the collective group. gloo works everywhere; nccl needs a GPU of its own per member."""
    shares_memory: bool = True
    """With collective over gloo: replicas on the learner's node read the weights in its memory,
    and only those on other nodes get them over the network."""
    bucket_bytes: int = Field(16 * 1024**2, ge=ALIGNMENT_BYTES)
    """Weights travel in slices of this size; a multiple of 16."""
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    """Floating-point weights are cast to it by the learner; empty = sent as they are."""
    timeout_s: float = Field(120.0, gt=0.0)
    """Bound of every wait in a publish: joining, staging, swapping."""
    snapshot: Literal["lazy", "always"] = "lazy"
    """lazy: the learner keeps the bytes of the last committed version, and they enter the object
    store when a late or restarted replica (or evaluation) asks. always: after every publish; they
    then outlive the learner, for the price of one copy of the model per publish."""

    @field_validator("bucket_bytes")
    @classmethod
    def _aligned(cls, bucket_bytes: int) -> int:
        if bucket_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"is {bucket_bytes}; must be a multiple of {ALIGNMENT_BYTES}.")
        return bucket_bytes
