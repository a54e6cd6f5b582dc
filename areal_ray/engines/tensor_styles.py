"""Which ranks can compute a model together: its layers' split by Transformers' own plan, its heads.

Without torch, so that a number of ranks that does not go with a model is told before anything
starts.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from areal_ray.errors import EngineError

KEY = "learner.engine.tensor_parallel"
CUT = ("colwise", "rowwise")
PARTIAL = "replicated_with_grad_allreduce"
SEQUENCE_KEY = "learner.engine.sequence_parallel"
_HEADS = ("num_attention_heads", "num_key_value_heads")
_DIVIDED = (*_HEADS, "intermediate_size")


def tensor_styles(config: Any) -> dict[str, str]:
    """Name in a layer -> style.

    Args:
        config: A Transformers config.

    Raises:
        EngineError: The model has no plan, or one with styles that are not covered here.
    """
    plan = getattr(config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise EngineError(
            f"{KEY}: Transformers has no plan for models of type {config.model_type}; must be 1 "
            "with them."
        )
    styles = {name.partition(".*.")[2]: style for name, style in plan.items() if ".*." in name}
    unknown = sorted(set(styles.values()) - {*CUT, PARTIAL})
    if unknown:
        raise EngineError(
            f"{KEY}: the model's plan asks for {', '.join(unknown)}, which is not covered; must "
            "be 1 with this model."
        )
    return styles


def split_problems(folder: Path, width: int) -> Iterator[str]:
    """Why so many ranks cannot compute the layers of a checkpoint together, a line each."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    try:
        tensor_styles(config)
    except EngineError as error:
        yield f"{error} It is {width}, with {folder}."
        return
    yield from _undivided(config, _DIVIDED, KEY, folder, width)


def sequence_problems(folder: Path, width: int) -> Iterator[str]:
    """Why so many ranks cannot share the rows of a checkpoint, a line each."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    yield from _undivided(config, _HEADS, SEQUENCE_KEY, folder, width)


def attention_window(text: Any) -> int | None:
    """How far some layers see, by a model's own config; None = all see everything."""
    limits = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((limit for limit in limits if limit), default=None)


def _undivided(
    config: Any, names: Iterable[str], key: str, folder: Path, width: int
) -> Iterator[str]:
    text = config.get_text_config()
    for name in names:
        number = getattr(text, name, None)
        if isinstance(number, int) and number % width:
            yield (
                f"{key}: is {width}, and {folder} has {name} {number}; must divide it. Use "
                "another number."
            )
