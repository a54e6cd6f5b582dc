"""DeepSpeed's own configuration: checked against the recipe, and what DeepSpeed is told in the end.

Without torch and deepspeed, so that a recipe is checked before they load. What DeepSpeed does not
know it passes over in silence; here every key is one of `_PASSED_ON`, or is refused.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from typing import Any

Section = Mapping[str, Any]

_OLDEST, _BEFORE = (0, 19, 8), (0, 20)
"""Releases that were tried: older ones average gradients in another way, without a word."""
_AUTO = "auto"
"""What Transformers' files say where another setting decides; read as if the key were not there."""
_REPORTS = (
    *("comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown"),
    *("dump_state", "steps_per_print"),
)
_PASSED_ON = ("zero_optimization", *_REPORTS)
_ZERO_PASSED_ON = (
    *("stage", "offload_optimizer", "offload_param", "contiguous_gradients", "reduce_scatter"),
    *("reduce_bucket_size", "allgather_partitions", "allgather_bucket_size", "overlap_comm"),
    *("round_robin_gradients", "sub_group_size", "leaf_module", "log_trace_cache_warnings"),
    *("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"),
    *("stage3_param_persistence_threshold", "stage3_model_persistence_threshold"),
    "stage3_module_granularity_threshold",
)
_OFFLOAD_PASSED_ON = ("device", "pin_memory")
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TYPE_KEYS = ("bf16", "bfloat16", "fp16", "amp", "torch_autocast")
_GRADIENT_KEYS = (
    *("gradient_predivide_factor", "prescale_gradients", "gradient_allreduce_op"),
    *("managed_gradient_accumulation", "communication_data_type", "data_types"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
)
_OPTIMIZER_KEYS = ("gradient_clipping", "optimizer", "scheduler")
_ZERO = "config.zero_optimization"


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """What the recipe says in learner.engine, as far as DeepSpeed has a word for it."""

    zero_stage: int
    offload: str
    dtype: str
    device: str
    max_tokens_per_mb: int

    @property
    def offloads(self) -> dict[str, bool]:
        """DeepSpeed's section -> whether it is on."""
        return {
            "offload_optimizer": self.offload != "none",
            "offload_param": self.offload == "all",
        }


def settings(config: Section, keys: EngineKeys, *, gradient_clipping: float) -> dict[str, Any]:
    """All that DeepSpeed is told, of a config that `engine_problems` has passed.

    Args:
        config: What the user passes on.
        keys: What the recipe says.
        gradient_clipping: Largest norm; 0 = a model that never changes.
    """
    passed_on = {key: value for key, value in _given(config).items() if key in _PASSED_ON}
    zero = _given(passed_on.get("zero_optimization", {}))
    for key, is_on in keys.offloads.items():
        tuned = _given(zero.pop(key, None) or {})
        if is_on and (gradient_clipping or key == "offload_param"):
            zero[key] = {"pin_memory": keys.device == "cuda", **tuned, "device": "cpu"}
    if keys.zero_stage < 2:
        zero["overlap_comm"] = False
    return {
        "steps_per_print": 2**31,
        **passed_on,
        # Micro-batches are cut by tokens, as many as a step has: one call ends them all.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": gradient_clipping,
        # torch's fused AdamW is as fast on a CPU as DeepSpeed's, which would have to be compiled.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {**zero, "stage": keys.zero_stage},
    }


def reports(config: Section) -> bool:
    """Whether DeepSpeed is asked to write reports into the log."""
    return any(key in _REPORTS for key in _given(config))


def deepspeed_problem(version_of: Callable[[str], str] = metadata.version) -> str | None:
    """What is wrong with the package that is installed; None = nothing."""
    wanted = (
        f"must be {'.'.join(map(str, _OLDEST))} or later and below {'.'.join(map(str, _BEFORE))}. "
        "Install areal-ray[deepspeed], or choose another learner.engine.kind."
    )
    try:
        version = version_of("deepspeed")
    except metadata.PackageNotFoundError:
        return f"is deepspeed, and the package deepspeed is not installed; it {wanted}"
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if not _OLDEST <= numbers < _BEFORE:
        return f"is deepspeed, and the package deepspeed is {version}; it {wanted}"
    return None


def engine_problems(config: Section, keys: EngineKeys) -> list[str]:
    """Keys that nothing reads or that contradict learner.engine, a line each."""
    given = _given(config)
    return [
        *_unread(given),
        *_batch_problems(given, keys),
        *_type_problems(given, keys),
        *_zero_problems(_section(given.get("zero_optimization")), keys),
    ]


def optimizer_problems(config: Section, ours: Section) -> list[str]:
    """Keys that contradict learner.optimizer, whose values `ours` has, a line each."""
    given = _given(config)
    problems = []
    clipping = given.get("gradient_clipping", ours["gradient_clipping"])
    if clipping != ours["gradient_clipping"]:
        problems.append(_differs("gradient_clipping", clipping, "gradient_clipping", ours))
    kind = _section(given.get("optimizer")).get("type", "AdamW")
    if kind not in ("AdamW", "Adam"):
        problems.append(f"config.optimizer.type: is {kind}; must be AdamW. Take the section out.")
    for key, value in _given(_section(_section(given.get("optimizer")).get("params"))).items():
        where = f"optimizer.params.{key}"
        if key not in ("lr", "betas", "eps", "weight_decay"):
            problems.append(f"config.{where}: nothing reads it here. Take the key out.")
        elif list(_flat(value)) != list(_flat(ours[key])):
            problems.append(_differs(where, value, key, ours))
    if "scheduler" in given:
        kind = _section(given["scheduler"]).get("type", given["scheduler"])
        problems.append(
            f"config.scheduler: is {kind}; learner.optimizer.lr_scheduler_type is "
            f"{ours['lr_scheduler_type']} after {ours['warmup_steps']} warmup_steps, and decides. "
            "Take the section out."
        )
    return problems


def _unread(given: Section) -> Iterator[str]:
    told_later = (*_BATCH_KEYS, *_TYPE_KEYS, *_GRADIENT_KEYS, *_OPTIMIZER_KEYS)
    for key, value in given.items():
        if key not in (*_PASSED_ON, *told_later):
            yield _unknown(f"config.{key}", key, _PASSED_ON)
        elif key == "zero_optimization" and not isinstance(value, Mapping):
            yield f"{_ZERO}: is {value!r}; must be a section."
    for key, value in _given(_section(given.get("zero_optimization"))).items():
        if key not in _ZERO_PASSED_ON:
            yield _unknown(f"{_ZERO}.{key}", key, _ZERO_PASSED_ON)
        elif key in ("offload_optimizer", "offload_param"):
            for name in _given(_section(value)):
                if name not in _OFFLOAD_PASSED_ON:
                    yield _unknown(f"{_ZERO}.{key}.{name}", name, _OFFLOAD_PASSED_ON)


def _batch_problems(given: Section, keys: EngineKeys) -> Iterator[str]:
    for key in _BATCH_KEYS:
        if key in given:
            yield (
                f"config.{key}: is {given[key]}; a step is cut into passes of at most "
                f"max_tokens_per_mb = {keys.max_tokens_per_mb} tokens, as many as it has. "
                "Take the key out."
            )
    for key in _GRADIENT_KEYS:
        if key in given:
            yield (
                f"config.{key}: is {given[key]}; the engine itself sees to an exact mean over the "
                "tokens of all ranks. Take the key out."
            )


def _type_problems(given: Section, keys: EngineKeys) -> Iterator[str]:
    for key in _TYPE_KEYS:
        if not _given(_section(given.get(key))).get("enabled", False):
            continue
        then = "" if keys.dtype == "bfloat16" else ", and set dtype=bfloat16 if that is meant"
        yield (
            f"config.{key}.enabled: is true; dtype is {keys.dtype}: weights are float32, and only "
            f"forward passes are in {keys.dtype}. Take the section out{then}."
        )


def _zero_problems(section: Section, keys: EngineKeys) -> Iterator[str]:
    zero = _given(section)
    stage = zero.get("stage", keys.zero_stage)
    if stage != keys.zero_stage:
        yield (
            f"{_ZERO}.stage: is {stage}, zero_stage is {keys.zero_stage}; must be the same. "
            f"Set zero_stage={stage}, or take the key out."
        )
    if zero.get("overlap_comm") is True and keys.zero_stage < 2:
        yield (
            f"{_ZERO}.overlap_comm: is true with zero_stage {keys.zero_stage}, which sends the "
            "gradient once a step; must be false. Take the key out."
        )
    for key, is_on in keys.offloads.items():
        if zero.get(key) is None:
            continue
        device, ours = _section(zero[key]).get("device", "none"), "cpu" if is_on else "none"
        if device in (ours, _AUTO):
            continue
        wanted = "optimizer" if key == "offload_optimizer" else "all"
        then = f"Set offload={wanted}" if device == "cpu" else "Only cpu is supported: set that"
        yield (
            f"{_ZERO}.{key}.device: is {device}; offload is {keys.offload}, which makes it "
            f"{ours}; must be the same. {then}, or take the section out."
        )


def _differs(where: str, theirs: Any, key: str, ours: Section) -> str:
    name, value = f"learner.optimizer.{key}", ours[key]
    shown = list(value) if isinstance(value, tuple) else value
    return (
        f"config.{where}: is {theirs}, {name} is {shown}; must be the same. Set {name}={theirs}, "
        "or take the key out."
    )


def _flat(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list | tuple) else (value,)


def _given(section: Section) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value != _AUTO}


def _section(value: Any) -> Section:
    return value if isinstance(value, Mapping) else {}


def _unknown(where: str, key: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(key, known, n=1)
    then = f"Did you mean '{near[0]}'?" if near else f"Known: {', '.join(known)}."
    return f"{where}: nothing reads it here; must be taken out. {then}"
