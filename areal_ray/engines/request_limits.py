"""What a generation engine can take: its context window, and the requests that fit it."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_ray.core.context_window import LARGEST_TOKENS, allowed_tokens
from areal_ray.engines.protocols import GenerationRequest, GenerationResult
from areal_ray.engines.row_table import failed_result
from areal_ray.errors import EngineError


def context_window(wanted: int, model_config: Any) -> int:
    """Tokens of prompt and reply that an engine serves.

    Args:
        wanted: By the recipe; 0 = what the model allows, at most LARGEST_TOKENS.
        model_config: The model's, by Transformers' names.

    Raises:
        EngineError: The model allows fewer.
    """
    names = ("max_position_embeddings", "sliding_window", "layer_types")
    allowed = allowed_tokens(*(getattr(model_config, name, None) for name in names))
    allowed = allowed or LARGEST_TOKENS
    if wanted > allowed:
        raise EngineError(
            f"max_context_tokens: is {wanted}, the model allows {allowed}; it must not exceed "
            "that. Lower it, or set 0 for what the model allows."
        )
    return wanted or min(allowed, LARGEST_TOKENS)


def sound_and_refused(
    requests: Iterable[GenerationRequest], why_refused: Callable[[GenerationRequest], str]
) -> tuple[list[GenerationRequest], list[GenerationResult]]:
    """The requests that can be served, and what comes back for the others."""
    sound, refused = [], []
    for request in requests:
        why = why_refused(request)
        if why:
            refused.append(failed_result(request.request_id, why, is_refused=True))
        else:
            sound.append(request)
    return sound, refused


def why_ids_refused(
    token_ids: NDArray[np.int32], longest: int, window_tokens: int, vocab_size: int
) -> str:
    """Empty if an engine can read these ids [T], else what is wrong with them.

    Args:
        token_ids: Of a prompt.
        longest: Tokens that it may have: the window, or one less where a token is to follow.
        window_tokens: Of the engine.
        vocab_size: Of the model.
    """
    if len(token_ids) == 0:
        return "the prompt is empty; it must hold at least one token."
    if len(token_ids) > longest:
        room = "" if longest == window_tokens else "; it must leave room for one token"
        return (
            f"the prompt has {len(token_ids)} tokens, the context window "
            f"{window_tokens}{room}. Shorten it or raise max_context_tokens."
        )
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        return (
            f"token ids are {low}..{high}, must be in 0..{vocab_size - 1}. "
            "Use the tokenizer of the model."
        )
    return ""
