"""Clients that stumble over a missing field, each in two turns with a tool; prints the answer.

python tests/support/strict_clients.py NAME URL KEY [stream]
"""

import json
import sys
from typing import Any

QUESTION = "What is 17 plus 25?"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def smolagents(url: str, key: str, stream: bool) -> Any:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("policy", api_base=f"{url}/v1", api_key=key)
    agent = ToolCallingAgent([tool(add)], model, max_steps=4, stream_outputs=stream)
    return agent.run(QUESTION)


def _pydantic_ai(model: Any, stream: bool) -> Any:
    from pydantic_ai import Agent

    async def look(_: Any, events: Any) -> None:
        async for _event in events:
            pass

    agent = Agent(model, tools=[add])
    return agent.run_sync(QUESTION, event_stream_handler=look if stream else None).output


def pydantic_ai_chat(url: str, key: str, stream: bool) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    return _pydantic_ai(OpenAIChatModel("policy", provider=provider), stream)


def pydantic_ai_responses(url: str, key: str, stream: bool) -> Any:
    from pydantic_ai.models.openai import OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=key)
    return _pydantic_ai(OpenAIResponsesModel("policy", provider=provider), stream)


def pydantic_ai_messages(url: str, key: str, stream: bool) -> Any:
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    provider = AnthropicProvider(base_url=url, api_key=key)
    return _pydantic_ai(AnthropicModel("policy", provider=provider), stream)


def _litellm(model: str, base: str, key: str, stream: bool) -> Any:
    import litellm

    schema = {"type": "object", "properties": {n: {"type": "integer"} for n in "ab"}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        asked = {"model": model, "api_base": base, "api_key": key, "tools": tools}
        reply: Any = litellm.completion(messages=messages, stream=stream, **asked)
        if stream:
            reply = litellm.stream_chunk_builder([*reply], messages=messages)
        assert reply.usage.completion_tokens > 0
        said = reply.choices[0].message
        if not said.tool_calls:
            return said.content
        messages.append(said.model_dump())
        for call in said.tool_calls:
            text = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def litellm_chat(url: str, key: str, stream: bool) -> Any:
    return _litellm("openai/policy", f"{url}/v1", key, stream)


def litellm_messages(url: str, key: str, stream: bool) -> Any:
    return _litellm("anthropic/policy", url, key, stream)


if __name__ == "__main__":
    name, url, key, *streams = sys.argv[1:]
    print("ANSWER", globals()[name](url, key, bool(streams)))
