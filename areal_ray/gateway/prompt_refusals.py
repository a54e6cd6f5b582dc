"""What a client is told whose conversation becomes no prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_ray.gateway.call import CallError
from areal_ray.gateway.messages import canonical
from areal_ray.gateway.template import ChatTemplate


def too_long(num_tokens: int, context_tokens: int) -> CallError:
    """400: agents know an overflow by either of these texts, and read the bound from it."""
    return CallError(
        400,
        "context_length_exceeded",
        f"This model's maximum context length is {context_tokens} tokens, of which at least 1 is "
        f"for the reply; your messages resulted in {num_tokens} tokens: prompt is too long: "
        f"{num_tokens} tokens > {context_tokens - 1} maximum. Shorten them",
        param="messages",
    )


def refusal(template: ChatTemplate, messages: Sequence[Any], error: ValueError) -> CallError:
    """400, with the message at fault.

    Args:
        template: That refused them, or could not read one.
        messages: Of the call.
        error: Why.
    """
    where, _, _ = str(error).partition(":")
    if where.startswith("messages["):
        return CallError(400, "invalid_value", str(error), param=where)
    plain = [canonical(message, index) for index, message in enumerate(messages)]
    if _is_taken(template, plain):  # what is wrong is in none of them
        return CallError(400, "invalid_value", f"messages: {error}", param="messages")
    taken, refused = 0, len(plain)
    while refused - taken > 1:  # one after the other would take minutes where there are thousands
        middle = (taken + refused) // 2
        if _is_taken(template, plain[:middle]):
            taken = middle
        else:
            refused = middle
    where = f"messages[{refused - 1}]"
    return CallError(400, "invalid_value", f"{where}: {error}", param=where)


def _is_taken(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> bool:
    try:
        template.render(messages, add_generation_prompt=False)
    except ValueError:
        return False
    return True
