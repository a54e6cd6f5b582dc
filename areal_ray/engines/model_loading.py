"""Loading models of Transformers so that they are ready to train."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from areal_ray.engines.train_config import FsdpConfig, TrainEngineConfig
from areal_ray.errors import EngineError


def load_causal_model(
    path: Path | str, config: TrainEngineConfig, *, key: str = "model.path", device: str = ""
) -> Any:
    """A Hugging Face causal language model, ready to train; `key` of the recipe names it.

    `device` other than the config's: where it is to lie; meta = without weights.

    Raises:
        EngineError: The folder holds no model, or not one of this kind.
    """
    from transformers import AutoModelForCausalLM

    return load_model(AutoModelForCausalLM, path, config, key=key, device=device)


def load_model(
    kind: Any,
    path: Path | str,
    config: TrainEngineConfig,
    *,
    key: str,
    device: str = "",
    **fields: Any,
) -> Any:
    """The same for any of Transformers' Auto classes.

    Args:
        kind: The Auto class.
        path: Folder or hub name.
        config: Type, device and checkpointing.
        key: Of the recipe, that names the path.
        device: Where it is to lie; empty = where the config says, meta = without weights.
        fields: Of the model's configuration.

    Raises:
        EngineError: The folder holds no model, or not one of this kind.
    """
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for each rank would tear the run's own display
    weights = torch.float64 if config.dtype == "float64" else torch.float32
    attention = "flash_attention_2" if uses_flash(config) else "sdpa"
    how = {"dtype": weights, "attn_implementation": attention}
    try:
        if device == "meta":
            model: Any = _without_weights(kind, path, how, fields)
        else:
            model = kind.from_pretrained(path, **how, **fields)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        told = " ".join(str(error).split())
        raise EngineError(
            f"{key}: cannot load the model at {path}: {told}; it must be a Hugging Face causal "
            f"language model. Check {key}."
        ) from error
    for module in model.modules():  # the policy that is trained must be the one that sampled
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.eval()
    if config.gradient_checkpointing:
        model.config.attention_dropout = 0.0
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    return model.to(device or config.device)


def uses_flash(config: TrainEngineConfig) -> bool:
    """Whether passes go through flash-attn's kernels for sequences of various lengths.

    Raises:
        EngineError: It was asked for and is not there.
    """
    if config.attention == "sdpa" or (config.device, config.dtype) != ("cuda", "bfloat16"):
        return False
    if isinstance(config, FsdpConfig) and config.sequence_parallel > 1:
        return False  # what is exchanged around attention goes through SDPA
    from transformers.utils import is_flash_attn_2_available

    if is_flash_attn_2_available():
        return True
    if config.attention == "flash":
        raise EngineError(
            "learner.engine.attention: is flash, and flash-attn is not there or not for this GPU; "
            "must be sdpa or auto then. Install areal-ray[flash-attn], or change it."
        )
    return False


def _without_weights(kind: Any, path: Path | str, how: Any, fields: Any) -> Any:
    from transformers import AutoConfig

    made_of = AutoConfig.from_pretrained(path, **fields)
    with torch.device("meta"):
        return kind.from_config(made_of, **how)
