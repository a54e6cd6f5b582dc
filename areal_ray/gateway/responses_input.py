"""What OpenAI's Responses send: items put together to turns, and functions among other tools.

A turn comes as several items: its reasoning, what it says, its calls. Items of one reply belong
together by the ids we gave them; clients that drop ids still send them in a row.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_ray.gateway.fields import read_function, read_items, read_parts, refuse, shown

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})_\d+")


def item_id(prefix: str, reply_id: str, index: int) -> str:
    """The id of an item that we give out; prefix rs, msg or fc."""
    return f"{prefix}_{reply_id}_{index}"


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The functions of a call, by the name that the model is shown."""

    functions: Sequence[dict[str, Any]]
    origins: Mapping[str, tuple[str, str]]
    """Of functions in a namespace: name shown -> namespace and name there."""

    def shown_name(self, namespace: Any, name: str) -> str:
        """Under which name the model is shown a function that a client names."""
        for shown_name, origin in self.origins.items():
            if origin == (namespace, name):
                return shown_name
        return name


def read_offered(body: Mapping[str, Any]) -> OfferedTools:
    """The functions among the tools of a body, those in namespaces too; other tools run at the
    provider that a client was made for, and are passed over.
    """
    functions: list[dict[str, Any]] = []
    origins: dict[str, tuple[str, str]] = {}
    spaced: list[tuple[str, dict[str, Any]]] = []
    for where, tool in read_items(body, "tools"):
        if tool.get("type") == "function":
            functions.append(read_function(tool, where))
        elif tool.get("type") == "namespace" and type(tool.get("name")) is str:
            inner = [item for _, item in read_items(tool, "tools")]
            spaced += [
                (tool["name"], read_function(one, f"{where}.tools[{index}]"))
                for index, one in enumerate(inner)
                if one.get("type", "function") == "function"
            ]
    taken = {tool["function"]["name"] for tool in functions}
    for namespace, tool in spaced:
        name = tool["function"]["name"]
        told = f"{namespace}__{name}" if name in taken else name
        taken.add(told)
        origins[told] = (namespace, name)
        functions.append({**tool, "function": {**tool["function"], "name": told}})
    return OfferedTools(functions, origins)


def read_input(
    body: Mapping[str, Any], tools: OfferedTools
) -> tuple[list[dict[str, Any]], list[str]]:
    """The canonical messages in a body's `input`, and where the first item of each stands.

    Raises:
        CallError: 400, with the item at fault.
    """
    given = body.get("input")
    if type(given) is str:
        return [{"role": "user", "content": given}], ["input"]
    turns, places = _Turns(tools), list[str]()
    for where, item in read_items(body, "input"):
        turns.read(item, where)
        places += [where] * (len(turns.messages) - len(places))
    return turns.messages, places


@dataclass(slots=True)
class _Turns:
    tools: OfferedTools
    messages: list[dict[str, Any]] = field(default_factory=list)
    _last: str = ""
    """Kind of the last item if it was the assistant's."""
    _by_reply: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Our reply -> the message it became."""
    _reply: str = ""
    """Of the message that was last added to, where it is known."""

    def read(self, item: dict[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else "")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            message = self._assistant(item, kind)
            message["reasoning"] = message.get("reasoning", "") + _reasoning(item, where)
            if type(item.get("encrypted_content")) is str:
                message["handle"] = item["encrypted_content"]
        elif kind in ("function_call", "custom_tool_call"):
            message = self._assistant(item, "call")
            message.setdefault("tool_calls", []).append(self._call(item, where))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._last = ""
            call_id = _string(item, "call_id", where)
            text = read_parts(item.get("output"), f"{where}.output")
            self.messages.append({"role": "tool", "content": text, "tool_call_id": call_id})

    def _message(self, item: dict[str, Any], where: str) -> None:
        role = item.get("role")
        if type(role) is not str or role not in _ROLES:
            refuse(f"{where}.role", f"is {shown(role)}; must be one of {', '.join(_ROLES)}")
        text = read_parts(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._assistant(item, "message")["content"] += text
        else:
            self._last = ""
            self.messages.append({"role": _ROLES[role], "content": text})

    def _assistant(self, item: dict[str, Any], kind: str) -> dict[str, Any]:
        """The message that an item of the assistant's belongs to."""
        marked = _ITEM_ID.fullmatch(item["id"]) if type(item.get("id")) is str else None
        reply = marked[1] if marked else ""
        found = self._by_reply.get(reply)
        if found is None:
            is_next = bool(self._last) and not (reply and self._reply)
            if kind == "reasoning":
                is_next = is_next and self._last == "reasoning"
            elif kind == "message":
                is_next = is_next and self._last != "message"
            if not is_next:
                self.messages.append({"role": "assistant", "content": ""})
                self._reply = ""
            found = self.messages[-1]
        if reply:
            self._reply = reply
            self._by_reply[reply] = found
        self._last = kind
        return found

    def _call(self, item: dict[str, Any], where: str) -> dict[str, Any]:
        name = self.tools.shown_name(item.get("namespace"), _string(item, "name", where))
        arguments = item.get("arguments")
        if item["type"] == "custom_tool_call":
            arguments = {"input": item.get("input") or ""}
        if type(arguments) not in (str, dict, type(None)):
            refuse(f"{where}.arguments", "must be the JSON text of an object")
        function = {"name": name, "arguments": arguments}
        return {"id": _string(item, "call_id", where), "function": function}


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    whole = read_parts(item.get("content"), f"{where}.content")
    return whole or read_parts(item.get("summary"), f"{where}.summary")


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    text = item.get(name)
    if type(text) is not str or not text:
        refuse(f"{where}.{name}", f"is {shown(text)}; must be a string")
    return text
