"""What an adapter must know of the model that another program serves: read from its files alone."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.context_window import LARGEST_TOKENS, allowed_tokens
from areal_ray.engines.model_files import is_head_tied, load_config, model_folder, stop_token_ids
from areal_ray.engines.protocols import GenerationRequest
from areal_ray.engines.saved_config import read_saved_config
from areal_ray.engines.stop_strings import StopStrings
from areal_ray.errors import DataError, EngineError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model folder, read."""

    folder: Path
    window_tokens: int
    """Prompt and sampled tokens of one sequence."""
    allowed_tokens: int
    """What the model itself allows."""
    vocab_size: int
    stop_ids: tuple[int, ...]
    stop_strings: StopStrings
    weight_shapes: dict[str, tuple[int, ...]]
    """Of every tensor of the checkpoint, a tied head left out."""

    def why_refused(self, request: GenerationRequest) -> str:
        """Empty if a request can be served, else what is wrong with it."""
        sampling, prompt = request.sampling, request.prompt_ids
        if wrong := self.why_ids_refused(prompt, room=1):
            return wrong
        if sampling.adjustments:
            return (
                f"{', '.join(sampling.adjustments)}: the server would record the log-probs of what "
                "they make of the policy, not the policy's own. Leave them out, or use "
                "rollout.engine.kind: torch."
            )
        return self.stop_strings.load() if sampling.stop else ""

    def why_ids_refused(self, token_ids: NDArray[np.int32], *, room: int = 0) -> str:
        """Empty if the model can read these ids and sample `room` more, else what is wrong."""
        if len(token_ids) == 0:
            return "the prompt is empty; it must hold at least one token."
        if len(token_ids) + room > self.window_tokens:
            return (
                f"the prompt has {len(token_ids)} tokens, the context window "
                f"{self.window_tokens}, of which {room} must be left. Shorten it or raise "
                "max_context_tokens."
            )
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= self.vocab_size:
            return (
                f"token ids are {low}..{high}, must be in 0..{self.vocab_size - 1}. "
                "Use the tokenizer of the model."
            )
        return ""


def read_served_model(path: str | Path, max_context_tokens: int) -> ServedModel:
    """Read a Hugging Face model folder, its tensors' names and shapes but not their values.

    Raises:
        DataError: The folder cannot be used.
        EngineError: The window asked for is more than the model's.
    """
    folder = model_folder(path)
    config: Any = read_saved_config(folder) or load_config(folder)
    names = ("max_position_embeddings", "sliding_window", "layer_types")
    allowed = allowed_tokens(*(getattr(config, name, None) for name in names)) or LARGEST_TOKENS
    if max_context_tokens > allowed:
        raise EngineError(
            f"max_context_tokens: is {max_context_tokens}, the model allows {allowed}; it must not "
            "exceed that. Lower it, or set 0 for what the model allows."
        )
    shapes = dict(_shapes(folder))
    if is_head_tied(config):
        shapes.pop("lm_head.weight", None)
    return ServedModel(
        folder=folder,
        window_tokens=max_context_tokens or min(allowed, LARGEST_TOKENS),
        allowed_tokens=allowed,
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
