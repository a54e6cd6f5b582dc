"""Which engines can hold a turn to a grammar; says so without importing any of them."""

from areal_ray.core.grammars import INSTALL, is_installed
from areal_ray.engines.sglang_generation_config import SglangGenerationConfig
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.engines.vllm_generation_config import VllmGenerationConfig

WHY_SGLANG_CANNOT = (
    "an SGLang server that takes token ids has no tokenizer, without which it constrains nothing, "
    "and it would record the log-probs of what is left of the policy. Use rollout.engine.kind "
    "torch or vllm."
)


def why_unconstrained(
    config: TorchGenerationConfig | VllmGenerationConfig | SglangGenerationConfig,
) -> str:
    """Why an engine of this section holds no turn to a grammar; empty if it can."""
    if config.kind == "sglang":
        return WHY_SGLANG_CANNOT
    return "" if is_installed() else f"llguidance is not installed here. {INSTALL}."
