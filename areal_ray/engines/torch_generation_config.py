"""The embedded generation engine's knobs, apart from it: reading a recipe needs no torch."""

import re
from typing import Literal

from pydantic import Field, field_validator

from areal_ray.core.config import Config


class TorchGenerationConfig(Config):
    """The embedded torch generation engine."""

    kind: Literal["torch"] = "torch"
    """Which engine this section configures."""
    max_slots: int = Field(256, ge=1)
    """Turns sampled at once; further ones wait."""
    max_context_tokens: int = Field(0, ge=0)
    """Prompt and sampled tokens of one turn; 0 = what the model allows, at most 8192."""
    max_prefill_tokens_per_step: int = Field(4096, ge=1)
    """Prompt tokens computed between two decode steps. A longer prompt takes several, so that the
    running turns go on meanwhile; with fewer, they stand still for less at a time."""
    kv_cache_bytes: int = Field(4 * 2**30, ge=2**20)
    """Keys and values of running turns; fewer turns run at once where they would need more."""
    kept_sequences: int = Field(256, ge=0)
    """Ended turns kept so that an episode's next turn computes only what is new; 0 = none. They
    use at most a quarter of kv_cache_bytes on top, and are forgotten when weights change."""
    num_threads: int = Field(1, ge=1)
    """Threads of tensor operations. More than the cores that are really free is slower than 1."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto = float32 on CPU, the checkpoint's own on a GPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto = cuda where there is one."""
    forward: Literal["auto", "lean", "hf"] = "auto"
    """lean = our own forward (Llama, Qwen2, Qwen3, Mistral); hf = the model's own; auto = lean
    where it covers the model."""

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device) is None:
            raise ValueError(f"is {device!r}; must be auto, cpu, cuda or cuda:N")
        return device
