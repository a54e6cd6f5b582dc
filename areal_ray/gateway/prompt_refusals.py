"""What a client is told whose conversation becomes no prompt."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal_ray.gateway.call import Call, CallError
from areal_ray.gateway.messages import canonical, in_call_order
from areal_ray.gateway.template import ChatTemplate

TOO_LONG = "context_length_exceeded"
_MESSAGE = re.compile(r"messages\[(\d+)\]")


def too_long(num_tokens: int, context_tokens: int) -> CallError:
    """400: agents know an overflow by either of these texts, and read the bound from it."""
    return CallError(
        400,
        TOO_LONG,
        f"This model's maximum context length is {context_tokens} tokens, of which at least 1 is "
        f"for the reply; your messages resulted in {num_tokens} tokens: prompt is too long: "
        f"{num_tokens} tokens > {context_tokens - 1} maximum. Shorten them",
        param="messages",
    )


def refusal(template: ChatTemplate, call: Call, error: ValueError) -> CallError:
    """400, with the message at fault, where the client's own body has it.

    Args:
        template: That refused them, or could not read one.
        call: Whose messages.
        error: Why.
    """
    where, _, told = str(error).partition(":")
    if found := _MESSAGE.match(where):
        message = in_call_order(call.messages)[int(found[1])]
        index = next(at for at, one in enumerate(call.messages) if one is message)
        where = _place(call, index) + where[found.end() :]
        return CallError(400, "invalid_value", f"{where}:{told}", param=where)
    plain = [canonical(message, index) for index, message in enumerate(call.messages)]
    if _is_taken(template, plain):  # what is wrong is in none of them
        return CallError(400, "invalid_value", f"messages: {error}", param="messages")
    taken, refused = 0, len(plain)
    while refused - taken > 1:  # one after the other would take minutes where there are thousands
        middle = (taken + refused) // 2
        if _is_taken(template, plain[:middle]):
            taken = middle
        else:
            refused = middle
    where = _place(call, refused - 1)
    return CallError(400, "invalid_value", f"{where}: {error}", param=where)


def _place(call: Call, index: int) -> str:
    return call.places[index] if call.places else f"messages[{index}]"


def _is_taken(template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> bool:
    try:
        template.render(messages, add_generation_prompt=False)
    except ValueError:
        return False
    return True
