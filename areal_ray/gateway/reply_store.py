"""Conversations that clients go on with by naming a reply, instead of sending them again.

Bounded: the conversations named least lately are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from areal_ray.gateway.call import Call, CallError, CallReply

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    owner: bytes
    messages: Messages
    num_characters: int


class ReplyStore:
    """The conversations up to the replies given last.

    Args:
        max_replies: More are forgotten.
        max_characters: Of all together, what they were sent anew counted.
    """

    def __init__(self, max_replies: int = 4096, max_characters: int = 64 * 2**20) -> None:
        self._max_replies = max_replies
        self._max_characters = max_characters
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._num_characters = 0

    def __len__(self) -> int:
        return len(self._stored)

    def resumed(self, call: Call, owner: str) -> Call:
        """The call with the conversation that it goes on from before its own messages.

        Args:
            call: As read.
            owner: Whose conversations it may name: the key and the session it came with.

        Raises:
            CallError: 400: the owner has no such reply, or it is forgotten.
        """
        name = call.hints.previous_response_id
        if not name:
            return call
        found = self._stored.get(name)
        if found is None or found.owner != _digest(owner):
            raise CallError(
                400,
                "previous_response_not_found",
                f"previous_response_id: no reply {name[:80]!r} is kept here; must be the id of a "
                "late one that was stored. Send the whole conversation as input",
                param="previous_response_id",
            )
        self._stored.move_to_end(name)
        lead = call.num_instructions
        messages = (*call.messages[:lead], *found.messages, *call.messages[lead:])
        earlier = ("previous_response_id",) * len(found.messages)
        places = (*call.places[:lead], *earlier, *call.places[lead:])
        return replace(call, messages=messages, places=places)

    def keep(self, name: str, call: Call, reply: CallReply, owner: str) -> None:
        """Keep the conversation up to a reply.

        Args:
            name: What later calls name it by.
            call: As `resumed` returned it.
            reply: The answer to it; its first choice is what was said.
            owner: As of `resumed`.
        """
        messages = (*call.messages[call.num_instructions :], _reply_message(reply))
        earlier = self._stored.get(call.hints.previous_response_id)
        num_shared = 0 if earlier is None else len(earlier.messages)
        num_characters = sum(map(_num_characters, messages[num_shared:]))
        self._stored[name] = _Stored(_digest(owner), messages, num_characters)
        self._num_characters += num_characters
        while self._stored and (
            len(self._stored) > self._max_replies or self._num_characters > self._max_characters
        ):
            _, dropped = self._stored.popitem(last=False)
            self._num_characters -= dropped.num_characters


def _digest(owner: str) -> bytes:
    return blake2b(owner.encode(), digest_size=16).digest()


def _num_characters(message: Mapping[str, Any]) -> int:
    calls: Sequence[Any] = message.get("tool_calls", ())
    said = len(message["content"]) + len(message.get("reasoning", ""))
    return said + sum(len(str(call["function"]["arguments"])) for call in calls)


def _reply_message(reply: CallReply) -> dict[str, Any]:
    """As the client would send it again."""
    choice = reply.choices[0]
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    if choice.reasoning:
        message["reasoning"] = choice.reasoning
    return {**message, "handle": choice.handle}
