"""A model made ready for the torch generation engine: forward, precision, window, stop tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_ray.core.grammars import Grammars
from areal_ray.engines.cached_model import Forward
from areal_ray.engines.lean_forward import LeanForward, why_not_lean
from areal_ray.engines.logit_adjustments import why_bias_refused
from areal_ray.engines.lora_config import LoraSetup
from areal_ray.engines.lora_forward import LoraForward
from areal_ray.engines.lora_weights import adapted_layers, plain_layers
from areal_ray.engines.model_files import (
    check_tensors,
    load_config,
    load_tensors,
    model_folder,
    stop_token_ids,
)
from areal_ray.engines.protocols import GenerationRequest
from areal_ray.engines.request_limits import context_window, why_ids_refused
from areal_ray.engines.saved_config import read_saved_config
from areal_ray.engines.stop_strings import StopStrings
from areal_ray.engines.torch_generation_config import TorchGenerationConfig
from areal_ray.errors import EngineError


@dataclass(frozen=True, slots=True)
class GenerationModel:
    """What the engine needs to know of its model."""

    forward: Forward
    dtype: torch.dtype
    device: torch.device
    window_tokens: int
    """Prompt and sampled tokens of one sequence."""
    vocab_size: int
    stop_ids: tuple[int, ...]
    stop_strings: StopStrings
    grammars: Grammars

    def why_refused(self, request: GenerationRequest) -> str:
        """Empty if a request can be served, else what is wrong with it."""
        wrong = self.why_ids_refused(request.prompt_ids, self.window_tokens - 1)
        wrong = wrong or why_bias_refused(request.sampling, self.vocab_size)
        if not wrong and request.sampling.stop:
            return self.stop_strings.load()
        return wrong

    def why_ids_refused(self, token_ids: NDArray[np.int32], longest: int) -> str:
        """Empty if the model can read so many of these ids, else what is wrong with them."""
        limits = (longest, self.window_tokens, self.vocab_size)
        return why_ids_refused(token_ids, *limits)


def load_generation_model(
    path: str | Path, config: TorchGenerationConfig, lora: LoraSetup | None = None
) -> GenerationModel:
    """Read a Hugging Face model folder.

    Args:
        path: The folder, or a hub name.
        config: Forward, precision, place and window.
        lora: Of the adapters that its weights change by; None = all weights change.

    Raises:
        DataError: The folder cannot be used.
        EngineError: The model is not one this engine can run.
        RecipeError: It has no layers of the names in `lora`.
    """
    folder = model_folder(path)
    model_config = read_saved_config(folder) if config.forward != "hf" else None
    if model_config is None or why_not_lean(model_config):
        model_config = load_config(folder)
    if not hasattr(model_config, "vocab_size"):
        raise EngineError(
            f"model.path: {folder} holds a {model_config.model_type} model, which is not a plain "
            "decoder; it must be a text-only causal language model. Use another model."
        )
    device = _device(config.device)
    dtype = _dtype(config.dtype, device, model_config)
    stop_ids = stop_token_ids(folder)
    return GenerationModel(
        forward=_load_forward(_Source(folder, model_config, dtype, device), config.forward, lora),
        dtype=dtype,
        device=device,
        window_tokens=context_window(config.max_context_tokens, model_config),
        vocab_size=int(model_config.vocab_size),
        stop_ids=stop_ids,
        stop_strings=StopStrings(folder),
        grammars=Grammars(
            (folder / "tokenizer.json").read_text, int(model_config.vocab_size), stop_ids
        ),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _dtype(name: str, device: torch.device, model_config: Any) -> torch.dtype:
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    if device.type == "cpu":
        return torch.float32
    named = model_config.dtype or torch.bfloat16
    stored: torch.dtype = getattr(torch, named) if isinstance(named, str) else named
    return stored


@dataclass(frozen=True, slots=True)
class _Source:
    folder: Path
    config: Any
    dtype: torch.dtype
    device: torch.device


def _load_forward(source: _Source, which: str, lora: LoraSetup | None) -> Forward:
    lacking = why_not_lean(source.config)
    if which == "lean" and lacking:
        raise EngineError(
            f"engine.forward: is lean, but the model has {lacking}, which that forward lacks. "
            "Set forward: auto."
        )
    if which == "hf" or lacking:
        return _load_hf(source, lora)
    forward = LeanForward(source.config, source.dtype, source.device)
    tensors = load_tensors(source.folder, source.config)
    check_tensors(forward.weight_shapes(), tensors)
    with torch.inference_mode():
        forward.install(forward.prepare(tensors))
        if lora is None:
            return forward
        layers = adapted_layers(plain_layers(forward.weight_shapes()), lora.config)
        return LoraForward(forward, tensors, layers, lora, source.device)


def _load_hf(source: _Source, lora: LoraSetup | None) -> Forward:
    from areal_ray.engines.hf_forward import HfForward  # Transformers' models: seconds

    forward = HfForward(source.folder, source.config, source.dtype, source.device)
    if lora is None:
        return forward
    layers = adapted_layers(forward.linear_layers(), lora.config)
    loaded = forward.loaded_weights()
    kept = {f"{name}.weight": loaded[f"{name}.weight"] for name in layers}
    with torch.inference_mode():
        return LoraForward(forward, kept, layers, lora, source.device)
