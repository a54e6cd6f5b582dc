"""What the vLLM engine has to know of its model before vLLM is imported: by its folder alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.engines.logit_adjustments import why_bias_refused
from areal_ray.engines.lora_weights import LinearLayer, linear_layers
from areal_ray.engines.model_files import load_config, model_folder, stop_token_ids
from areal_ray.engines.protocols import GenerationRequest
from areal_ray.engines.request_limits import context_window, why_ids_refused
from areal_ray.errors import EngineError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A checkpoint as the engine serves it."""

    folder: Path
    window_tokens: int
    vocab_size: int
    stop_ids: tuple[int, ...]
    weight_shapes: Mapping[str, tuple[int, ...]]
    """As the train engine names them: of the Transformers model class, tied ones once."""
    layers: Mapping[str, LinearLayer]
    """Those that can have an adapter."""
    stored_dtype: str
    has_tokenizer: bool
    config: Mapping[str, Any]
    """What its config.json says."""

    def why_refused(self, request: GenerationRequest) -> str:
        """Empty if a request can be served, else what is wrong with it."""
        sampling = request.sampling
        if sampling.stop and not self.has_tokenizer:
            return (
                f"its stop strings need a tokenizer, which {self.folder} lacks. Add it, or stop "
                "by stop_token_ids."
            )
        if request.grammar and not self.has_tokenizer:
            return f"its grammar needs a tokenizer, which {self.folder} lacks. Add it."
        wrong = self.why_ids_refused(request.prompt_ids, self.window_tokens - 1)
        return wrong or why_bias_refused(sampling, self.vocab_size)

    def why_ids_refused(self, token_ids: NDArray[np.int32], longest: int) -> str:
        """Empty if the model can read so many of these ids, else what is wrong with them."""
        return why_ids_refused(token_ids, longest, self.window_tokens, self.vocab_size)


def read_served_model(path: str | Path, max_context_tokens: int) -> ServedModel:
    """Look into a Hugging Face model folder.

    Raises:
        DataError: The folder cannot be used.
        EngineError: The window asked for is longer than the model allows, or it is no decoder.
    """
    folder = model_folder(path)
    config = load_config(folder)
    if not hasattr(config, "vocab_size"):
        raise EngineError(
            f"model.path: {folder} holds a {config.model_type} model, which is not a plain "
            "decoder; it must be a text-only causal language model. Use another model."
        )
    empty = _empty_model(config)
    stored = getattr(config, "dtype", None) or "bfloat16"
    return ServedModel(
        folder=folder,
        window_tokens=context_window(max_context_tokens, config),
        vocab_size=int(config.vocab_size),
        stop_ids=stop_token_ids(folder),
        weight_shapes={name: tuple(p.shape) for name, p in empty.named_parameters()},
        layers=linear_layers(empty),
        stored_dtype=str(stored).removeprefix("torch."),
        has_tokenizer=any((folder / name).is_file() for name in _TOKENIZERS),
        config=config.to_dict(),
    )


def _empty_model(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):  # shapes without memory
        return AutoModelForCausalLM.from_config(config)
