"""The environment variables that vLLM reads while it starts, set for just that long.

Its engine process inherits them. Nothing else in a rollout actor does, and a test's process is
left as it was.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from areal_ray.engines.vllm_generation_config import VllmGenerationConfig

Variables = Mapping[str, str | None]
"""Name -> value; None = not set."""


def start_variables(config: VllmGenerationConfig, *, is_cpu: bool) -> Variables:
    """What vLLM's processes have to be told by variables, since no argument says it."""
    variables: dict[str, str | None] = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # an actor has threads
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": "65536",  # a step's outputs are one piece
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }
    if is_cpu:
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # model and scheduler in one process
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with other actors
            "OMP_NUM_THREADS": str(config.num_threads),
        }
        if config.args.get("enforce_eager", True):
            # Two small functions of its sampler would be compiled all the same: half a minute.
            variables["TORCHDYNAMO_DISABLE"] = "1"
    if config.tensor_parallel > 1:
        # Bundle 0 of the replica's placement group is the actor's own (runtime/placement.py).
        bundles = range(1, config.tensor_parallel + 1)
        variables["VLLM_RAY_BUNDLE_INDICES"] = ",".join(map(str, bundles))
        variables["CUDA_VISIBLE_DEVICES"] = None  # Ray hides all from an actor that has none
    return variables


@contextmanager
def environment(variables: Variables) -> Iterator[None]:
    """Set these variables inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Variables) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
