"""A body of each dialect that uses all it can, and how an agent goes on from a reply to one."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.gateway import TOOL, Answered

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
HELLO = "1 plus 1?"


@dataclass(frozen=True)
class Spoken:
    """How a dialect is spoken."""

    path: str
    body: dict[str, Any]
    """With every field that means something, and some that mean nothing."""
    start: dict[str, Any]
    """A plain first request with a tool."""
    turn: Callable[[dict[str, Any]], list[Any]]
    """Of a reply: the assistant's turn, as its client sends it again."""
    results: Callable[[dict[str, Any]], list[Any]]
    """Of a reply: the results of its calls, as messages or items."""
    history: str
    """The field that holds the conversation."""

    def error(self, told: Any) -> dict[str, Any]:
        """What an error says, if it is in the dialect's own shape and nothing else is there."""
        if self.history == "messages" and "completions" not in self.path:
            assert set(told) == {"type", "error", "request_id"}
            assert told["type"] == "error"
            assert set(told["error"]) == {"type", "message"}
        else:
            assert set(told) == {"error"}
            assert set(told["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = told["error"]
        assert error["type"]
        assert error["message"]
        return error

    def next(self, before: dict[str, Any], answer: Answered) -> dict[str, Any]:
        """The request that goes on from the answer to the one before."""
        reply = answer.json()
        grown = [*before[self.history], *self.turn(reply), *self.results(reply)]
        return {**before, self.history: grown}


CHAT_CALL = {
    "id": "call1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}
CHAT = Spoken(
    "/v1/chat/completions",
    {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": HELLO}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [CHAT_CALL],
                "reasoning_content": "Hm.",
            },
            {"role": "tool", "tool_call_id": "call1", "name": "add", "content": "2"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "n": 1,
        "seed": 3,
        "stop": ["end"],
        "temperature": 1.0,
        "top_p": 1.0,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        "parallel_tool_calls": True,
        "user": "u",
    },
    {"model": "m", "messages": [{"role": "user", "content": HELLO}], "tools": [TOOL]},
    lambda reply: [reply["choices"][0]["message"]],
    lambda reply: [
        {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        for call in reply["choices"][0]["message"]["tool_calls"]
    ],
    "messages",
)

ADD = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
RESPONSES = Spoken(
    "/v1/responses",
    {
        "model": "m",
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
            {"type": "message", "role": "user", "content": HELLO},
            {
                "type": "reasoning",
                "id": f"rs_{'0' * 32}_0",
                "summary": [{"type": "summary_text", "text": "Hm."}],
                "content": None,
                "encrypted_content": "0" * 20,
            },
            {
                "type": "message",
                "id": f"msg_{'0' * 32}_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "So:", "annotations": []}],
            },
            {
                "type": "function_call",
                "call_id": "call1",
                "name": "spawn",
                "namespace": "agents",
                "arguments": '{"a": 1}',
            },
            {"type": "custom_tool_call", "call_id": "call2", "name": "patch", "input": "x"},
            {"type": "function_call_output", "call_id": "call1", "output": "2"},
            {
                "type": "custom_tool_call_output",
                "call_id": "call2",
                "output": [{"type": "input_text", "text": "3"}],
            },
            {"type": "item_reference", "id": "x"},
        ],
        "tools": [
            ADD,
            {"type": "namespace", "name": "agents", "tools": [{**ADD, "name": "spawn"}]},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
        ],
        "tool_choice": {"type": "function", "name": "add", "namespace": "agents"},
        "parallel_tool_calls": False,
        "max_output_tokens": 5,
        "stop": ["end"],
        "seed": 3,
        "temperature": 1.0,
        "top_p": 1.0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "prompt_cache_key": "thread-1",
        "previous_response_id": None,
        "metadata": {"a": "b"},
        "client_metadata": {"x-codex-turn-metadata": "{}"},
        "truncation": "auto",
        "store": False,
        "stream": True,
        "user": "u",
    },
    {"model": "m", "input": [{"role": "user", "content": HELLO}], "tools": [ADD]},
    lambda reply: reply["output"],
    lambda reply: [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "2"}
        for item in reply["output"]
        if item["type"] == "function_call"
    ],
    "input",
)

ANTHROPIC_ADD = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
MARK = {"cache_control": {"type": "ephemeral"}}
MESSAGES = Spoken(
    "/v1/messages",
    {
        "model": "m",
        "max_tokens": 5,
        "system": [
            {"type": "text", "text": "x-billing: cch=ab12;"},
            {"type": "text", "text": "Be brief.", **MARK},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": HELLO, **MARK}]},
            {"role": "system", "content": "It is Monday."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "0" * 20},
                    {"type": "text", "text": "So:"},
                    {"type": "tool_use", "id": "call1", "name": "add", "input": {"a": 1}},
                    {"type": "server_tool_use", "id": "call9", "name": "web", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call1",
                        "content": [{"type": "text", "text": "2"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "And?"},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "Agents: none."}]},
        ],
        "tools": [
            ANTHROPIC_ADD,
            {"name": "Later", "input_schema": {}, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        "stop_sequences": ["end"],
        "temperature": 1.0,
        "top_p": 1.0,
        "thinking": {"type": "adaptive", "display": "omitted"},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {}}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": '{"session_id": "s"}'},
        "stream": True,
    },
    {
        "model": "m",
        "max_tokens": 512,
        "messages": [{"role": "user", "content": HELLO}],
        "tools": [ANTHROPIC_ADD],
    },
    lambda reply: [{"role": "assistant", "content": reply["content"]}],
    lambda reply: [
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": block["id"], "content": "2"}
                for block in reply["content"]
                if block["type"] == "tool_use"
            ],
        }
    ],
    "messages",
)
DIALECTS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}


def copied(value: Any) -> Any:
    """The same, to be changed."""
    return json.loads(json.dumps(value))
