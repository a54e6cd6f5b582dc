"""How many tokens of prompt and reply a model may hold.

One rule for the engines and for the agents that prompt them: an agent that thinks the window wider
would send prompts that the engine refuses.
"""

from collections.abc import Sequence

LARGEST_TOKENS = 8192
"""Unless a recipe asks for more: a window costs memory for each sequence."""


def allowed_tokens(
    max_positions: int | None, sliding_window: int | None, layer_types: Sequence[str] | None
) -> int:
    """Tokens that a model allows; 0 where its config does not say.

    Args:
        max_positions: Positions that it was trained on.
        sliding_window: Tokens that a sliding layer sees. It is not slid: sequences end at its size.
        layer_types: Of each layer, where the config tells; without it all may slide.
    """
    slides = layer_types is None or "sliding_attention" in layer_types
    if sliding_window and slides:
        return min(max_positions or LARGEST_TOKENS, sliding_window)
    return max_positions or 0
