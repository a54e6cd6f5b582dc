"""What the SGLang adapter must know of the model that a server holds: read from its files alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.engines.constraint_support import WHY_SGLANG_CANNOT
from areal_ray.engines.model_files import is_head_tied, load_config, model_folder, stop_token_ids
from areal_ray.engines.protocols import GenerationRequest
from areal_ray.engines.request_limits import context_window, why_ids_refused
from areal_ray.engines.saved_config import read_saved_config
from areal_ray.engines.stop_strings import StopStrings
from areal_ray.errors import DataError


@dataclass(frozen=True, slots=True)
class SglangModel:
    """A model folder, read."""

    folder: Path
    window_tokens: int
    """Prompt and sampled tokens of one sequence."""
    num_positions: int
    """What the model itself allows; 0 where it does not say."""
    vocab_size: int
    stop_ids: tuple[int, ...]
    stop_strings: StopStrings
    weight_shapes: dict[str, tuple[int, ...]]
    """Of every tensor of the checkpoint, a tied head left out."""

    def why_refused(self, request: GenerationRequest) -> str:
        """Empty if a request can be served, else what is wrong with it."""
        sampling, prompt = request.sampling, request.prompt_ids
        if wrong := self.why_ids_refused(prompt, self.window_tokens - 1):
            return wrong
        if sampling.adjustments:
            return (
                f"{', '.join(sampling.adjustments)}: the server would record the log-probs of what "
                "they make of the policy, not the policy's own. Leave them out, or use "
                "rollout.engine.kind: torch."
            )
        if request.grammar:
            return f"its grammar: {WHY_SGLANG_CANNOT}"
        return self.stop_strings.load() if sampling.stop else ""

    def why_ids_refused(self, token_ids: NDArray[np.int32], longest: int) -> str:
        """Empty if the model can read so many of these ids, else what is wrong with them."""
        return why_ids_refused(token_ids, longest, self.window_tokens, self.vocab_size)


def read_sglang_model(path: str | Path, max_context_tokens: int) -> SglangModel:
    """Read a Hugging Face model folder, its tensors' names and shapes but not their values.

    Raises:
        DataError: The folder cannot be used.
        EngineError: The window asked for is more than the model's.
    """
    folder = model_folder(path)
    config: Any = read_saved_config(folder) or load_config(folder)
    shapes = dict(_shapes(folder))
    if is_head_tied(config):
        shapes.pop("lm_head.weight", None)
    return SglangModel(
        folder=folder,
        window_tokens=context_window(max_context_tokens, config),
        num_positions=int(getattr(config, "max_position_embeddings", 0) or 0),
        vocab_size=int(config.vocab_size),
        stop_ids=stop_token_ids(folder),
        stop_strings=StopStrings(folder),
        weight_shapes=shapes,
    )


def _shapes(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    from safetensors import SafetensorError, safe_open

    found = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as opened:
                for name in opened.keys():  # noqa: SIM118 (not iterable itself)
                    found.append((name, tuple(opened.get_slice(name).get_shape())))
        except SafetensorError as error:
            raise DataError(
                f"model.path: {file} cannot be read: {error}. Copy it again."
            ) from error
    if not found:
        raise DataError(
            f"model.path: {folder} holds no .safetensors file. Save the model with "
            "`save_pretrained` of a current Transformers."
        )
    return found
